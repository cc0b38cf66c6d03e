"""The message by which weights come to an engine on the same host: one file in shared memory, and what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHARED_MEMORY = Path("/dev/shm")
ALIGN = 64  # bytes; every tensor starts on its own cache line


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a transfer: where its bytes lie in the file, and their fingerprint."""

    name: str
    dtype: str  # torch's name, e.g. float32
    shape: tuple[int, ...]
    offset: int  # bytes
    size: int  # bytes
    fingerprint: int


@dataclass(frozen=True)
class DeltaEntry:
    """A file with what changed since the version (attempt, version) `base` (`rollout.delta`)."""

    base: tuple[int, int]
    path: str
    size: int  # bytes


@dataclass(frozen=True)
class WeightManifest:
    """One version of the weights in a file of shared memory.

    `version` counts batches committed; `attempt` counts restarts that went back in time. `host` names the machine
    whose shared memory holds `path`. `delta`: for who holds the version before, what changed since; None where that is not kept
    or not smaller.
    """

    attempt: int
    version: int
    host: str
    path: str
    tensors: tuple[TensorEntry, ...]
    delta: DeltaEntry | None = None

    @property
    def name(self) -> tuple[int, int]:
        """What tells versions apart."""
        return self.attempt, self.version

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return max((t.offset + t.size for t in self.tensors), default=0)


def fingerprint(data: np.ndarray) -> int:
    """64-bit fingerprint of a tensor's bytes (uint8): the wrapped sum of its words, mixed with its length.

    It runs at memory speed and catches any single corrupted word, a truncated and a stale tensor; it is no
    defence against an adversary.
    """
    whole = data.size // 8 * 8
    total = int(np.add.reduce(data[:whole].view(np.uint64), dtype=np.uint64)) if whole else 0
    tail = int.from_bytes(data[whole:].tobytes(), "little")
    return (total + tail * 0x9E3779B97F4A7C15 + data.size) % 2**64
