"""The engine's side of a weight transfer: reads a version of the weights from shared memory into a running vLLM.

vLLM imports this module inside its worker process (through `worker_extension_cls`), which registers the transfer
engine there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rollout.weights import fingerprint

BACKEND = "winnow_shm"


class WorkerExtension:
    """Methods that vLLM adds to its worker; the engine reaches them by `collective_rpc`."""

    weight_transfer_engine: Any

    def winnow_report(self) -> dict[str, Any]:
        """Fingerprints of the last transfer as read here, and the parameters that it did not reach."""
        engine = self.weight_transfer_engine
        return {"fingerprints": dict(engine.fingerprints), "missing": sorted(engine.missing), "pid": os.getpid()}


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Shared memory needs no rendezvous."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One version of the weights: the file, and per tensor its name, dtype, shape, offset and size in bytes."""

    path: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    sizes: list[int]


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads weights from a file in shared memory, layer by layer, as vLLM loads a checkpoint."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fingerprints: dict[str, int] = {}
        self.missing: set[str] = set()

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Let every layer collect its weights before it packs them for its kernels."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Pack what layers collected."""
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class does, without its device synchronisation, which a CPU build of torch lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Map the file, take every tensor's fingerprint as read here, and load the tensors."""
        # Copy on write: a private map may be handed to torch, which has no read-only tensors.
        data = np.memmap(update_info.path, dtype=np.uint8, mode="c")
        self.fingerprints = {}
        tensors: list[tuple[str, torch.Tensor]] = []
        rows = zip(update_info.names, update_info.dtypes, update_info.shapes, update_info.offsets, update_info.sizes, strict=True)
        for name, dtype, shape, offset, size in rows:
            part = data[offset : offset + size]
            self.fingerprints[name] = fingerprint(part)
            tensors.append((name, torch.from_numpy(part).view(getattr(torch, dtype)).view(shape)))
        loaded = set(self.model.load_weights(iter(tensors)) or ())
        loaded |= self._load_tied_head(dict(tensors), loaded)
        self.missing = {name for name, _ in self.model.named_parameters()} - loaded

    def _load_tied_head(self, tensors: dict[str, torch.Tensor], loaded: set[str]) -> set[str]:
        """Load a tied output head from the embedding: the names it loaded.

        A checkpoint with tied embeddings has no head, and after its first packing vLLM keeps the head's kernel copy
        apart from the embedding, so that without this the head would silently stay at an older version.
        """
        done: set[str] = set()
        for name, parameter in list(self.model.named_parameters()):  # loading replaces parameters
            if name in loaded or not name.endswith("lm_head.weight"):
                continue
            for embedding in (n for n in tensors if n.endswith("embed_tokens.weight")):
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensors[embedding])
                done.add(name)
        return done

    def shutdown(self) -> None:
        """Nothing is held between transfers."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ShmWeightTransferEngine)
