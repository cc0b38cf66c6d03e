"""Low-rank adapters on every linear layer of the decoder (LoRA, arXiv 2106.09685), by peft: only these are trained.

What leaves the learner (weights for engines, exports) has the adapters merged; checkpoints hold the adapters alone, the rest is the
model's own folder. Shape legend: O, I output and input features of a layer, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

ADAPTER = "default"


def add_adapters(hf: nn.Module, rank: int, alpha: float) -> None:
    """In place: W becomes W + alpha / rank · B A, with B zero, so that the model computes what it did; all else is frozen.

    The same A on every rank and in every run, whatever random numbers were drawn before.
    """
    from peft import LoraConfig, inject_adapter_in_model

    decoder: Any = hf.get_decoder()  # type: ignore[operator]
    names = sorted({name.rsplit(".", 1)[-1] for name, m in decoder.layers.named_modules() if isinstance(m, nn.Linear)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=names), hf, adapter_name=ADAPTER)


def merged_weights(hf: nn.Module, dtype: torch.dtype | None, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the model without adapters, with theirs added in float32; names are those of the model without them.

    `whole` gathers a tensor from all ranks.
    """
    modules = dict(hf.named_modules())
    for name, param in hf.named_parameters():
        if ".lora_" in name:
            continue
        value, plain = whole(param.detach()), name.replace(".base_layer.", ".")
        if plain != name and name.endswith(".weight"):
            layer: Any = modules[name.removesuffix(".base_layer.weight")]
            a_rI, b_Or = (whole(getattr(layer, which)[ADAPTER].weight.detach()).float() for which in ("lora_A", "lora_B"))
            value = value.float() + layer.scaling[ADAPTER] * (b_Or @ a_rI)
        yield plain, value if dtype is None else value.to(dtype)
