"""The learner's side of a weight transfer: a version of the weights out of the FSDP shards, to every engine.

On one host a version is one file of shared memory, written once and mapped by every engine (`ShmPublisher`). On GPUs
vLLM's own trainer engines carry it (`VllmPublisher`: `nccl` or `ipc`). Gathering is a collective: every rank calls it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.delta import WORDS, pack
from rollout.weights import ALIGN, SHARED_MEMORY, DeltaEntry, TensorEntry, WeightManifest, fingerprint

PREFIX = "winnow-weights"
GROWTH = 64 * 2**20  # bytes by which a file of shared memory grows at least

WeightStream = Callable[[], Iterable[tuple[str, torch.Tensor]]]


def torch_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


class Arena:
    """A file of shared memory that grows as it is written and is used again for later versions.

    Its pages stay: the first write to a page of shared memory costs three times the copy itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = np.zeros(0, dtype=np.uint8)

    def part(self, offset: int, size: int) -> np.ndarray:
        """Bytes `[offset, offset + size)` [uint8], to be written. Raises OSError where shared memory is full."""
        end = offset + size
        if end > self._map.size:
            grown = max(end, self._map.size + GROWTH)
            with open(self.path, "ab") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, grown)  # a page that cannot be had would end the process at its first write
                except OSError as error:
                    raise OSError(error.errno, f"{SHARED_MEMORY} has no room for {grown / 2**30:.2f} GiB of weights: enlarge it") from None
            self._map = np.memmap(self.path, dtype=np.uint8, mode="r+")
        return self._map[offset:end]


class ShmPublisher:
    """Writes versions of the weights to shared memory; rank 0 writes, the others only take part in gathering.

    With `deltas` a version is written over the one before, and what changed is written to a file of its own.
    """

    def __init__(self, weights: WeightStream, *, rank: int, dtype: torch.dtype, deltas: bool = False) -> None:
        self.weights = weights
        self.rank = rank
        self.dtype = dtype
        self.deltas = deltas
        self._free: list[Arena] = []
        self._lent: dict[str, Arena] = {}
        self._last: WeightManifest | None = None
        self._made = 0
        self._lock = threading.Lock()
        sweep_stale()

    def publish(self, attempt: int, version: int) -> WeightManifest | None:
        """Gather and write one version; the manifest on rank 0, None elsewhere."""
        if self.rank != 0:
            for _ in self.weights():
                pass
            return None
        arena = self._take()
        changes = Changes(self._last) if self.deltas and self._last is not None else None
        manifest = write_manifest(self.weights(), arena, attempt=attempt, version=version, dtype=self.dtype, changes=changes)
        delta = changes.write(arena.path.with_name(f"{PREFIX}-{os.getpid()}-delta.bin"), manifest) if changes is not None else None
        self._last = replace(manifest, delta=delta)
        return self._last

    def _take(self) -> Arena:
        with self._lock:
            assert not (self.deltas and self._lent), "the version before is still being read"
            if not self._free:
                self._free.append(Arena(SHARED_MEMORY / f"{PREFIX}-{os.getpid()}-{self._made}.bin"))
                self._made += 1
            arena = self._free.pop()
            self._lent[str(arena.path)] = arena
            return arena

    def release(self, manifest: WeightManifest) -> None:
        """Every engine has read the version: its memory may hold another."""
        with self._lock:
            if manifest.path in self._lent:
                self._free.append(self._lent.pop(manifest.path))

    def close(self) -> None:
        """Remove what this process published."""
        for path in SHARED_MEMORY.glob(f"{PREFIX}-{os.getpid()}-*.bin"):
            path.unlink(missing_ok=True)


