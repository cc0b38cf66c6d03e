"""Memory and open files of every process of a run over time, and what of it grows.

Private memory is what a process has resident and shares with nobody: resident − shared, in MiB.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from tests.chaos.processes import marked, role_of

EVERY = 3.0  # seconds between two samples
RAY_OWN = {"gcs_server": "ray gcs", "raylet/raylet": "raylet", "dashboard/agent": "ray agent", "runtime_env/agent": "ray env agent"}
FLAT = 1.0  # MiB a minute by which a process may grow ...
FLAT_SHARE = 0.002  # ... or this share of its size, if that is more
FILES = 8  # open files more at the end of a process's window than at its beginning


@dataclass
class Series:
    """One process: seconds, MiB of private memory, and open files."""

    role: str
    seconds: list[float] = field(default_factory=list)
    private: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Growth:
    """What a process grew by after its warm-up. `slope` is in MiB a minute, `minutes` the length of what was looked at."""

    role: str
    pid: int
    minutes: float
    size: float
    slope: float
    files: int

    @property
    def flat(self) -> bool:
        """Whether neither memory nor open files grow beyond what is allowed."""
        return self.slope <= max(FLAT, FLAT_SHARE * self.size) and self.files <= FILES


def slope_of(x: Sequence[float], y: Sequence[float]) -> float:
    """Theil–Sen: the median of the slopes between halves, point i against point i + n/2, which no single jump can move."""
    half = len(x) // 2
    return median([(y[i + half] - y[i]) / (x[i + half] - x[i]) for i in range(half)])


def median(values: Sequence[float]) -> float:
    """The middle value; of an even number the upper one of the two."""
    return sorted(values)[len(values) // 2]


def growth(series: Mapping[int, Series], warm: float, least: float) -> list[Growth]:
    """Each process that lived `warm` + `least` seconds, looked at after its first `warm` seconds; the steepest first."""
    found = []
    for pid, one in series.items():
        keep = [i for i, t in enumerate(one.seconds) if t - one.seconds[0] >= warm]
        if len(keep) < 8 or one.seconds[keep[-1]] - one.seconds[keep[0]] < least:
            continue
        minutes = [one.seconds[i] / 60 for i in keep]
        private, files, part = [one.private[i] for i in keep], [one.files[i] for i in keep], max(len(keep) // 4, 1)
        more = median(files[-part:]) - median(files[:part])
        found.append(Growth(one.role, pid, minutes[-1] - minutes[0], median(private), slope_of(minutes, private), int(more)))
    return sorted(found, key=lambda g: -g.slope)


class Sampler(threading.Thread):
    """Takes a sample of all processes of a mark every few seconds, until `stop`."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self.mark = mark
        self.series: dict[int, Series] = {}
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(EVERY):
            now = time.monotonic()
            for pid, command in marked(self.mark).items():
                role = role_of(command) or next((name for part, name in RAY_OWN.items() if part in command), "")
                if role:
                    self._sample(pid, role, now)

    def _sample(self, pid: int, role: str, now: float) -> None:
        try:
            process = psutil.Process(pid)
            memory, files = process.memory_info(), process.num_fds()
        except psutil.Error:
            return
        one = self.series.setdefault(pid, Series(role))
        one.seconds.append(now)
        one.private.append((memory.rss - memory.shared) / 2**20)
        one.files.append(files)

    def lines(self) -> list[str]:
        """Every sample as a line of comma-separated values, below a heading."""
        found = ["seconds,pid,role,private_mib,files"]
        for pid, one in self.series.items():
            samples = zip(one.seconds, one.private, one.files, strict=True)
            found += [f"{t:.1f},{pid},{one.role},{mib:.2f},{files}" for t, mib, files in samples]
        return found

    def stop(self) -> None:
        """End it."""
        self._end.set()
        self.join()
