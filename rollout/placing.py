"""Where each tensor of a transfer goes in a CPU engine, found once by watching vLLM's own loaders, and putting it there.

vLLM reloads a layer by allocating it anew, copying every part in, packing the whole for its kernels and copying the rest
to where it was. Most parameters are their tensors, or several tensors one after the other (q, k and v; gate and up), and a
transfer has these side by side, so that a layer can be packed straight from the transfer's bytes and the rest be copied
once. Which parameter is what, `Watch` learns from a reload by vLLM, and proves with random numbers through vLLM's own
loader; a model with any parameter that is not so is left to vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Loader = Callable[..., Any]

PLAIN = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""Methods of vLLM's layers that pack a weight and keep nothing else of it."""


@dataclass
class Watched:
    """One parameter during a reload: the calls of its loader as (tensor's name, further arguments); `odd`: not understood."""

    layer: nn.Module
    name: str  # within the layer
    meta: Tensor  # its shape, dtype and class, without storage
    loader: Loader
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    odd: bool = False


@dataclass(frozen=True)
class Place:
    """Parameter `name` of `layer`, called `full` in the model, is the tensors `sources` one after the other."""

    layer: nn.Module
    name: str
    full: str
    sources: tuple[str, ...]
    shape: torch.Size


class Watch:
    """Sees a reload by vLLM: made after its layer-wise reload was opened, asked for `places` after it was closed."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
        self.seen: dict[str, Watched] = {}
        for prefix, layer in model.named_modules():
            for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
                watched = Watched(layer, name, parameter, loader_of(parameter))
                if hasattr(parameter, "weight_loader"):
                    parameter.weight_loader = self._recorder(watched, parameter.weight_loader)
                self.seen[f"{prefix}.{name}" if prefix else name] = watched

    def _recorder(self, watched: Watched, wrapped: Loader) -> Loader:
        @functools.wraps(wrapped)
        def record(parameter: Tensor, loaded: Tensor, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(loaded.data_ptr(), "")
            whole = bool(name) and loaded.shape == self.tensors[name].shape and loaded.is_contiguous()
            if whole and loaded.dtype == watched.meta.dtype:
                watched.calls.append((name, args, kwargs))
            else:
                watched.odd = True
            return wrapped(parameter, loaded, *args, **kwargs)

        return record

    def places(self, materialise: Callable[[Tensor], Tensor]) -> list[Place] | None:
        """Where every tensor goes, or None where that is not known of any one of them."""
        if not self.seen or {name for w in self.seen.values() for name, _, _ in w.calls} != set(self.tensors):
            return None
        widest = max(w.meta.numel() for w in self.seen.values())
        bits = torch.randint(-(2**15), 2**15, (widest * 2,), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
        places = []
        for full, w in self.seen.items():
            method = getattr(w.layer, "quant_method", None)
            plain = method is None or type(method).__name__ in PLAIN
            if w.odd or not w.calls or not plain or not self._follow_each_other(w, materialise, bits):
                return None
            places.append(Place(w.layer, w.name, full, tuple(name for name, _, _ in w.calls), w.meta.shape))
        return places

    def _follow_each_other(self, w: Watched, materialise: Callable[[Tensor], Tensor], bits_2N: Tensor) -> bool:
        """Whether the loader puts its tensors one after the other, and nothing after them but zeros."""
        parameter = materialise(w.meta)
        parameter.data.zero_()
        size, random = 0, bits_2N.view(parameter.dtype) if parameter.dtype != torch.int16 else bits_2N
        for name, args, kwargs in w.calls:
            tensor = self.tensors[name]
            if size + tensor.numel() > parameter.numel():
                return False
            w.loader(parameter, random[size : size + tensor.numel()].view(tensor.shape), *args, **kwargs)
            size += tensor.numel()
        found = parameter.data.flatten()
        as_bits = torch.int16 if parameter.element_size() == 2 else torch.int32
        return torch.equal(found[:size].view(as_bits), random[:size].view(as_bits)) and not bool(found[size:].any())


def loader_of(parameter: Tensor) -> Loader:
    """A parameter's own loader, without what a layer-wise reload has put around it."""
    loader: Loader = getattr(parameter, "weight_loader", lambda *args: None)
    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[attr-defined]
    return loader


def heads(model: nn.Module) -> set[nn.Module]:
    """Modules that serve as output heads."""
    return {layer for name, layer in model.named_modules(remove_duplicate=False) if name.rpartition(".")[2] == "lm_head"}


@torch.no_grad()
def put(model: nn.Module, places: Iterable[Place], tensors: Mapping[str, Tensor]) -> None:
    """Every parameter anew from `tensors`, which all lie in one buffer and are free to change afterwards."""
    of_heads, copied = heads(model), set[tuple[int, tuple[str, ...]]]()
    for layer, own in by_layer(places):
        for place in own:
            live = getattr(layer, place.name)
            size = place.shape.numel()
            if live.numel() == 0 < size:  # packed and removed: shown to the packer as it lies in the buffer
                setattr(layer, place.name, nn.Parameter(one_after_the_other(place, tensors).view(place.shape), requires_grad=False))
            elif (key := (live.data_ptr(), place.sources)) not in copied:  # a tied head shares the embedding's
                copied.add(key)
                flat, start = live.data.view(-1), 0
                for tensor in (tensors[name].view(-1) for name in place.sources):
                    flat[start : start + tensor.numel()].copy_(tensor)
                    start += tensor.numel()
        method = getattr(layer, "quant_method", None)
        if type(layer).__name__ == "VocabParallelEmbedding" and layer not in of_heads:
            layer.cpu_linear = nn.functional.linear  # type: ignore[assignment]  # only looked up, so nothing need be packed
        elif method is not None:
            method.process_weights_after_loading(layer)


def by_layer(places: Iterable[Place]) -> Iterator[tuple[nn.Module, list[Place]]]:
    """Places of one layer together, in the model's order."""
    layers: dict[nn.Module, list[Place]] = {}
    for place in places:
        layers.setdefault(place.layer, []).append(place)
    return iter(layers.items())


def one_after_the_other(place: Place, tensors: Mapping[str, Tensor]) -> Tensor:
    """The place's tensors as one flat tensor: a view where they lie side by side, else a copy; zeros behind where it is longer."""
    parts = [tensors[name].view(-1) for name in place.sources]
    size = sum(part.numel() for part in parts)
    side_by_side = all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in zip(parts, parts[1:], strict=False))
    if size < place.shape.numel():
        parts.append(parts[0].new_zeros(place.shape.numel() - size))
    elif side_by_side:
        return parts[0].as_strided((size,), (1,))
    return torch.cat(parts)
