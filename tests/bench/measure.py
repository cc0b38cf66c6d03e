"""How things are measured: pairs in the order A B B A, the machine's own rates, and the peak of a process's memory.

GEMM and memcpy rates are taken in the process, and with the threads, of the benchmark that states its limit by them.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any


def seconds(work: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleave(ours: Callable[[], float], peer: Callable[[], float], pairs: int = 4, warm: bool = True) -> tuple[list[float], list[float]]:
    """`pairs` measurements of each, in the order A B B A A B …; a call measures once and returns its figure.

    `warm`: one of each first.
    """
    assert pairs >= 3, "fewer than three pairs say nothing of the spread"
    if warm:
        ours(), peer()
    mine, theirs = list[float](), list[float]()
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            gc.collect()
            (mine if which == 0 else theirs).append((ours, peer)[which]())
    return mine, theirs


@dataclass(frozen=True)
class Machine:
    """Rates of this process with `threads` threads: float32 matrix products in FLOP/s, and copying in bytes/s (each byte counted once)."""

    threads: int
    gemm: float
    memcpy: float


def gemm_rate(size: int = 1024, tries: int = 9) -> float:
    """FLOP/s of a float32 `size`³ matrix product, the median of `tries`."""
    import torch

    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    torch.mm(a, b, out=out)
    return 2.0 * size**3 / median(seconds(lambda: torch.mm(a, b, out=out)) for _ in range(tries))


def memcpy_rate(megabytes: int = 256, tries: int = 5) -> float:
    """Bytes/s of copying a buffer that no cache holds."""
    import torch

    a = torch.ones(megabytes * 2**20, dtype=torch.uint8)
    b = torch.zeros_like(a)
    return a.numel() / median(seconds(lambda: b.copy_(a)) for _ in range(tries))


def machine() -> Machine:
    """Measure now, in this process."""
    import torch

    return Machine(torch.get_num_threads(), gemm_rate(), memcpy_rate())


def resident() -> int:
    """Bytes of this process that lie in memory, shared ones included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def peak_growth() -> Iterator[list[int]]:
    """Gives a list whose one number is, after the block, by how many bytes the resident memory grew at its peak in it, sampled each ms."""
    gc.collect()
    start, found, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            found[0] = max(found[0], resident() - start)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()
        found[0] = max(found[0], resident() - start)
