"""The objective of one micro-batch as a function of its log-probabilities, whole or token by token.

Shape legend: A answers of the batch, N policy-written tokens of the micro-batch, C those of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.logprob import Upstream
from learner.objective import LossOutputs, grpo_loss
from learner.parts import MicroBatch

Objective = Callable[[Tensor, Tensor, slice], LossOutputs]
"""(log-probabilities, entropies, which of the micro-batch's tokens they belong to) -> its share of the loss."""

PER_TOKEN_MISMATCH = ("none", "tis", "mis", "icepop")


def is_separable(ratio_level: str, mismatch: str) -> bool:
    """Whether a token's gradient follows from the token alone, so that it is known as soon as its log-probability is."""
    return ratio_level == "token" and mismatch in PER_TOKEN_MISMATCH


def objective_of(micro: MicroBatch, weights_A: np.ndarray, advantage_A: np.ndarray, flags: Mapping[str, Any], **rest: Any) -> Objective:
    """With the micro-batch's own tensors; without `old_N` the policy before the step is the policy in it."""
    weights, given = micro.per_answer(weights_A), micro.advantage_N
    advantages = micro.per_answer(advantage_A).float() if given is None else given

    def objective(new: Tensor, entropy: Tensor, tokens: slice) -> LossOutputs:
        return grpo_loss(
            new,
            new.detach() if micro.old_N is None else micro.old_N[tokens],
            advantages if given is None else advantages[tokens],
            micro.mask_N[tokens],
            logp_behav=micro.behav_N[tokens],
            logp_ref=None if micro.ref_N is None else micro.ref_N[tokens],
            entropy=entropy,
            answer=micro.answer_N[tokens],
            weights=weights,
            advantages_per_token=given is not None,
            **flags,
            **rest,
        )

    return objective


def upstream_of(objective: Objective, through_entropy: bool) -> Upstream:
    """The gradients that a separable objective will have in each token's log-probability, and in its entropy."""

    def upstream(tokens: slice, new_C: Tensor, entropy_C: Tensor) -> tuple[Tensor, Tensor | None]:
        given = [new_C.detach().requires_grad_(), entropy_C.detach().requires_grad_(through_entropy)]
        with torch.enable_grad():
            loss = objective(given[0], given[1], tokens).loss
            grads = torch.autograd.grad(loss, [x for x in given if x.requires_grad])
        return grads[0], grads[1] if through_entropy else None

    return upstream
