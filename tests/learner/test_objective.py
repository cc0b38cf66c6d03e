"""Every objective by a closed-form value and by its gradient's path, at ratios away from 1; and what a step measures.

Not covered: the log-probabilities themselves (test_logprob), random splits (test_invariance), extremes (test_numerics).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from learner.diagnostics import ObjectiveSums, finalise
from learner.objective import LossOutputs, grpo_loss
from rollout.errors import UserError

RATIO = torch.tensor([[1.5, 0.5, 1.1], [1.5, 0.5, 0.9]], dtype=torch.float64)
ADV = torch.tensor([2.0, -3.0], dtype=torch.float64)
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -3.0, -1.5]], dtype=torch.float64)
MASK = torch.ones(2, 3, dtype=torch.bool)


def run(ratio: torch.Tensor = RATIO, adv: torch.Tensor = ADV, mask: torch.Tensor = MASK, **flags: Any) -> tuple[LossOutputs, torch.Tensor]:
    """(outputs, d loss / d new) with the ratio as given, summed over tokens."""
    new = (OLD[: len(ratio)] + ratio.log()).requires_grad_()
    out = grpo_loss(new, OLD[: len(ratio)], adv, mask, **{"loss_agg": "token-sum"} | flags)
    out.loss.backward()
    assert new.grad is not None
    return out, new.grad


def close(got: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


# -- policy terms ---------------------------------------------------------------------------------------------------


def test_clip() -> None:
    """−min(rho·A, clip(rho)·A): cut at 1.2 for A > 0 and at 0.8 for A < 0, where the gradient is 0; else −rho·A."""
    out, grad = run()
    assert out.loss.item() == pytest.approx(-(1.2 + 0.5 + 1.1) * 2 + (1.5 + 0.8 + 0.9) * 3, rel=1e-13)
    close(grad, [[0, -0.5 * 2, -1.1 * 2], [1.5 * 3, 0, 0.9 * 3]])


def test_clip_higher() -> None:
    """DAPO: only the upper side moves."""
    out, grad = run(clip_high=0.6)
    assert out.loss.item() == pytest.approx(-(1.5 + 0.5 + 1.1) * 2 + (1.5 + 0.8 + 0.9) * 3, rel=1e-13)
    close(grad, [[-1.5 * 2, -0.5 * 2, -1.1 * 2], [1.5 * 3, 0, 0.9 * 3]])


def test_dual_clip() -> None:
    """At A < 0 the term is at most c·|A|, without gradient there; A > 0 is untouched."""
    out, grad = run(dual_clip=1.25)
    assert out.loss.item() == pytest.approx(-(1.2 + 0.5 + 1.1) * 2 + (1.25 + 0.8 + 0.9) * 3, rel=1e-13)
    close(grad, [[0, -0.5 * 2, -1.1 * 2], [0, 0, 0.9 * 3]])


def test_cispo() -> None:
    """Golden number 7: d loss / d new = −clip(rho)·A for every token, clipped or not."""
    out, grad = run(policy_loss="cispo", clip=0.3, clip_high=0.2)
    new = OLD + RATIO.log()
    clipped = RATIO.clamp(0.7, 1.2)
    assert out.loss.item() == pytest.approx(-(clipped * ADV[:, None] * new).sum().item(), rel=1e-13)
    close(grad, (-clipped * ADV[:, None]).tolist())


def test_sapo() -> None:
    """−f(rho)·A with f = 4/tau·sigmoid(tau·(rho − 1)), f′ = 4·s·(1 − s), tau by the sign of A; f(1) = 2/tau, f′(1) = 1."""
    out, grad = run(policy_loss="sapo", tau_pos=0.8, tau_neg=2.0)
    value, slope = 0.0, [[0.0] * 3 for _ in range(2)]
    for i, (a, tau) in enumerate([(2.0, 0.8), (-3.0, 2.0)]):
        for t in range(3):
            rho = RATIO[i, t].item()
            s = 1 / (1 + math.exp(-tau * (rho - 1)))
            value -= 4 / tau * s * a
            slope[i][t] = -4 * s * (1 - s) * a * rho
    assert out.loss.item() == pytest.approx(value, rel=1e-13)
    close(grad, slope)
    out, grad = run(ratio=torch.ones(1, 3, dtype=torch.float64), adv=ADV[:1], mask=MASK[:1], policy_loss="sapo", tau_pos=0.8)
    assert out.loss.item() == pytest.approx(-3 * 2 / 0.8 * 2, rel=1e-13)
    close(grad, [[-2.0, -2.0, -2.0]])


def test_reinforce() -> None:
    """−A·new: no ratio, whatever old is."""
    out, grad = run(policy_loss="reinforce")
    new = OLD + RATIO.log()
    assert out.loss.item() == pytest.approx(-(ADV[:, None] * new).sum().item(), rel=1e-13)
    close(grad, [[-2.0] * 3, [3.0] * 3])


def test_golden_gspo_ratio_is_the_geometric_mean() -> None:
    """Golden number 6; and an answer is clipped or kept whole, each kept token with gradient −s·A/|o| · (its |o| tokens)."""
    s = [(1.5 * 0.5 * 1.1) ** (1 / 3), (1.5 * 0.5 * 0.9) ** (1 / 3)]
    out, grad = run(ratio_level="sequence", clip=0.5, clip_high=0.5)
    assert out.loss.item() == pytest.approx(3 * (-s[0] * 2 + s[1] * 3), rel=1e-13)
    close(grad, [[-s[0] * 2] * 3, [s[1] * 3] * 3])
    assert finalise(out.sums).ratio_max == pytest.approx(max(s), rel=1e-13)
    assert finalise(out.sums).ratio_min == pytest.approx(min(s), rel=1e-13)
    out, grad = run(ratio_level="sequence", clip=0.1)  # s = 0.94 and 0.88: the second is clipped low at A < 0
    assert out.loss.item() == pytest.approx(3 * (-s[0] * 2 + 0.9 * 3), rel=1e-13)
    close(grad, [[-s[0] * 2] * 3, [0.0] * 3])
    assert (finalise(out.sums).clipfrac_low, finalise(out.sums).clipfrac_high) == (0.5, 0.0)


def test_sequence_ratio_counts_policy_written_tokens_only() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    s = (1.5 * 0.5) ** 0.5
    out, _ = run(mask=mask, ratio_level="sequence", clip=0.9, adv=torch.tensor([2.0, 0.0], dtype=torch.float64))
    assert out.loss.item() == pytest.approx(-2 * s * 2, rel=1e-13)


def test_sequence_ratio_with_cispo_and_sapo() -> None:
    """The ratio level combines with every loss that has a ratio."""
    s = (1.5 * 0.5 * 1.1) ** (1 / 3)
    out, grad = run(RATIO[:1], ADV[:1], MASK[:1], policy_loss="cispo", ratio_level="sequence", clip=0.01, clip_high=4.0)
    close(grad, [[-0.99 * 2.0] * 3])
    out, _ = run(RATIO[:1], ADV[:1], MASK[:1], policy_loss="sapo", ratio_level="sequence")
    assert out.loss.item() == pytest.approx(-3 * 2 * 4 / (1 + math.exp(-(s - 1))), rel=1e-13)


def test_loss_agg_keeps_its_meaning_at_sequence_level() -> None:
    s = (1.5 * 0.5) ** 0.5
    mask = torch.tensor([[True, True, False], [True, False, False]])
    adv = torch.tensor([2.0, 2.0], dtype=torch.float64)
    flags = {"mask": mask, "adv": adv, "ratio_level": "sequence", "clip": 0.9}
    token, _ = run(loss_agg="token-mean", **flags)
    answer, _ = run(loss_agg="seq-mean-token-mean", **flags)
    assert token.loss.item() == pytest.approx(-2 * (2 * s + 1.5) / 3, rel=1e-13)
    assert answer.loss.item() == pytest.approx(-2 * (s + 1.5) / 2, rel=1e-13)


def test_ratio_to_behav() -> None:
    """The denominator is the engine's log-prob; old is not part of the loss."""
    behav = OLD - 0.1
    new = OLD.clone().requires_grad_()
    out = grpo_loss(new, OLD, ADV, MASK, logp_behav=behav, ratio_to="behav", loss_agg="token-sum")
    rho = math.exp(0.1)
    assert out.loss.item() == pytest.approx(-rho * 3 * 2 + rho * 3 * 3, rel=1e-13)
    assert finalise(out.sums).ratio_max == pytest.approx(rho, rel=1e-13)
    assert finalise(out.sums).mismatch_max == pytest.approx(rho, rel=1e-13)


