"""Deltas of weights: what is packed is what is put back, bit by bit. The transfer around it is tests/learner/test_publish.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout.delta import FAR, HeldVersion, apply, pack
from rollout.weights import TensorEntry, WeightManifest


def made(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The delta between two rows of words."""
    places = np.flatnonzero(old != new)
    return pack(places, old[places], new[places])


@pytest.mark.parametrize("word", [np.uint16, np.uint32])
@pytest.mark.parametrize("size", [1, 254, 255, 256, 3 * 65536 + 17])
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.05, 1.0])
@pytest.mark.parametrize("by_one", [True, False])
def test_a_delta_makes_the_old_version_the_new_one(word: type[np.uint16], size: int, share: float, by_one: bool) -> None:
    random = np.random.default_rng(size)
    old = random.integers(0, 2**16, size).astype(word)
    other = old + random.choice(np.array([1, -1]), size).astype(word) if by_one else old ^ random.integers(1, 2**16, size).astype(word)
    new = np.where(random.random(size) < share, other, old)
    delta = made(old, new)
    held = old.copy()
    apply(held.view(np.uint8), delta, word)
    assert (held == new).all()
    if by_one:
        changed = int((old != new).sum())
        assert delta.size <= 16 + changed + size // FAR + 2 * -(-changed // 8)


def test_distances_of_every_kind_are_told_apart() -> None:
    """A first place of 0, neighbours, and distances at, below and above what a byte holds; words that wrap around."""
    old = np.zeros(5000, dtype=np.uint16)
    new = old.copy()
    places = [0, 1, 255, 256, 510, 765, 1019, 1275, 4000, 4999]
    new[places] = [1, 0xFFFF, 7, 1, 0xFFFF, 9, 1, 1, 0x8000, 1]
    apply(old.view(np.uint8), made(old, new), np.uint16)
    assert np.flatnonzero(old).tolist() == places and (old == new).all()


def test_a_delta_of_a_longer_version_changes_nothing() -> None:
    old, held = np.zeros(1000, dtype=np.uint16), np.zeros(10, dtype=np.uint16)
    new = old.copy()
    new[[3, 900]] = 5
    apply(held.view(np.uint8), made(old, new), np.uint16)
    assert not held.any()


def test_a_host_keeps_its_version_up_to_date(tmp_path: Path) -> None:
    old = np.arange(100, dtype=np.uint16)
    new = old.copy()
    new[7], new[99] = 1000, 2000
    tensors = (TensorEntry("w", "bfloat16", (100,), 0, 200, 0),)
    manifest = WeightManifest(0, 1, "elsewhere", "/dev/null", tensors)
    held = HeldVersion(tmp_path / "held.bin")
    here = held.take(manifest, old.view(np.uint8), delta=False)
    assert here.path == str(tmp_path / "held.bin") and here.host != "elsewhere" and here.tensors == tensors
    held.take(manifest, made(old, new), delta=True)
    assert np.fromfile(here.path, dtype=np.uint16).tolist() == new.tolist()
    held.close()
    held.close()
    assert not Path(here.path).exists()
