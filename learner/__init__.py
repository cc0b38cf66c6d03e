"""Learning: scored groups in, new weights out (buffer, objectives, FSDP2 step, publishing)."""
