"""Processes of a run, found by a mark in their environment, which everything that a run starts inherits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "WINNOW_TEST_MARK"

# Part of the command -> what it is, in the words of the schedule.
ROLES = {
    "VLLM::EngineCore": "engine_core",
    "ray::Rollout": "generator",
    "verifier.worker": "verifier_process",
    "ray::VerifierActor": "verifier",
    "ray::LearnerRank": "learner",
    "cluster.launch": "controller",
}


def marked(mark: str, name: str = MARK) -> dict[int, str]:
    """Living processes whose environment carries `name=mark`, this one apart: pid -> command."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if f"{name}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state != "Z":
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def role_of(command: str) -> str:
    """What a process of a run is; "" for Ray's own and those that are only starting."""
    return next((role for part, role in ROLES.items() if part in command), "")


def by_role(mark: str) -> dict[str, list[int]]:
    """Pids of the services of a run, by role, oldest first."""
    found: dict[str, list[int]] = {role: [] for role in ROLES.values()}
    for pid, command in sorted(marked(mark).items()):
        if role := role_of(command):
            found[role].append(pid)
    return found


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each that still lives."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def left_behind(mark: str, seconds: float, *, services_only: bool = False) -> dict[int, str]:
    """What still lives of a run `seconds` after it should be gone; `services_only` leaves Ray's own processes out."""
    deadline = time.monotonic() + seconds
    while True:
        found = {pid: command for pid, command in marked(mark).items() if not services_only or role_of(command)}
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def end_in_order() -> None:
    """Let SIGTERM and SIGINT end this program through its `finally` clauses, also where a shell has it ignore SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
