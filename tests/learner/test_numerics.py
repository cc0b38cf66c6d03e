"""Extremes: finite loss and gradient, or a clear error.

Not covered: log-probabilities of −inf, which no sampled token has (the step that meets one is skipped as non-finite).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.advantage import group_advantages
from learner.diagnostics import finalise
from learner.objective import grpo_loss

LOSSES = ["clip", "cispo", "sapo", "reinforce"]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("policy_loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 2.0e4])
def test_extreme_log_ratios(dtype: torch.dtype, policy_loss: str, level: str, log_ratio: float) -> None:
    """Ratio, KL and mismatch all at the extreme, for both signs of A; the clamped tokens are counted."""
    old = torch.full((2, 3), -0.5 if log_ratio < 0 else -0.5 - log_ratio, dtype=dtype)
    new = torch.full((2, 3), -0.5 + min(log_ratio, 0.0), dtype=dtype, requires_grad=True)
    out = grpo_loss(
        new, old, torch.tensor([1.0, -1.0]), torch.ones(2, 3), logp_ref=old, logp_behav=new.detach(), kl_coef=0.01,
        policy_loss=policy_loss, ratio_level="token" if policy_loss == "reinforce" else level, mismatch="tis",
    )  # fmt: skip
    out.loss.backward()
    assert math.isfinite(out.loss.item())
    assert new.grad is not None and torch.isfinite(new.grad).all() and new.grad.dtype == dtype
    assert finalise(out.sums).clamped == 6 * (2 if policy_loss == "reinforce" else 3)


def test_a_clamped_ratio_is_constant() -> None:
    """Value e^±20, no gradient through the exp; 19.9 still has both."""
    old = torch.zeros(1, 3, dtype=torch.float64)
    new = torch.tensor([[25.0, 19.9, -25.0]], dtype=torch.float64, requires_grad=True)
    out = grpo_loss(new, old, torch.tensor([-1.0]), torch.ones(1, 3), loss_agg="token-sum", clip=1.0)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(math.exp(20) + math.exp(19.9) + math.exp(-20), rel=1e-12)
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([[0.0, math.exp(19.9), 0.0]], dtype=torch.float64))
    assert finalise(out.sums).clamped == 2


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e6])
@pytest.mark.parametrize("size", [2, 1024])
def test_large_rewards(size: int, offset: float) -> None:
    """The variance is not E[x²] − E[x]²: an offset of 1e6 changes advantages by rounding only."""
    rewards = np.arange(size) % 2
    adv = group_advantages(rewards + offset)
    np.testing.assert_allclose(adv, 2.0 * rewards - 1, rtol=1e-9)
    equal = group_advantages(np.full(size, 0.1 + offset))
    assert (equal == 0).all()


@pytest.mark.parametrize("size", [3, 6, 12])
def test_equal_rewards_of_a_tenth(size: int) -> None:
    for baseline in ("group", "loo"):
        for scale in ("std", "none", "batch"):
            assert group_advantages([0.1] * size, baseline=baseline, scale=scale).tolist() == [0.0] * size


@pytest.mark.parametrize("size", [1, 2, 1024])
def test_group_sizes(size: int) -> None:
    rewards = np.zeros(size)
    rewards[0] = 1.0
    for baseline in ("group", "loo"):
        for scale in ("std", "none", "batch"):
            adv = group_advantages(rewards, baseline=baseline, scale=scale, std_ddof=1)
            assert np.isfinite(adv).all()
            assert abs(adv.sum()) < 1e-9
    assert group_advantages(rewards, std_ddof=1, std_eps=1e-4)[0] >= 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_very_long_and_very_short_answers(level: str) -> None:
    """100,000 tokens in float32 bf16-fed: sums stay exact enough for the ratio of the whole answer."""
    long = 100_000
    answer = torch.cat([torch.zeros(long, dtype=torch.long), torch.ones(1, dtype=torch.long)])
    new = torch.full((long + 1,), -0.5)
    new[::2] += 0.02
    new.requires_grad_()
    out = grpo_loss(
        new, torch.full_like(new, -0.5), torch.tensor([1.0, -1.0]), torch.ones(long + 1), answer=answer, ratio_level=level,
        loss_agg="seq-mean-token-mean",
    )  # fmt: skip
    out.loss.backward()
    up = math.exp(0.02)
    long_answer = math.exp(0.01) if level == "sequence" else (1 + up) / 2
    assert out.loss.item() == pytest.approx((-long_answer + up) / 2, abs=1e-6)
    assert new.grad is not None and torch.isfinite(new.grad).all()
    assert new.grad[-1].item() == pytest.approx(up / 2, rel=1e-6)


def test_bf16_is_computed_in_float32() -> None:
    """A log-ratio of 2⁻⁸·… would vanish in bf16's exp; the loss is float32 and agrees with float32 on the same inputs."""
    new = torch.tensor([[-0.5, -0.75]], dtype=torch.bfloat16)
    old = torch.tensor([[-0.50390625, -0.75390625]], dtype=torch.bfloat16)
    half = grpo_loss(new, old, torch.tensor([1.0]), torch.ones(1, 2))
    full = grpo_loss(new.float(), old.float(), torch.tensor([1.0]), torch.ones(1, 2))
    assert half.loss.dtype == torch.float32
    assert half.loss.item() == full.loss.item() == pytest.approx(-math.exp(0.00390625), rel=1e-6)
