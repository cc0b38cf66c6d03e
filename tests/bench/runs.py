"""`winnow train` as a benchmark uses it: started, pinned to cores where asked, watched line by line, and read afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

MARK = "WINNOW_BENCH_MARK"  # in the environment of all processes of a run
QUIET = ["--wandb", "off", "--display", "plain"]


class Run:
    """One run under way. `seconds` is the time since its start at which a line of its output matched a pattern."""

    def __init__(self, flags: list[str], run_dir: Path) -> None:
        self.run_dir, self.mark = run_dir, uuid.uuid4().hex
        command = [sys.executable, "-m", "cluster.launch", "train", *flags, *QUIET, "--run_dir", str(run_dir)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: self.mark}
        self.started = time.monotonic()
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, env=env, text=True, **pipes)
        self.lines: list[str] = []

    def until(self, pattern: str) -> float:
        """Seconds from the start to the first line that matches. Raises RuntimeError when the run ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if re.search(pattern, line):
                return time.monotonic() - self.started
        raise RuntimeError("the run ended before a line matched " + pattern + ":\n" + "\n".join(self.lines[-20:]))

    def pin(self, cores: dict[str, set[int]]) -> None:
        """Bind the run's processes whose title holds a key to these cores, all their threads."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) != self.mark:
                    continue
                title = " ".join(process.cmdline())
                for word, chosen in cores.items():
                    if word in title:
                        for thread in process.threads():
                            os.sched_setaffinity(thread.id, chosen)
            except (psutil.Error, OSError):
                continue

    def end(self, seconds: float = 300.0) -> None:
        """Wait for its end. Raises RuntimeError when it failed."""
        out, _ = self.process.communicate(timeout=seconds)
        self.lines += out.splitlines()
        if self.process.returncode:
            raise RuntimeError("winnow train failed:\n" + "\n".join(self.lines[-20:]))

    def interrupt(self) -> None:
        """Ctrl-C, and wait."""
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=120)

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of its steps."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


def total(rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float] | str) -> float:
    """The sum of one metric, or of what is made of a row."""
    return sum(float(r.get(value, 0.0)) if isinstance(value, str) else value(r) for r in rows)
