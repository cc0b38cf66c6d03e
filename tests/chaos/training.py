"""A `winnow train` under way, watched from outside: what it prints, which step it is at, and which of its services are missing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.ledger import read_books
from rollout.errors import UserError
from tests.chaos.nodes import ROOT

STEP = re.compile(r"^step (\d+)/")
LOST = re.compile(r"^(engine|verifier) (\d+) is lost")
BACK = re.compile(r"^(engine|verifier) (\d+) is back")
AGAIN = re.compile(r"life \d+ of the run begins")


class Training:
    """The controller's process, started anew with `--resume` after it was killed. `lines` holds (monotonic seconds, text)."""

    def __init__(self, run_dir: Path, flags: Sequence[str], environment: Mapping[str, str], roles: Mapping[str, int]) -> None:
        """`roles`: how many processes of each role a run has that works normally."""
        self.run_dir, self.flags, self.environment, self.roles = run_dir, list(flags), dict(environment), dict(roles)
        self.lines: list[tuple[float, str]] = []
        self.step = 0
        self.stepped = 0.0  # when the last step was reported
        self.missing: set[str] = set()  # services that are said to be lost
        self.process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._heard = 0  # lines that `until` has passed

    def start(self, *, resume: bool = False) -> None:
        """Start the controller."""
        command = [sys.executable, "-m", "cluster.launch", "train", *self.flags, "--run_dir", str(self.run_dir)]
        self.process = subprocess.Popen(
            [*command, *(["--resume"] if resume else [])],
            cwd=ROOT, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.missing.clear()
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._hear(line.rstrip("\n"))

    def _hear(self, line: str) -> None:
        now = time.monotonic()
        self.lines.append((now, line))
        if found := STEP.match(line):
            self.step, self.stepped = int(found[1]), now
        elif found := LOST.match(line):
            self.missing.add(f"{found[1]} {found[2]}")
        elif found := BACK.match(line):
            self.missing.discard(f"{found[1]} {found[2]}")
        elif AGAIN.search(line):
            self.missing.clear()

    @property
    def code(self) -> int | None:
        """The exit code, or None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def until(self, pattern: str, seconds: float = 120.0) -> str:
        """The first line from now on that matches. Raises RuntimeError when the run ends or the time is over before."""
        deadline, seen = time.monotonic() + seconds, self._heard
        while True:
            for i in range(seen, len(self.lines)):
                self._heard = i + 1
                if re.search(pattern, self.lines[i][1]):
                    return self.lines[i][1]
            seen, over = len(self.lines), self.code is not None or time.monotonic() > deadline
            if over and seen == len(self.lines):
                raise RuntimeError(f"no line matched {pattern!r}:\n{self.tail()}")
            time.sleep(0.05)

    def staffed(self, here: Mapping[str, Sequence[int]], roles: Sequence[str] | None = None) -> bool:
        """Whether every service of these roles (None: of all) is there: none is said to be lost, and each has its number of processes.

        `here`: pids by role.
        """
        asked = [role for role in self.roles if roles is None or role in roles]
        lost = {"engine": "generator", "verifier": "verifier"}  # names in what it prints -> role
        missing = [name for name in self.missing if lost[name.split()[0]] in asked]
        return not missing and all(len(here[role]) >= self.roles[role] for role in asked)

    def kill(self) -> None:
        """SIGKILL to the controller."""
        assert self.process is not None and self._reader is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()

    def kill_if_alive(self) -> None:
        """SIGKILL, unless it has ended."""
        if self.code is None:
            self.kill()

    def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM, and the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.end(seconds)

    def end(self, seconds: float = 60.0) -> int:
        """The exit code, once it has ended by itself."""
        assert self.process is not None and self._reader is not None
        code = self.process.wait(seconds)
        self._reader.join()
        return code

    def tail(self, count: int = 40) -> str:
        """The last lines that it printed."""
        return "\n".join(line for _, line in self.lines[-count:])

    def problems(self) -> list[str]:
        """What is wrong with the books as they stand on disk: `winnow ledger RUN`, and the sum in every row of the metrics."""
        try:
            found = list(read_books(self.run_dir).problems)
        except UserError:
            return []  # no step was taken yet
        for row in rows(self.run_dir / "metrics.jsonl"):
            ended = sum(row[f"ledger/groups_{s}"] for s in ("trained", "uninformative", "failed", "surplus", "kept", "in_flight"))
            if ended != row["ledger/groups_dispatched"]:
                found.append(f"step {row['step']}: {row['ledger/groups_dispatched']} groups dispatched, {ended} accounted for")
        return found


def rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a last line that is being written is left out."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1] if line]