def test_advantages_per_token() -> None:
    adv = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    out, _ = run(RATIO[:1], adv, MASK[:1], policy_loss="reinforce")
    expected = -((OLD[:1] + RATIO[:1].log()) * adv).sum().item()
    assert out.loss.item() == pytest.approx(expected, rel=1e-13)
    new = (OLD[0] + RATIO[0].log()).requires_grad_()
    flat = grpo_loss(
        new, OLD[0], adv[0], MASK[0], answer=torch.zeros(3, dtype=torch.long), advantages_per_token=True, policy_loss="reinforce",
        loss_agg="token-sum",
    )  # fmt: skip
    assert flat.loss.item() == pytest.approx(expected, rel=1e-13)


# -- KL, entropy, mismatch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss(estimator: str) -> None:
    """d = ref − new: k1 = −d, k2 = d²/2, k3 = e^d − d − 1; slopes in new: 1, −d, 1 − e^d."""
    new = OLD.clone().requires_grad_()
    d = torch.tensor([[0.3, -0.2, 0.0], [1.0, -1.0, 0.5]], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    out = grpo_loss(new, OLD, zero, MASK, logp_ref=OLD + d, kl_coef=0.5, kl_estimator=estimator, loss_agg="token-sum")
    out.loss.backward()
    value = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}[estimator]
    slope = {"k1": torch.ones_like(d), "k2": -d, "k3": 1 - d.exp()}[estimator]
    assert out.loss.item() == pytest.approx(0.5 * value.sum().item(), rel=1e-12)
    assert out.kl.item() == pytest.approx(value.sum().item(), rel=1e-12)
    assert new.grad is not None
    torch.testing.assert_close(new.grad, 0.5 * slope, rtol=1e-12, atol=1e-14)


