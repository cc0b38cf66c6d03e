"""From a term per token to one loss, the same for any split of an optimiser step: Σ_i w_i · Σ_t mask · term.

Shape legend: B answers, T token positions of a padded row, N tokens of a packed row.

The weight w_i of an answer comes from `learner.denominators.answer_weights`, which sees the lengths of the whole optimiser step.
"""

from __future__ import annotations

from typing import Any

import torch

from learner.denominators import answer_weights
from learner.layout import answer_lengths, flat, token_weights

__all__ = ["aggregate_token_loss", "answer_weights"]


def aggregate_token_loss(
    terms: torch.Tensor,
    mask: torch.Tensor,
    mode: str = "token-mean",
    *,
    answer: torch.Tensor | None = None,
    prompt: Any = None,
    max_len: int | None = None,
    weights: Any = None,
) -> torch.Tensor:
    """Σ_i w_i · Σ_t mask · term, a scalar in the dtype of `terms` (at least float32).

    `terms` and `mask` (True at policy-written tokens of answers that are not masked as a whole) are padded [B, T], or packed
    [N] with `answer` [N] the index of each token's answer. `weights` [B] are this input's answers' weights from
    `answer_weights` over the whole optimiser step, and the value is then this micro-batch's share of the loss. Without
    `weights` the input is taken to be the whole step. What stands in `terms` at masked positions is never read.
    """
    terms, mask, answer = flat(terms, mask, answer)
    if weights is None:
        lengths_B = answer_lengths(mask, answer, None if prompt is None else len(prompt))
        weights = answer_weights(lengths_B, prompt, mode=mode, max_len=max_len)
    return weighted_sum(terms, mask, token_weights(weights, answer, mask))


def weighted_sum(terms: torch.Tensor, mask: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Σ weight · term over unmasked tokens, added up in float64 (answers of 100,000 tokens), in the dtype of `terms` (at least float32)."""
    total = (terms.masked_fill(~mask, 0.0).double() * weights_N).sum()
    return total.to(torch.promote_types(terms.dtype, torch.float32))
