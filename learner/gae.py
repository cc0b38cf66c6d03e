"""The critic's formulas: a reward per token, generalised advantages, returns, and the terms of the value's loss. Pure functions.

Shape legend: K answers, N policy-written tokens, those of an answer one after another and the answers in order (`answer_N` does
not decrease). V_t is the value of what stands before token t, gamma is 1, and V = 0 after an answer's last token, cut off or not.
Advantages and returns are numpy in float64, over whole answers; the value's loss is torch, and gets gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def token_rewards(reward_K: np.ndarray, answer_N: np.ndarray, k1_N: np.ndarray | None = None, kl_coef: float = 0.0) -> np.ndarray:
    """[N]: the answer's reward at its last token, and kl_coef · k1 (old − ref, nats) taken from that of every token."""
    length_K = np.bincount(answer_N, minlength=len(reward_K))
    assert len(length_K) == len(reward_K) and length_K.all(), "an answer without a token has no place for its reward"
    reward_N = np.zeros(len(answer_N), dtype=np.float64)
    reward_N[np.cumsum(length_K) - 1] = reward_K
    return reward_N if k1_N is None else reward_N - kl_coef * np.asarray(k1_N, dtype=np.float64)


def gae(reward_N: np.ndarray, value_N: np.ndarray, answer_N: np.ndarray, lam: Any) -> np.ndarray:
    """[N]: A_t = Σ_k lambda^k · delta_{t+k} with delta_t = r_t + V_{t+1} − V_t, within each answer (GAE, arXiv 1506.02438).

    `lam` is one lambda, or one for each answer [K]. With lambda = 1, A_t = Σ_{k ≥ t} r_k − V_t; with lambda = 0, A_t = delta_t.
    """
    value_N = np.asarray(value_N, dtype=np.float64)
    length_K = np.bincount(answer_N)
    ends = np.cumsum(length_K)
    next_N = np.append(value_N[1:], 0.0)
    next_N[ends - 1] = 0.0
    advantage_N = np.asarray(reward_N, dtype=np.float64) + next_N - value_N  # delta, which the loop below adds up
    # Backwards from the last token, all answers at once: longest first, so that those with a token left stand in front.
    order = np.argsort(-length_K, kind="stable")
    last_K, lam_K = (ends - 1)[order], np.broadcast_to(np.asarray(lam, dtype=np.float64), length_K.shape)[order]
    left = np.searchsorted(-length_K[order], -np.arange(1, length_K.max(initial=0) + 1), side="right")
    for back, count in enumerate(left[1:], start=1):
        at = last_K[:count] - back
        advantage_N[at] += lam_K[:count] * advantage_N[at + 1]
    return advantage_N


def length_adaptive_lambda(length_K: np.ndarray, alpha: float) -> np.ndarray:
    """[K]: 1 − 1 / (alpha · l) for an answer of l tokens, never below 0: the longer, the further rewards reach (VAPO, arXiv 2504.05118)."""
    return np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(length_K, 1)))


def value_terms(
    value_N: torch.Tensor, old_N: torch.Tensor, return_N: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(½ (V − R)² per token, the tokens [N] bool whose clip binds).

    With a clip, V may move by no more than it from `old_N`, the value when the batch began: the term is the larger of ½ (V − R)² and
    ½ (V_clipped − R)², so that a token which has gone beyond gets no gradient unless it must come back (PPO, arXiv 1707.06347).
    """
    terms_N = 0.5 * (value_N - return_N).square()
    if clip is None:
        return terms_N, torch.zeros_like(terms_N, dtype=torch.bool)
    moved_N = value_N - old_N
    clipped_N = 0.5 * (old_N + moved_N.clamp(-clip, clip) - return_N).square()
    binds_N = (moved_N.abs() > clip) & (clipped_N > terms_N)  # within the clip the two differ by rounding alone
    return torch.where(binds_N, clipped_N, terms_N), binds_N


def push_size(grad_N: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Σ |d loss / d log-probability| over unmasked tokens, float64: how hard a term pushes on them."""
    return grad_N.detach().masked_fill(~mask, 0.0).double().abs().sum()
