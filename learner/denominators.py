"""The one rule about denominators: a weight per answer, computed once for a whole optimiser step.

Shape legend: B answers of the optimiser step.

Every aggregation is `loss = Σ_i w_i · Σ_t mask · term`. The weights w depend on lengths only, and are computed once for the
whole optimiser step (all ranks, all micro-batches) before its first backward pass; every micro-batch then adds its share,
and the sum of the shares is the loss, however the step was cut. Policy, KL and entropy terms use the same weights.
Numpy, so that the controller and `winnow explain` need no torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rollout.errors import UserError

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "seq-mean-token-sum", "token-sum", "prompt-mean")


def answer_weights(lengths_B: Any, prompt_B: Any = None, *, mode: str = "token-mean", max_len: int | None = None) -> np.ndarray:
    """The weight w_i that every token of answer i has in the loss, [B] float64.

    `lengths_B` holds, for *all* answers of the optimiser step, the number |o_i| of policy-written tokens, 0 for an answer
    masked as a whole (it counts nowhere). With B' the answers of length > 0:

    - `token-mean`: 1 / Σ|o| (DAPO, arXiv 2503.14476)
    - `seq-mean-token-mean`: 1 / (B'·|o_i|) (GRPO, arXiv 2402.03300)
    - `seq-mean-token-sum-norm`: 1 / (B'·L), L = `max_len` the generation budget (Dr. GRPO, arXiv 2503.20783)
    - `seq-mean-token-sum`: 1 / B'
    - `token-sum`: 1
    - `prompt-mean`: 1 / (P'·tokens of the prompt's answers), P' the prompts with a token; `prompt_B` names each answer's
      prompt (ScaleRL, arXiv 2510.13786)

    With no token at all every weight is 0. Raises UserError when the mode needs `max_len` or `prompt_B` and has none.
    """
    assert mode in MODES, mode
    lengths_B = _numpy(lengths_B)
    counted_B = lengths_B > 0
    answers = max(int(counted_B.sum()), 1)
    if mode == "token-mean":
        denominator_B = np.full_like(lengths_B, lengths_B.sum())
    elif mode == "seq-mean-token-mean":
        denominator_B = answers * lengths_B
    elif mode == "seq-mean-token-sum-norm":
        if not max_len:
            raise UserError("loss_agg = seq-mean-token-sum-norm divides by the generation budget; give max_len (max_tokens).")
        denominator_B = np.full_like(lengths_B, answers * max_len)
    elif mode == "seq-mean-token-sum":
        denominator_B = np.full_like(lengths_B, answers)
    elif mode == "token-sum":
        denominator_B = np.ones_like(lengths_B)
    else:
        if prompt_B is None:
            raise UserError("loss_agg = prompt-mean averages within each prompt; give prompt, the prompt of every answer.")
        _, prompt = np.unique(np.asarray(_numpy(prompt_B), dtype=np.int64), return_inverse=True)
        tokens_P = np.bincount(prompt, weights=lengths_B)
        denominator_B = int((tokens_P > 0).sum()) * tokens_P[prompt]
    return np.where(counted_B, 1.0 / np.where(counted_B, denominator_B, 1.0), 0.0)


def _numpy(x: Any) -> np.ndarray:
    return np.asarray(x.detach().cpu().numpy() if hasattr(x, "detach") else x, dtype=np.float64).reshape(-1)
