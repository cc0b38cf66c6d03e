"""Formulas of log-ratios: the bounded exp, per-answer means, KL estimators, and the correction of old against behav.

Shape legend: B answers of the micro-batch, N tokens of a packed row, `answer` [N] the index of each token's answer.
`new`, `old`, `behav`, `ref` are log-probabilities of the sampled token (nats); log-ratios are 0 at masked tokens.
"""

from __future__ import annotations

import torch

LOG_RATIO_BOUND = 20.0


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of the log-ratio clamped to ±20; beyond it the value is constant and has no gradient."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def answer_sum(x: torch.Tensor, answer: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """[N]: the sum of `x` [N] (0 where masked) over each token's answer, added up in float64."""
    return x.new_zeros(lengths_B.shape, dtype=torch.float64).index_add(0, answer, x.double()).to(x.dtype)[answer]


def answer_mean(x: torch.Tensor, answer: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """[N]: the mean of `x` [N] (0 where masked) over the unmasked tokens of each token's answer."""
    total_B = x.new_zeros(lengths_B.shape, dtype=torch.float64).index_add(0, answer, x.double())
    return (total_B / lengths_B.clamp(min=1)).to(x.dtype)[answer]


def kl_terms(new: torch.Tensor, ref: torch.Tensor, estimator: str = "k3") -> torch.Tensor:
    """KL(new ‖ ref) of every token, estimated on samples of `new`: with d = ref − new, k1 = −d, k2 = d²/2, k3 = e^d − d − 1 (nats).

    The estimators are J. Schulman's ("Approximating KL divergence", 2020). In k3 the whole of d is clamped to ±20.
    """
    d = ref - new
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    assert estimator == "k3", estimator
    d = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(d) - d


def mismatch_weights(
    log_w: torch.Tensor, answer: torch.Tensor, lengths_B: torch.Tensor, mismatch: str = "none", *, cap: float = 2.0, low: float = 0.5
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight before, weight after) the correction of every token [N], detached, from `log_w` = old − behav [N] (0 where masked).

    With w = exp(old − behav): `tis` min(w, cap) (truncated importance sampling) · `mis` w·[w ≤ cap] · `icepop` w·[low ≤ w ≤ cap]
    (arXiv 2510.18855) · `seq-tis`, `seq-mis` the same with w the product over the answer · `geo-mask` 1 where the geometric
    mean over the answer lies in [low, cap], else 0 (the weight before is 1) · `none` leaves 1.
    """
    one = torch.ones_like(log_w)
    if mismatch == "none":
        return one, one
    w = bounded_exp(mismatch_exponent(log_w, answer, lengths_B, mismatch))
    if mismatch == "geo-mask":
        return one, one * ((w >= low) & (w <= cap))
    if mismatch in ("tis", "seq-tis"):
        return w, w.clamp(max=cap)
    assert mismatch in ("mis", "seq-mis", "icepop"), mismatch
    return w, w * ((w <= cap) & (w >= (low if mismatch == "icepop" else 0.0)))


def mismatch_exponent(log_w: torch.Tensor, answer: torch.Tensor, lengths_B: torch.Tensor, mismatch: str) -> torch.Tensor:
    """[N], detached: the logarithm of w, `log_w` itself, or its sum or mean over the answer."""
    log_w = log_w.detach()
    if mismatch == "geo-mask":
        return answer_mean(log_w, answer, lengths_B)
    return answer_sum(log_w, answer, lengths_B) if mismatch.startswith("seq-") else log_w
