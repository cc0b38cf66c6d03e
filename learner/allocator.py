"""How this process's allocator treats memory that is freed, where the learner computes on the CPU."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
KEPT = 2**31 - 1  # bytes free at the heap's top before they go back to the system
OWN_MAPPING = 32 * 2**20  # bytes; the most that mallopt takes
EVERY = 32  # batches

ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}
"""What the process has to be started with: one heap for all its threads. The backward pass runs on a thread of torch's own, whose heap
`keep_freed_memory` does not reach: glibc gives the pieces of such a heap back whole, 28 MiB of them in every step of a tiny model."""


def keep_freed_memory() -> bool:
    """Whether the C library (glibc) was told to keep freed memory for what is allocated next.

    Left to itself it gives activations of some megabytes back to the system at every layer, and each first touch of a page costs
    microseconds on a virtual machine: up to a tenth of a step. Only blocks of more than `OWN_MAPPING` still come and go.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    wanted = ((_MMAP_THRESHOLD, OWN_MAPPING), (_TRIM_THRESHOLD, KEPT))
    return mallopt is not None and all(mallopt(name, value) == 1 for name, value in wanted)


def give_back_unused(batches: int) -> bool:
    """After every `EVERY`-th batch: whether pages that hold nothing went back to the system.

    Every batch has other lengths, so the heap that is kept gets holes which the next one does not fit into, and grows by some MiB a minute.
    What the next batch needs it must touch again, once in so many batches.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and batches % EVERY == 0 and trim(0) == 1
