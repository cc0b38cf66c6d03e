"""Generation: prompts in, groups of answers out (vLLM engines, one Ray actor each)."""
