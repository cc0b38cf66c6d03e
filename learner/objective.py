"""The loss of every objective, per token and for a micro-batch. Pure formulas of tensors.

Shape legend: B answers of the micro-batch, T token positions of a padded row, N tokens of a packed row.
`new`, `old`, `behav`, `ref` are log-probabilities (nats) of the sampled token at the sampling temperature: under the policy
being optimised, the policy when the batch began, the engine that sampled, and the reference model.

The ratio is rho = exp(new − x), x = old or behav. Log-ratios are clamped to ±20 before every `exp`: a clamped one keeps the
constant value e^±20 and passes no gradient through that `exp`, so that loss and gradient stay finite at any log-ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from learner.aggregate import weighted_sum
from learner.denominators import answer_weights
from learner.diagnostics import ObjectiveSums, objective_sums
from learner.layout import pack_tokens, token_weights
from learner.ratios import answer_mean, bounded_exp, kl_terms, mismatch_exponent, mismatch_weights
from rollout.errors import UserError


@dataclass(frozen=True)
class LossOutputs:
    """What a micro-batch adds to the optimiser step.

    `loss` is the scalar to call `backward` on: this micro-batch's share, so shares are *added* over micro-batches and ranks.
    `policy`, `kl`, `entropy` are its detached parts before their coefficients: loss = policy + kl_coef·kl − entropy_coef·entropy
    (`kl` is 0 when it is in the reward or there is no reference). `sums` are detached statistics, to add up likewise.
    """

    loss: torch.Tensor
    policy: torch.Tensor
    kl: torch.Tensor
    entropy: torch.Tensor
    sums: ObjectiveSums


def grpo_loss(
    logp_new: torch.Tensor,
    logp_old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    logp_behav: torch.Tensor | None = None,
    logp_ref: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    answer: torch.Tensor | None = None,
    prompt: Any = None,
    weights: Any = None,
    advantages_per_token: bool = False,
    ratio_to: str = "old",
    policy_loss: str = "clip",
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    ratio_level: str = "token",
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    kl_in: str = "loss",
    entropy_coef: float = 0.0,
    mismatch: str = "none",
    mismatch_cap: float = 2.0,
    mismatch_low: float = 0.5,
    loss_agg: str = "token-mean",
    max_len: int | None = None,
) -> LossOutputs:
    """The loss of a micro-batch: Σ_i w_i Σ_t [mismatch weight · policy term + kl_coef · KL − entropy_coef · entropy].

    Tensors per token are padded [B, T], or packed [N] with `answer` [N] naming each token's answer; `mask` is True at
    policy-written tokens of answers that are not masked as a whole, and nothing is read elsewhere. An answer is never split
    between micro-batches. `advantages` is [B], or per token ([B, T], or [N] with `advantages_per_token`).
    `weights` [B] are these answers' weights over the whole optimiser step, from `answer_weights`; without them the input is
    taken to be the whole step, and `loss_agg`, `prompt` [B] and `max_len` make the weights.

    The formulas are those of `policy_terms`, `kl_terms` and `mismatch_weights`. At `ratio_level` sequence every token has its
    answer's ratio s_i, the geometric mean over the answer's tokens (GSPO, arXiv 2507.18071). Only `logp_new` and `entropy`
    get gradient. Half-precision inputs are computed in float32. Where a batch is one optimiser step on the policy that it
    began with, pass `logp_new.detach()` as `logp_old`.

    Raises UserError when a term needs a tensor that was not given.
    """
    behav_needed = ratio_to == "behav" or mismatch != "none"
    _need(logp_behav, behav_needed, f"ratio_to = {ratio_to} with mismatch = {mismatch}", "logp_behav")
    _need(logp_ref, kl_coef > 0 and kl_in == "loss", f"kl_coef = {kl_coef} in the loss", "logp_ref")
    _need(entropy, entropy_coef != 0, f"entropy_coef = {entropy_coef}", "entropy")

    tok = pack_tokens(logp_new, logp_old, logp_behav, logp_ref, entropy, advantages, mask, answer, weights, prompt, advantages_per_token)
    if weights is None:
        weights = answer_weights(tok.lengths_B, prompt, mode=loss_agg, max_len=max_len)
    weights_N = token_weights(weights, tok.answer, tok.mask)

    log_ratio = tok.new - (tok.old if ratio_to == "old" else tok.behav)
    if ratio_level == "sequence":
        log_ratio = answer_mean(log_ratio, tok.answer, tok.lengths_B)
    bounds = (1 - clip, 1 + (clip if clip_high is None else clip_high))
    terms = policy_terms(policy_loss, tok.new, bounded_exp(log_ratio), tok.adv, bounds, dual_clip=dual_clip, taus=(tau_pos, tau_neg))
    raw = kept = torch.ones_like(terms)
    if tok.behav is not None:
        raw, kept = mismatch_weights(tok.old - tok.behav, tok.answer, tok.lengths_B, mismatch, cap=mismatch_cap, low=mismatch_low)
        terms = kept * terms

    zero_N = torch.zeros_like(tok.old)
    kl_N = zero_N if tok.ref is None or kl_in == "reward" else kl_terms(tok.new, tok.ref, kl_estimator)
    ent_N = zero_N if tok.entropy is None else tok.entropy
    policy, kl, ent = (weighted_sum(x, tok.mask, weights_N) for x in (terms, kl_N, ent_N))
    loss = policy + kl_coef * kl if kl_coef else policy
    loss = loss - entropy_coef * ent if entropy_coef else loss  # at 0 nothing goes back through the entropy
    with torch.no_grad():
        scale = weighted_sum(terms.abs() + kl_coef * kl_N.abs() + abs(entropy_coef) * ent_N.abs(), tok.mask, weights_N)
        binding = _binding(policy_loss, bounded_exp(log_ratio), tok.adv, bounds, dual_clip)
        exponents = [log_ratio] if policy_loss != "reinforce" else []
        exponents += [tok.ref - tok.new] if tok.ref is not None and kl_coef and (kl_in, kl_estimator) == ("loss", "k3") else []
        exponents += [mismatch_exponent(tok.old - tok.behav, tok.answer, tok.lengths_B, mismatch)] if mismatch != "none" else []
        parts = {"loss": loss, "policy": policy, "kl": kl, "entropy_part": ent, "abs_terms": scale}
        sums = objective_sums(tok, log_ratio, binding, ratio_level == "sequence", (raw, kept), exponents, parts)
    return LossOutputs(loss, policy.detach(), kl.detach(), ent.detach(), sums)


def policy_terms(
    policy_loss: str,
    new: torch.Tensor,
    ratio: torch.Tensor,
    adv: torch.Tensor,
    bounds: tuple[float, float],
    *,
    dual_clip: float | None = None,
    taus: tuple[float, float] = (1.0, 1.05),
) -> torch.Tensor:
    """The policy term of every token (to be minimised), all tensors of one shape; `bounds` = (1 − clip, 1 + clip_high).

    - `clip`: −min(rho·A, clip(rho)·A) (PPO, arXiv 1707.06347; clip-higher: DAPO, arXiv 2503.14476); with `dual_clip` c, at
      A < 0 at most c·|A| (arXiv 1912.09729)
    - `cispo`: −sg[clip(rho)]·A·new, the weight is clipped and the gradient never zeroed (MiniMax-M1, arXiv 2506.13585)
    - `sapo`: −f(rho)·A, f(rho) = 4/tau · sigmoid(tau·(rho − 1)), tau by the sign of A (SAPO, arXiv 2511.20347)
    - `reinforce`: −A·new
    """
    if policy_loss == "reinforce":
        return -adv * new
    if policy_loss == "cispo":
        return -ratio.detach().clamp(*bounds) * adv * new
    if policy_loss == "sapo":
        tau = torch.full_like(ratio, taus[1]).masked_fill(adv > 0, taus[0])
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * adv
    assert policy_loss == "clip", policy_loss
    terms = -torch.minimum(ratio * adv, ratio.clamp(*bounds) * adv)
    if dual_clip is not None:
        terms = torch.where(adv < 0, torch.minimum(terms, -dual_clip * adv), terms)
    return terms


def _need(tensor: torch.Tensor | None, needed: bool, why: str, name: str) -> None:
    if needed and tensor is None:
        raise UserError(f"{why} needs the tensor {name}, which was not given; pass it, or switch the term off.")


def _binding(
    policy_loss: str, ratio: torch.Tensor, adv: torch.Tensor, bounds: tuple[float, float], dual_clip: float | None
) -> dict[str, torch.Tensor]:
    """Tokens at which a clip changes the gradient [N] bool: `clip` by the sign of A, `cispo` wherever the weight is cut, else nowhere."""
    low, high, dual = ratio < bounds[0], ratio > bounds[1], torch.zeros_like(ratio, dtype=torch.bool)
    if policy_loss == "clip":
        low, high = low & (adv < 0), high & (adv > 0)
        if dual_clip is not None:
            dual = (adv < 0) & (ratio > dual_clip)
    elif policy_loss == "cispo":
        low, high = low & (adv != 0), high & (adv != 0)
    else:
        low, high = dual, dual
    return {"clip_low": low, "clip_high": high, "clip_dual": dual}


