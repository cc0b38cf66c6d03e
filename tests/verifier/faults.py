"""Reward functions that misbehave in every way a verifier can; the pool's tests name them by dotted path."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def reward(gold, response, meta):
    """Does what `response` says; `gold` is its argument."""
    return globals()[f"do_{response.split()[0]}"](gold, response, meta)


def do_one(gold, response, meta):
    return 1.0


def do_sleep(gold, response, meta):
    time.sleep(60)


def do_power(gold, response, meta):
    return len(str(9**9**9))  # one C call that never comes back to the interpreter


def do_children(gold, response, meta):
    for new_session in (False, True):
        child = subprocess.Popen(["sleep", "60"], start_new_session=new_session, stdin=subprocess.DEVNULL)
        with open(gold, "a") as f:
            f.write(f"{child.pid}\n")
    time.sleep(60)


def do_crash(gold, response, meta):
    with open(gold, "a") as f:
        f.write(f"{os.getpid()}\n")
    os.abort()


def do_crash_once(gold, response, meta):
    first = not Path(gold).exists()
    with open(gold, "a") as f:
        f.write(f"{os.getpid()}\n")
    if first:
        os.abort()
    return 1.0


def do_raise(gold, response, meta):
    with open(gold, "a") as f:
        f.write(f"{os.getpid()}\n")
    raise KeyError("broken")


def do_exit(gold, response, meta):
    sys.exit(0)


def do_nan(gold, response, meta):
    return float("nan")


def do_memory(gold, response, meta):
    return float(len(bytearray(8 << 30)))


def do_print(gold, response, meta):
    os.write(1, b"x" * 1_000_000)
    os.write(2, b"y" * 1_000_000)
    return 1.0


def do_read(gold, response, meta):
    return float(sys.stdin.read() == "")


def do_pid(gold, response, meta):
    time.sleep(0.05)
    return float(os.getpid())
