"""Versions of the weights in shared memory: their files, their deltas, and what they are read as.

Does not cover: the engine that reads them (tests/e2e/test_engine.py) and vLLM's own transfers, which need GPUs.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from learner import publish
from learner.publish import Arena, ShmPublisher, read_file
from rollout.delta import WORDS, HeldVersion
from rollout.weights import WeightManifest, fingerprint

WEIGHTS = {"a": torch.randn(33, 7), "b": torch.randn(5), "c": torch.randn(4097, 32)}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Tensors of odd sizes."""
    return {name: tensor.clone() for name, tensor in WEIGHTS.items()}


@pytest.fixture
def made() -> Iterator[list[ShmPublisher]]:
    """Publishers to close."""
    publishers: list[ShmPublisher] = []
    yield publishers
    for publisher in publishers:
        publisher.close()


def publisher(weights: dict[str, torch.Tensor], made: list[ShmPublisher], dtype: torch.dtype, deltas: bool = False) -> ShmPublisher:
    made.append(ShmPublisher(lambda: weights.items(), rank=0, dtype=dtype, deltas=deltas))
    return made[-1]


def published(publisher: ShmPublisher, version: int) -> WeightManifest:
    """A version, released at once."""
    manifest = publisher.publish(0, version)
    assert manifest is not None
    publisher.release(manifest)
    return manifest


def as_read(manifest: WeightManifest, data: np.ndarray) -> dict[str, torch.Tensor]:
    """The tensors in a version's bytes, whose fingerprints must be the manifest's."""
    found = {}
    for t in manifest.tensors:
        part = data[t.offset : t.offset + t.size].copy()
        assert fingerprint(part) == t.fingerprint, t.name
        found[t.name] = torch.from_numpy(part).view(getattr(torch, t.dtype)).view(t.shape)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_version_is_its_tensors(weights: dict[str, torch.Tensor], made: list[ShmPublisher], dtype: torch.dtype) -> None:
    manifest = published(publisher(weights, made, dtype), 3)
    assert (manifest.name, manifest.delta) == ((0, 3), None)
    found = as_read(manifest, read_file(manifest))
    assert all(torch.equal(found[name], weights[name].to(dtype)) for name in weights) and list(found) == list(weights)


def test_a_released_file_is_used_again_and_one_that_is_read_is_not(weights: dict[str, torch.Tensor], made: list[ShmPublisher]) -> None:
    one = publisher(weights, made, torch.float32)
    first, second = one.publish(0, 1), one.publish(0, 2)
    assert first is not None and second is not None and first.path != second.path
    one.release(first)
    assert published(one, 3).path == first.path
    one.close()
    assert not Path(first.path).exists() and not Path(second.path).exists()


def test_full_shared_memory_is_an_error_and_not_the_end_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(publish.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no room for .* GiB of weights"):
        Arena(tmp_path / "x.bin").part(0, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deltas_follow_the_weights_bit_by_bit(
    weights: dict[str, torch.Tensor], made: list[ShmPublisher], tmp_path: Path, dtype: torch.dtype
) -> None:
    one, held = publisher(weights, made, dtype, deltas=True), HeldVersion(tmp_path / "held.bin")
    first = published(one, 0)
    assert first.delta is None
    held.take(first, read_file(first), delta=False)
    for version in range(1, 4):
        weights["a"][version] += 1.0
        weights["c"].view(-1)[::97] *= -1.0
        manifest = published(one, version)
        assert manifest.delta is not None and manifest.delta.base == (0, version - 1)
        data = read_file(manifest, delta=True)
        assert data.size == manifest.delta.size < manifest.size / 10
        here = held.take(manifest, data, delta=True)
        found = as_read(here, np.fromfile(here.path, dtype=np.uint8))
        assert all(torch.equal(found[name], weights[name].to(dtype)) for name in weights)
        assert all(torch.equal(as_read(manifest, read_file(manifest))[name], found[name]) for name in weights)


def test_zeros_of_either_sign_and_nan_travel(weights: dict[str, torch.Tensor], made: list[ShmPublisher], tmp_path: Path) -> None:
    """They compare otherwise than their bits do."""
    one, held = publisher(weights, made, torch.bfloat16, deltas=True), HeldVersion(tmp_path / "held.bin")
    weights["b"][:3] = torch.tensor([0.0, float("nan"), 1.0])
    first = published(one, 0)
    held.take(first, read_file(first), delta=False)
    weights["b"][0] = -0.0
    manifest = published(one, 1)
    assert manifest.delta is not None
    data = read_file(manifest, delta=True)
    held.take(manifest, data, delta=True)
    assert data.size < 16 + 200 and int(data[8:16].view(np.uint64)[0]) == 1, "one word changed"
    as_read(manifest, np.fromfile(held.path, dtype=np.uint8))


def test_a_delta_that_is_no_smaller_is_not_made(weights: dict[str, torch.Tensor], made: list[ShmPublisher]) -> None:
    one = publisher(weights, made, torch.bfloat16, deltas=True)
    published(one, 0)
    for tensor in weights.values():
        tensor.neg_()
    assert published(one, 1).delta is None
    weights["a"][0] += 1
    delta = published(one, 2).delta
    assert delta is not None and delta.base == (0, 1)


def test_a_delta_over_another_base_is_seen_by_its_fingerprints(
    weights: dict[str, torch.Tensor], made: list[ShmPublisher], tmp_path: Path
) -> None:
    one, held = publisher(weights, made, torch.bfloat16, deltas=True), HeldVersion(tmp_path / "held.bin")
    first = published(one, 0)
    held.take(first, read_file(first), delta=False)
    weights["a"][0] += 1
    published(one, 1)
    weights["a"][1] += 1
    manifest = published(one, 2)
    held.take(manifest, read_file(manifest, delta=True), delta=True)
    part = np.fromfile(held.path, dtype=np.uint8)[: manifest.tensors[0].size]
    assert fingerprint(part) != manifest.tensors[0].fingerprint


def test_every_dtype_of_an_engine_has_its_word() -> None:
    assert {name: word().itemsize for name, word in WORDS.items()} == {"bfloat16": 2, "float16": 2, "float32": 4}