def test_kl_in_the_reward_is_not_in_the_loss_but_is_measured() -> None:
    out = grpo_loss(OLD, OLD, ADV, MASK, logp_ref=OLD + 0.5, kl_coef=0.5, kl_in="reward", loss_agg="token-sum")
    assert out.loss.item() == out.policy.item() == pytest.approx(3.0)
    assert out.kl.item() == 0.0
    assert finalise(out.sums).kl_ref == pytest.approx(math.exp(0.5) - 1.5)


def test_entropy_is_raised() -> None:
    entropy = torch.full((2, 3), 0.7, dtype=torch.float64, requires_grad=True)
    new = OLD.clone().requires_grad_()
    out = grpo_loss(new, OLD, ADV, MASK, entropy=entropy, entropy_coef=0.1, loss_agg="token-mean")
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.5 - 0.1 * 0.7)
    assert entropy.grad is not None
    close(entropy.grad, [[-0.1 / 6] * 3] * 2)


def test_a_coefficient_of_zero_sends_nothing_back() -> None:
    """Entropy and KL are measured all the same."""
    entropy = torch.full((2, 3), 0.7, dtype=torch.float64, requires_grad=True)
    new = OLD.clone().requires_grad_()
    out = grpo_loss(new, OLD, ADV, MASK, entropy=entropy, logp_ref=OLD + 1, loss_agg="token-sum")
    out.loss.backward()
    assert entropy.grad is None and new.grad is not None
    close(new.grad, [[-2.0] * 3, [3.0] * 3])
    assert finalise(out.sums).entropy == pytest.approx(0.7)
    assert finalise(out.sums).kl_ref == pytest.approx(math.e - 2)


