"""Padded and packed micro-batches as one layout, so that every formula has one code path.

Shape legend: B answers of the micro-batch, T token positions of a padded row, N tokens of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


def flat(x: torch.Tensor, mask: torch.Tensor, answer: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One code path for both layouts: (x [N], mask [N] bool, answer [N] int64); a padded row is an answer."""
    assert x.shape == mask.shape, f"terms {tuple(x.shape)} and mask {tuple(mask.shape)} differ"
    if x.dim() == 2:
        assert answer is None, "a padded row is an answer; `answer` belongs to the packed layout"
        answer = torch.arange(len(x), device=x.device)[:, None].expand(x.shape)
    assert answer is not None and answer.shape == x.shape, "packed terms need `answer`, the index of each token's answer"
    return x.reshape(-1), mask.reshape(-1).bool(), answer.reshape(-1)


def answer_lengths(mask: torch.Tensor, answer: torch.Tensor, answers: int | None = None) -> torch.Tensor:
    """[B] int64: unmasked tokens per answer, from packed `mask` [N] and `answer` [N]; B defaults to the highest index + 1."""
    count = int(answer.max()) + 1 if answers is None and len(answer) else answers or 0
    return answer.new_zeros(count).index_add(0, answer, mask.to(answer.dtype))


def token_weights(weights_B: Any, answer: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N] float64: the weight of each token's answer, 0 where masked."""
    weights = torch.as_tensor(weights_B, dtype=torch.float64, device=answer.device)
    return weights[answer].masked_fill(~mask, 0.0) if len(weights) else weights.new_zeros(answer.shape)


@dataclass(frozen=True)
class Tokens:
    """A micro-batch in the packed layout [N], in one dtype, 0 at masked tokens; `lengths_B` counts unmasked tokens."""

    new: torch.Tensor
    old: torch.Tensor
    behav: torch.Tensor | None
    ref: torch.Tensor | None
    entropy: torch.Tensor | None
    adv: torch.Tensor
    mask: torch.Tensor
    answer: torch.Tensor
    lengths_B: torch.Tensor


def pack_tokens(
    new: torch.Tensor,
    old: torch.Tensor,
    behav: torch.Tensor | None,
    ref: torch.Tensor | None,
    entropy: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    answer: torch.Tensor | None,
    weights: Any,
    prompt: Any,
    per_token: bool,
) -> Tokens:
    """Both layouts as one. What padding holds, infinities included, is dropped here: in an exp its 0 · inf would poison the gradient."""
    dtype = torch.promote_types(new.dtype, torch.float32)
    padded = new.dim() == 2
    new, mask_N, answer = flat(new, mask, answer)

    def clean(x: torch.Tensor) -> torch.Tensor:
        assert x.shape == mask.shape, f"{tuple(x.shape)} is not the shape of the mask {tuple(mask.shape)}"
        return x.reshape(-1).to(dtype).masked_fill(~mask_N, 0.0)

    def constant(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else clean(x.detach())

    per_token = per_token or advantages.dim() == 2
    sizes = {len(x) for x in (weights, prompt, None if per_token else advantages, mask if padded else None) if x is not None}
    assert len(sizes) <= 1, f"per-answer inputs disagree about the number of answers: {sorted(sizes)}"
    lengths_B = answer_lengths(mask_N, answer, sizes.pop() if sizes else None)
    adv = advantages.detach().to(dtype)
    return Tokens(
        new=new.to(dtype).masked_fill(~mask_N, 0.0),
        old=clean(old.detach()),
        behav=constant(behav),
        ref=constant(ref),
        entropy=None if entropy is None else clean(entropy),
        adv=clean(adv) if per_token else adv[answer].masked_fill(~mask_N, 0.0),
        mask=mask_N,
        answer=answer,
        lengths_B=lengths_B,
    )