class Changes:
    """Gathers what is changed while a version is written over `base`."""

    def __init__(self, base: WeightManifest) -> None:
        self.base = base
        self.found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # places, the words there before, and those after
        self.size = 0  # bytes that they take at least

    def note(self, old: torch.Tensor, new: torch.Tensor, offset: int, word: torch.dtype) -> None:
        """Compare a tensor's bytes [uint8], which start at `offset` of the file, before they are overwritten."""
        if self.size >= self.base.size:
            return  # no delta will be smaller
        before, after = old.view(word), new.view(word)
        place = torch.nonzero(before != after).view(-1)
        self.found.append((place.numpy() + offset // word.itemsize, before[place].numpy(), after[place].numpy()))
        self.size += place.numel()

    def write(self, path: Path, manifest: WeightManifest) -> DeltaEntry | None:
        """The delta's file; None where the whole version is no larger, or has other tensors."""
        same = [(t.name, t.offset, t.size) for t in manifest.tensors] == [(t.name, t.offset, t.size) for t in self.base.tensors]
        if not same or self.size >= manifest.size:
            return None
        word = WORDS[manifest.tensors[0].dtype]
        places, before, after = (np.concatenate(column) for column in zip(*self.found, strict=True))
        data = pack(places, before.view(word), after.view(word))
        if data.size >= manifest.size:
            return None
        data.tofile(path)
        return DeltaEntry(self.base.name, str(path), data.size)


def write_manifest(
    weights: Iterable[tuple[str, torch.Tensor]],
    arena: Arena,
    *,
    attempt: int,
    version: int,
    dtype: torch.dtype,
    changes: Changes | None = None,
) -> WeightManifest:
    """Write tensors, cast to `dtype`, one after another into `arena`, noting what changes there where that is asked for.

    It grows as tensors come, so that no more than one gathered tensor exists beside it.
    """
    entries: list[TensorEntry] = []
    offset = 0
    for name, tensor in weights:
        data = tensor.detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8)
        there = torch.from_numpy(arena.part(offset, data.numel()))
        if changes is not None:
            changes.note(there, data, offset, torch.int16 if dtype.itemsize == 2 else torch.int32)
        there.copy_(data)  # by several threads, where there are
        entries.append(TensorEntry(name, torch_name(dtype), tuple(tensor.shape), offset, data.numel(), fingerprint(data.numpy())))
        offset += -(-data.numel() // ALIGN) * ALIGN
    return WeightManifest(attempt, version, socket.gethostname(), str(arena.path), tuple(entries))


def read_file(manifest: WeightManifest, *, delta: bool = False) -> np.ndarray:
    """The bytes of a version, or of its delta, for engines on another host [uint8]."""
    if delta:
        assert manifest.delta is not None
        return np.fromfile(manifest.delta.path, dtype=np.uint8)
    return np.fromfile(manifest.path, dtype=np.uint8, count=manifest.size)


def sweep_stale() -> None:
    """Remove files of publishers that are gone (a process killed hard cannot do it itself)."""
    for path in SHARED_MEMORY.glob(f"{PREFIX}-*.bin"):
        pid = path.name.removeprefix(f"{PREFIX}-").split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)


class VllmPublisher:
    """vLLM's own trainer side (`nccl`, `ipc`): it drives the engines' actors while it sends.

    Each of `engines` is a Ray handle with the four methods of vLLM's `VLLMWeightSyncClient`. Needs GPUs; both ends are
    vLLM's code, and only the gathering out of FSDP shards is ours.
    """

    def __init__(
        self,
        backend: str,
        weights: WeightStream,
        metadata: list[tuple[str, torch.dtype, tuple[int, ...]]],
        *,
        rank: int,
        engines: Sequence[Any],
        address: str,
        port: int,
        world_size: int,
    ) -> None:
        from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
        from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        class Client(RayVLLMWeightSyncClient):
            """Each engine's workers take the ranks behind those of the engines before it."""

            def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
                each = (world_size - 1) // len(self.handles)
                ranked = "rank_offset" in init_info
                infos = [{**init_info, **({"rank_offset": 1 + i * each} if ranked else {})} for i in range(len(self.handles))]
                alone = [RayVLLMWeightSyncClient(handle) for handle in self.handles]
                # All at once: each waits in the rendezvous for the others.
                with ThreadPoolExecutor(len(alone)) as threads:
                    list(threads.map(lambda client, info: client.init_weight_transfer_engine(info), alone, infos))

        class Source(WeightSource):
            """FSDP shards as vLLM wants them: full tensors, in one order on all ranks."""

            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(name, dtype, shape) for name, dtype, shape in metadata]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                dtypes = {name: dtype for name, dtype, _ in metadata}
                return ((name, tensor.to(dtypes[name])) for name, tensor in weights())

        info: TrainerInitInfo
        if backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            info = NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=world_size, rank=rank)
        else:
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            info = IPCTrainerInitInfo(rank=rank, packed=True)
        self.engine = WeightTransferTrainerFactory.trainer_init(info, client=Client(list(engines)), source=Source())

    def publish(self) -> None:
        """Send the current weights; returns when every engine has them."""
        self.engine.send_weights()
