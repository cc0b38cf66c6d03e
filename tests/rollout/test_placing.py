"""Where tensors go in an engine's model, with layers that load and pack as vLLM's do. That vLLM's own do so is tests/e2e/test_engine.py.

Shape legend: H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout.placing import Watch, put

H, V = 4, 5


class UnquantizedLinearMethod:
    """Packs the weight and keeps nothing else of it."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.data.clone()
        layer.packings = getattr(layer, "packings", 0) + 1
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class UnquantizedEmbeddingMethod:
    """Packs the weight for its use as a head, and keeps it."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.data.clone()


def rows(parameter: Tensor, loaded: Tensor, start: int = 0) -> None:
    """A loader that copies into rows from `start` on."""
    parameter.data[start : start + loaded.shape[0]].copy_(loaded)


def upside_down(parameter: Tensor, loaded: Tensor, start: int = 0) -> None:
    """A loader that does something else."""
    parameter.data[start : start + loaded.shape[0]].copy_(loaded.flip(0))


class Linear(nn.Module):
    """q, k and v as one."""

    def __init__(self, loader: Callable[..., None] = rows) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, H), requires_grad=False)
        self.loader = loader
        self.quant_method: Any = UnquantizedLinearMethod()


class VocabParallelEmbedding(nn.Module):
    """A row more than the vocabulary has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(V + 1, H), requires_grad=False)
        self.loader = rows
        self.quant_method = UnquantizedEmbeddingMethod()


class Norm(nn.Module):
    """One vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(H), requires_grad=False)
        self.loader = rows


class Model(nn.Module):
    """Loads by name, and ties its head."""

    def __init__(self, loader: Callable[..., None] = rows) -> None:
        super().__init__()
        self.embed_tokens, self.qkv, self.norm, self.lm_head = VocabParallelEmbedding(), Linear(loader), Norm(), VocabParallelEmbedding()

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, (layer, start) in {
            "embed": (self.embed_tokens, 0), "q": (self.qkv, 0), "k": (self.qkv, 2), "v": (self.qkv, 4), "norm": (self.norm, 0),
        }.items():  # fmt: skip
            layer.weight.weight_loader(layer.weight, tensors[name], start)  # type: ignore[union-attr, operator, attr-defined]
        self.lm_head.weight.weight_loader(self.lm_head.weight, tensors["embed"])  # type: ignore[attr-defined]


def tensors_of(seed: int, apart: bool = False) -> dict[str, Tensor]:
    """A version's tensors, side by side in one buffer or with gaps."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (V, H), "q": (2, H), "k": (2, H), "v": (2, H), "norm": (H,)}
    whole, found, at = torch.randn(200, generator=generator), {}, 0
    for name, shape in shapes.items():
        size = int(torch.Size(shape).numel())
        found[name] = whole[at : at + size].view(shape)
        at += size + (3 if apart else 0)
    return found


def watched(model: Model, tensors: dict[str, Tensor]) -> Any:
    """The places that a reload by the model itself shows; afterwards its layers are packed."""
    for layer in (model.embed_tokens, model.qkv, model.norm, model.lm_head):
        loader = layer.loader

        def online_process_loader(*args: Any, loader: Callable[..., None] = loader) -> None:
            loader(*args)

        online_process_loader.__wrapped__ = loader  # type: ignore[attr-defined]
        layer.weight.weight_loader = online_process_loader  # type: ignore[union-attr, assignment]
    watch = Watch(model, tensors)
    model.load(tensors)
    places = watch.places(lambda meta: nn.Parameter(torch.empty_like(meta), requires_grad=False))
    for layer in (model.embed_tokens, model.qkv, model.lm_head):
        layer.quant_method.process_weights_after_loading(layer)
    model.lm_head.weight = model.embed_tokens.weight  # as vLLM ties them
    return places


@pytest.mark.parametrize("apart", [False, True])
def test_later_versions_reach_every_layer(apart: bool) -> None:
    model = Model()
    places = watched(model, tensors_of(0, apart))
    assert [p.full for p in places] == ["embed_tokens.weight", "qkv.weight", "norm.weight", "lm_head.weight"]
    assert places[1].sources == ("q", "k", "v")
    for seed in (1, 2):
        new = tensors_of(seed, apart)
        kept = {name: tensor.clone() for name, tensor in new.items()}
        put(model, places, new)
        for tensor in new.values():
            tensor.fill_(7.0)  # the buffer is free to change
        assert torch.equal(model.qkv.packed, torch.cat([kept["q"], kept["k"], kept["v"]])) and model.qkv.weight.numel() == 0
        assert torch.equal(model.norm.weight, kept["norm"])
        assert torch.equal(model.embed_tokens.weight[:V], kept["embed"]) and not model.embed_tokens.weight[V:].any()
        assert torch.equal(model.lm_head.packed[:V], kept["embed"]), "a tied head is packed anew"
    assert model.qkv.packings == 3


def test_a_loader_that_does_more_than_copy_in_order_is_left_to_vllm() -> None:
    assert watched(Model(upside_down), tensors_of(0)) is None


def test_a_layer_with_another_method_is_left_to_vllm() -> None:
    class Fp8LinearMethod(UnquantizedLinearMethod):
        """Does who knows what."""

    model = Model()
    model.qkv.quant_method = Fp8LinearMethod()
    assert watched(model, tensors_of(0)) is None


def test_a_tensor_that_no_parameter_takes_leaves_all_to_vllm() -> None:
    assert watched(Model(), tensors_of(0) | {"rotary": torch.zeros(3)}) is None


def test_a_tensor_that_is_changed_before_it_is_loaded_leaves_all_to_vllm() -> None:
    model, tensors = Model(), tensors_of(0)
    original = model.load
    model.load = lambda t: original(t | {"norm": t["norm"] + 1})  # type: ignore[method-assign, assignment]
    assert watched(model, tensors) is None