LOG_W = torch.tensor([[math.log(3.0), math.log(0.4), 0.0], [math.log(1.5), math.log(1.5), math.log(1.2)]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("mismatch", "weights"),
    [
        ("none", [[1, 1, 1], [1, 1, 1]]),
        ("tis", [[2, 0.4, 1], [1.5, 1.5, 1.2]]),
        ("mis", [[0, 0.4, 1], [1.5, 1.5, 1.2]]),
        ("icepop", [[0, 0, 1], [1.5, 1.5, 1.2]]),
        ("seq-tis", [[1.2] * 3, [2] * 3]),
        ("seq-mis", [[1.2] * 3, [0] * 3]),
        ("geo-mask", [[1] * 3, [1] * 3]),
    ],
)
def test_mismatch_weights_the_policy_term_only(mismatch: str, weights: list) -> None:
    """w = exp(old − behav), detached; the denominator keeps tokens that the correction masks."""
    new = OLD.clone().requires_grad_()
    flags = {"logp_ref": OLD + 1, "kl_coef": 0.5, "kl_estimator": "k2", "loss_agg": "token-mean"}
    out = grpo_loss(new, OLD, ADV, MASK, logp_behav=OLD - LOG_W, mismatch=mismatch, **flags)
    w = torch.tensor(weights, dtype=torch.float64)
    assert out.policy.item() == pytest.approx(-(w * ADV[:, None]).sum().item() / 6, rel=1e-12)
    assert out.kl.item() == pytest.approx(0.5, rel=1e-12)
    out.loss.backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, -(w * ADV[:, None] + 0.5) / 6)


def test_geo_mask_takes_the_geometric_mean() -> None:
    """The geometric means are 1.06 and 1.39: a cap of 1.2 masks the second answer."""
    out = grpo_loss(OLD, OLD, ADV, MASK, logp_behav=OLD - LOG_W, mismatch="geo-mask", mismatch_cap=1.2, loss_agg="token-sum")
    assert out.loss.item() == pytest.approx(-6.0)
    assert finalise(out.sums).mismatch_removed == pytest.approx(0.5)
    assert finalise(out.sums).mismatch_masked == 3


def test_share_of_mismatch_weight_removed() -> None:
    out = grpo_loss(OLD, OLD, ADV, MASK, logp_behav=OLD - LOG_W, mismatch="tis")
    assert finalise(out.sums).mismatch_removed == pytest.approx(1 / (3 + 0.4 + 1 + 1.5 + 1.5 + 1.2))
    stats = finalise(grpo_loss(OLD, OLD, ADV, MASK, logp_behav=OLD - LOG_W).sums)
    assert stats.mismatch_removed == 0.0
    assert stats.mismatch_abs == pytest.approx(LOG_W.abs().mean().item())
    assert (stats.mismatch_min, stats.mismatch_max) == (pytest.approx(0.4), pytest.approx(3.0))
    assert stats.kl_behav == pytest.approx((torch.exp(-LOG_W) + LOG_W - 1).mean().item())


# -- where gradient goes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy_loss", ["clip", "cispo", "sapo", "reinforce"])
@pytest.mark.parametrize("mismatch", ["none", "tis", "seq-mis"])
def test_only_new_and_entropy_get_gradient(policy_loss: str, mismatch: str) -> None:
    given = {name: (OLD + shift).requires_grad_() for name, shift in (("old", 0.0), ("behav", 0.02), ("ref", 0.3), ("entropy", 5.0))}
    new, adv = (OLD + 0.05).requires_grad_(), ADV.clone().requires_grad_()
    out = grpo_loss(
        new, given["old"], adv, MASK, logp_behav=given["behav"], logp_ref=given["ref"], entropy=given["entropy"], policy_loss=policy_loss,
        mismatch=mismatch, kl_coef=0.1, entropy_coef=0.01,
    )  # fmt: skip
    out.loss.backward()
    assert new.grad is not None and (new.grad != 0).all()
    assert given["entropy"].grad is not None
    assert all(x.grad is None for x in (given["old"], given["behav"], given["ref"], adv))
    assert not any(x.requires_grad for x in (out.policy, out.kl, out.entropy, *vars(out.sums).values()))


def test_old_equal_to_new_makes_every_ratio_one() -> None:
    """One step on fresh data: the loss's gradient is the policy gradient, and nothing is clipped however tight the clip is."""
    new = OLD.clone().requires_grad_()
    out = grpo_loss(new, new.detach(), ADV, MASK, clip=0.0, loss_agg="token-sum")
    out.loss.backward()
    assert new.grad is not None
    close(new.grad, [[-2.0] * 3, [3.0] * 3])
    assert finalise(out.sums).clipfrac == 0.0


