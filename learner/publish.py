"""The learner's side of a weight transfer: a version of the weights out of the FSDP shards, to every engine.

On one host a version is one file of shared memory, written once and mapped by every engine (`ShmPublisher`). On GPUs
vLLM's own trainer engines carry it (`VllmPublisher`: `nccl` or `ipc`). Gathering is a collective: every rank calls it.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.weights import ALIGN, TensorEntry, WeightManifest, fingerprint

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "winnow-weights"

WeightStream = Callable[[], Iterable[tuple[str, torch.Tensor]]]


def torch_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


class ShmPublisher:
    """Writes versions of the weights to shared memory; rank 0 writes, the others only take part in gathering."""

    def __init__(self, weights: WeightStream, *, rank: int, dtype: torch.dtype) -> None:
        self.weights = weights
        self.rank = rank
        self.dtype = dtype
        sweep_stale()

    def publish(self, attempt: int, version: int) -> WeightManifest | None:
        """Gather and write one version; the manifest on rank 0, None elsewhere."""
        if self.rank != 0:
            for _ in self.weights():
                pass
            return None
        path = SHARED_MEMORY / f"{PREFIX}-{os.getpid()}-{attempt}-{version}.bin"
        return write_manifest(self.weights(), path, attempt=attempt, version=version, dtype=self.dtype)

    @staticmethod
    def release(manifest: WeightManifest) -> None:
        """Every engine has read the version: give its memory back."""
        Path(manifest.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove what this process published."""
        for path in SHARED_MEMORY.glob(f"{PREFIX}-{os.getpid()}-*.bin"):
            path.unlink(missing_ok=True)


def write_manifest(
    weights: Iterable[tuple[str, torch.Tensor]], path: Path, *, attempt: int, version: int, dtype: torch.dtype
) -> WeightManifest:
    """Write tensors, cast to `dtype`, one after another into `path`.

    The file is grown as tensors come, so that no more than one gathered tensor exists beside it.
    """
    entries: list[TensorEntry] = []
    offset = 0
    with open(path, "w+b") as file:
        for name, tensor in weights:
            data = tensor.detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy()
            file.seek(offset)
            file.write(memoryview(data))
            entries.append(TensorEntry(name, torch_name(dtype), tuple(tensor.shape), offset, data.size, fingerprint(data)))
            offset += -(-data.size // ALIGN) * ALIGN
        file.truncate(max(offset, mmap.PAGESIZE))
    return WeightManifest(attempt, version, socket.gethostname(), str(path), tuple(entries))


def read_file(manifest: WeightManifest) -> np.ndarray:
    """The bytes of a version, for engines on another host [uint8]."""
    return np.fromfile(manifest.path, dtype=np.uint8)


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
