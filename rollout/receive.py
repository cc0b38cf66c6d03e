"""The engine's side of a weight transfer: reads a version of the weights from shared memory into a running vLLM.

vLLM imports this module inside its worker process (through `worker_extension_cls`), which registers the transfer
engine there.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform

from rollout.chunks import spare_seeds
from rollout.placing import Place, Watch, put
from rollout.weights import fingerprint

BACKEND = "winnow_shm"


class WorkerExtension:
    """Methods that vLLM adds to its worker; the engine reaches them by `collective_rpc`."""

    model_runner: Any
    weight_transfer_engine: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def winnow_start(self) -> None:
        """What an engine is told once, before its first request."""
        if current_platform.is_cpu():
            spare_seeds(self.model_runner)

    def winnow_update(self, update_info: dict[str, Any]) -> dict[str, Any]:
        """A whole transfer in one call: fingerprints of the tensors as read here, and the parameters that it did not reach."""
        self.start_weight_update()
        self.update_weights(update_info)
        self.finish_weight_update()
        engine = self.weight_transfer_engine
        return {
            "fingerprints": dict(engine.fingerprints),
            "missing": sorted(engine.missing),
            "seconds_load": dict(engine.seconds),
            "placed": engine._places is not None,
            "pid": os.getpid(),
        }


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
    """Loads weights from a file in shared memory.

    The first time as vLLM loads a checkpoint, layer by layer. On CPUs what was seen then says where each tensor goes, and
    later versions are put there straight from the file (`rollout.placing`).
    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fingerprints: dict[str, int] = {}
        self.missing: set[str] = set()
        self.seconds: dict[str, float] = {}
        self._maps: dict[str, tuple[int, np.ndarray]] = {}
        self._places: list[Place] | None = None
        self._placed: list[tuple[str, str, list[int]]] = []  # name, dtype and shape of the tensors that `_places` knows
        self._reloading: Watch | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """What is to be done depends on the tensors: see `receive_weights`."""

    def finish_weight_update(self) -> None:
        """After a reload by vLLM: pack what its layers collected, and learn from it where tensors go."""
        if self._reloading is None:
            return
        watch, self._reloading = self._reloading, None
        finalize_layerwise_reload(self.model, self.model_config)
        first = next(self.model.parameters())  # in 16 bits vLLM has further kernels, whose packing is left to it
        if first.device.type == "cpu" and first.dtype == torch.float32 and not current_platform.is_zen_cpu() and not self.missing:
            self._places = watch.places(materialize_meta_tensor)
            self._placed = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in watch.tensors.items()]

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class does, without its device synchronisation, which a CPU build of torch lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Map the file, take every tensor's fingerprint as read here, and load the tensors."""
        started = time.perf_counter()
        data = self._map(update_info.path)
        whole = torch.from_numpy(data)
        self.fingerprints = {}
        tensors: dict[str, torch.Tensor] = {}
        rows = zip(update_info.names, update_info.dtypes, update_info.shapes, update_info.offsets, update_info.sizes, strict=True)
        for name, dtype, shape, offset, size in rows:
            self.fingerprints[name] = fingerprint(data[offset : offset + size])
            tensors[name] = whole[offset : offset + size].view(getattr(torch, dtype)).view(shape)
        read = time.perf_counter()
        if self._places is not None and self._placed == list(zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True)):
            put(self.model, self._places, tensors)
            for layer in self.model.modules():
                if is_deferred_attention_layer(layer):  # some hold what follows from weights
                    layer.process_weights_after_loading(self.model_config.dtype)
            self.missing = set()
        else:
            self._reload(tensors)
        self.seconds = {"fingerprint": read - started, "load": time.perf_counter() - read}

    def _reload(self, tensors: dict[str, torch.Tensor]) -> None:
        """As vLLM loads a checkpoint into a model that has one: every layer collects its weights before it packs them."""
        initialize_layerwise_reload(self.model)
        self._reloading = Watch(self.model, tensors)
        loaded = set(self.model.load_weights(iter(tensors.items())) or ())
        loaded |= self._load_tied_head(tensors, loaded)
        self.missing = {name for name, _ in self.model.named_parameters()} - loaded

    def _map(self, path: str) -> np.ndarray:
        """The file's bytes. A publisher uses its files again and again, and mapped pages need no second look-up."""
        there = os.stat(path)
        self._maps = {p: m for p, m in self._maps.items() if os.path.exists(p)}
        if path not in self._maps or self._maps[path][0] != there.st_ino or self._maps[path][1].size != there.st_size:
            # Copy on write: a private map may be handed to torch, which has no read-only tensors.
            self._maps[path] = (there.st_ino, np.memmap(path, dtype=np.uint8, mode="c"))
        return self._maps[path][1]

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
        """Unmap what is mapped."""
        self._maps.clear()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ShmWeightTransferEngine)