def test_padding_is_never_read() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    new = (OLD + RATIO.log()).masked_fill(~mask, torch.nan).requires_grad_()
    old = OLD.masked_fill(~mask, -torch.inf)
    out = grpo_loss(new, old, ADV, mask, logp_behav=old, logp_ref=old, kl_coef=0.1, mismatch="tis", ratio_level="sequence")
    out.loss.backward()
    assert math.isfinite(out.loss.item()) and new.grad is not None
    assert torch.isfinite(new.grad).all() and (new.grad[~mask] == 0).all()
    assert all(math.isfinite(x) for x in vars(finalise(out.sums)).values() if x is not None)


# -- statistics -----------------------------------------------------------------------------------------------------------


def test_clipfrac_counts_where_the_clip_binds() -> None:
    """Ratio 1.5 with A > 0 is clipped high, 0.5 with A < 0 low; the other sides of the same ratios are not."""
    out, _ = run()
    stats = finalise(out.sums)
    assert (stats.clipfrac_high, stats.clipfrac_low, stats.clipfrac) == (pytest.approx(1 / 6), pytest.approx(1 / 6), pytest.approx(2 / 6))
    assert (stats.ratio_min, stats.ratio_max) == (pytest.approx(0.5), pytest.approx(1.5))
    assert (stats.tokens, stats.answers, stats.clamped) == (6, 2, 0)
    assert stats.kl_old == pytest.approx((1 / RATIO + RATIO.log() - 1).mean().item())


def test_clipfrac_of_cispo_counts_either_sign() -> None:
    out, _ = run(policy_loss="cispo", clip=0.2)
    assert finalise(out.sums).clipfrac_high == pytest.approx(2 / 6)
    assert finalise(out.sums).clipfrac_low == pytest.approx(2 / 6)


def test_clipfrac_dual_is_apart() -> None:
    out, _ = run(dual_clip=1.25)
    assert finalise(out.sums).clipfrac_dual == pytest.approx(1 / 6)


def test_sums_join_by_their_vectors() -> None:
    a, _ = run()
    b, _ = run(ratio=RATIO[:1] * 2, adv=ADV[:1], mask=MASK[:1])
    whole = (a.sums + b.sums) + ObjectiveSums.zeros()
    stats = finalise(whole)
    assert stats.tokens == 9 and stats.ratio_max == pytest.approx(3.0) and stats.ratio_min == pytest.approx(0.5)
    assert stats.loss == pytest.approx(a.loss.item() + b.loss.item())
    again = ObjectiveSums.from_vectors(*whole.to_vectors())
    assert finalise(again) == stats


def test_statistics_of_nothing() -> None:
    stats = finalise(ObjectiveSums.zeros())
    assert (stats.loss, stats.tokens, stats.clipfrac, stats.ratio_min, stats.ratio_max) == (0.0, 0, 0.0, 1.0, 1.0)
    assert stats.kl_ref is None and stats.entropy is None and stats.mismatch_removed is None


# -- what is missing is asked for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"kl_coef": 0.1}, "logp_ref"),
        ({"entropy_coef": 0.1}, "entropy"),
        ({"mismatch": "tis"}, "logp_behav"),
        ({"ratio_to": "behav"}, "logp_behav"),
        ({"loss_agg": "prompt-mean"}, "prompt"),
        ({"loss_agg": "seq-mean-token-sum-norm"}, "max_len"),
    ],
)
def test_missing_inputs(flags: dict, name: str) -> None:
    with pytest.raises(UserError, match=name):
        grpo_loss(OLD, OLD, ADV, MASK, **flags)


def test_shapes_that_disagree_are_internal_errors() -> None:
    with pytest.raises(AssertionError, match="answers"):
        grpo_loss(OLD, OLD, torch.ones(5), MASK)
    with pytest.raises(AssertionError, match="shape"):
        grpo_loss(OLD, OLD[:, :2], ADV, MASK)
