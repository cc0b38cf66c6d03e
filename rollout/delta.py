"""What changed between two versions of the weights, bit by bit: the elements of new bits, and nothing else.

A version is seen as one row of words (16 or 32 bits, one per element). A changed element costs a byte for its distance to the one before,
two bits where its word moved by one, as nearly all do in 16 bits, and its new word where it did not.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rollout.weights import SHARED_MEMORY, WeightManifest

WORDS: dict[str, type[np.uint16] | type[np.uint32]] = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
FAR = 255  # a distance byte that says: so far on, and nothing changes there


def pack(place_N: np.ndarray, old_N: np.ndarray, new_N: np.ndarray) -> np.ndarray:
    """The bytes of a delta [uint8]: words at the rising places (int64, from the row's start) that were `old_N` and are `new_N`.

    In order: how many distance bytes and how many changes (uint64 each), the distances, whether each word moved by one and whether
    upwards (a bit each), the new words of those that did not.
    """
    distance_N = np.diff(place_N, prepend=0)
    long_N = distance_N // FAR
    distances = np.full(int(long_N.sum()) + place_N.size, FAR, dtype=np.uint8)
    distances[np.cumsum(long_N + 1) - 1] = distance_N % FAR
    up_N = new_N == old_N + old_N.dtype.type(1)
    by_one_N = up_N | (new_N == old_N - old_N.dtype.type(1))
    head = np.array([distances.size, place_N.size], dtype=np.uint64)
    parts = (head, distances, np.packbits(by_one_N), np.packbits(up_N), new_N[~by_one_N])
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts])


def apply(data: np.ndarray, delta: np.ndarray, word: type[np.uint16] | type[np.uint32]) -> None:
    """Turn the bytes `data` [uint8] of the version that a delta was made from into the next version's, in place."""
    size = word().itemsize
    row = data[: data.size // size * size].view(word)
    many, number = (int(n) for n in delta[:16].view(np.uint64))
    bits = -(-number // 8)
    distances, by_one, up, words = np.split(delta[16:], np.cumsum([many, bits, bits]))
    place_N = np.cumsum(distances, dtype=np.int64)[distances != FAR]
    by_one_N, up_N = (np.unpackbits(part, count=number).astype(bool) for part in (by_one, up))
    if place_N.size and int(place_N[-1]) >= row.size:
        return  # made from another version: the fingerprints will tell
    old_N = row[place_N]
    new_N = np.where(up_N, old_N + word(1), old_N - word(1))
    new_N[~by_one_N] = words.copy().view(word)  # a copy, since its words need not be aligned there
    row[place_N] = new_N


@dataclass
class HeldVersion:
    """The present version on a host that is not the learner's: a file in shared memory, brought up to date by what was sent."""

    path: Path

    @classmethod
    def of_this_process(cls) -> HeldVersion:
        """An empty one, under a name by which the files of dead processes are found."""
        return cls(SHARED_MEMORY / f"winnow-weights-{os.getpid()}-held.bin")

    def take(self, manifest: WeightManifest, data: np.ndarray, *, delta: bool) -> WeightManifest:
        """Make the file the version of `manifest`, from its whole bytes or from its delta; gives the manifest of the file here."""
        if not delta:
            data.tofile(self.path)
        else:
            file = np.memmap(self.path, dtype=np.uint8, mode="r+")
            apply(file[: manifest.size], data, WORDS[manifest.tensors[0].dtype])
        return replace(manifest, host=socket.gethostname(), path=str(self.path), delta=None)

    def close(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
