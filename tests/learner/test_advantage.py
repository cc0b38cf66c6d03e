"""Advantages against hand-computed values and a plain-Python reference, and the rules of masked, absent and equal rewards.

Not covered: the KL that enters the reward comes from log-probabilities that only the learner has (test_step), and the
buffer's own judgement of a group's spread (test_admission).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.advantage import (
    group_advantages,
    informative_groups,
    kl_in_reward,
    overlong_penalty,
    treat_overlong,
    weigh_rewards,
)
from rollout.errors import UserError

SEEDS_GROUP = [1, 1, 1, 1, 1, 1, 1, 0]


def test_golden_std_and_none() -> None:
    """Golden number 2 of the seeds: mean 0.875, std 0.33."""
    std = math.sqrt(0.875 * 0.125)
    assert std == pytest.approx(0.33, abs=0.005)
    by_std = group_advantages(SEEDS_GROUP)
    np.testing.assert_allclose(by_std, [0.125 / std] * 7 + [-0.875 / std], rtol=1e-14)
    assert [round(x, 2) for x in by_std] == [0.38] * 7 + [-2.65]
    np.testing.assert_allclose(group_advantages(SEEDS_GROUP, scale="none"), [0.125] * 7 + [-0.875], rtol=1e-14)


def test_std_conventions() -> None:
    """The sample std and the eps of other systems, in one formula."""
    r = [1.0, 0.0, 0.5]
    sample = math.sqrt((0.25 + 0.25 + 0.0) / 2)
    expected = [0.5 / (sample + 1e-4), -0.5 / (sample + 1e-4), 0]
    np.testing.assert_allclose(group_advantages(r, std_ddof=1, std_eps=1e-4), expected, rtol=1e-14)


def test_golden_rloo() -> None:
    """Golden number 5: r_i − mean of the others = G/(G−1)·(r_i − mean)."""
    r = [0.3, 1.0, 0.0, 0.7, 0.2]
    others = [x - (sum(r) - x) / 4 for x in r]
    np.testing.assert_allclose(group_advantages(r, baseline="loo", scale="none"), others, rtol=1e-13)
    np.testing.assert_allclose(others, [5 / 4 * (x - sum(r) / 5) for x in r], rtol=1e-13)


@pytest.mark.parametrize("scale", ["std", "none", "batch"])
@pytest.mark.parametrize("baseline", ["group", "loo"])
@pytest.mark.parametrize("size", [3, 6, 12])
def test_golden_equal_rewards_are_exactly_zero(baseline: str, scale: str, size: int) -> None:
    """Golden number 8. Rewards of 0.1 do not sum exactly; another group with spread keeps the batch's std above zero."""
    rewards = [0.1] * size + [0.0, 1.0]
    group = [0] * size + [1, 1]
    adv = group_advantages(rewards, group, baseline=baseline, scale=scale)
    assert adv[:size].tolist() == [0.0] * size
    assert adv[size + 1] > 0 > adv[size]
    assert informative_groups(rewards, group).tolist() == [False] * size + [True, True]


@pytest.mark.parametrize("scale", ["std", "none", "batch"])
@pytest.mark.parametrize("baseline", ["group", "loo"])
def test_group_of_one_is_zero(baseline: str, scale: str) -> None:
    assert group_advantages([5.0], baseline=baseline, scale=scale).tolist() == [0.0]


def test_spread_tolerance_is_on_max_minus_min() -> None:
    assert group_advantages([0.0, 1e-6]).tolist() == [0.0, 0.0]
    np.testing.assert_allclose(group_advantages([0.0, 2e-6]), [-1.0, 1.0])
    assert group_advantages([0.0, 0.1, 0.2], spread_tol=0.3).tolist() == [0.0] * 3


def test_groups_do_not_mix_and_keep_their_order() -> None:
    rewards, group = [1.0, 10.0, 0.0, 30.0, 0.5], [7, 2, 7, 2, 7]
    np.testing.assert_allclose(group_advantages(rewards, group, scale="none"), [0.5, -10, -0.5, 10, 0], atol=1e-15)


def test_rows_are_groups_without_ids() -> None:
    adv = group_advantages([[1.0, 0.0], [0.0, 4.0]], scale="none")
    np.testing.assert_allclose(adv, [[0.5, -0.5], [-2.0, 2.0]])


def test_tensor_in_tensor_out() -> None:
    adv = group_advantages(torch.tensor(SEEDS_GROUP, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.long), scale="none")
    assert isinstance(adv, torch.Tensor) and adv.dtype == torch.float64
    torch.testing.assert_close(adv, torch.tensor([0.125] * 7 + [-0.875], dtype=torch.float64))


def test_masked_answers_stay_in_the_groups_baseline() -> None:
    adv = group_advantages([1.0, 0.0, 0.0, 1.0], scale="none", masked=[False, False, True, True])
    np.testing.assert_allclose(adv, [0.5, -0.5, -0.5, 0.5])


def test_batch_baseline_and_norm_use_unmasked_answers_only() -> None:
    """REINFORCE++: the third answer is masked; mean 2 and std 1 are those of the others."""
    rewards, group, masked = [1.0, 3.0, 100.0], [0, 1, 1], [False, False, True]
    np.testing.assert_allclose(group_advantages(rewards, group, baseline="batch", scale="none", masked=masked), [-1, 1, 98])
    np.testing.assert_allclose(group_advantages(rewards, group, baseline="batch", scale="batch", masked=masked), [-1, 1, 98])
    sample = group_advantages(rewards, group, baseline="batch", scale="batch", masked=masked, std_ddof=1)
    np.testing.assert_allclose(sample[1], 1 / math.sqrt(2))


def test_batch_baseline_keeps_all_right_groups() -> None:
    """An all-right group is above the batch's mean: there is no spread rule for this baseline."""
    adv = group_advantages([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], baseline="batch", scale="none")
    np.testing.assert_allclose(adv, [0.5, 0.5, -0.5, -0.5])


@pytest.mark.parametrize("baseline", ["batch", "group", "loo"])
def test_a_batch_of_equal_rewards_is_zero_not_rounding_noise(baseline: str) -> None:
    assert group_advantages([0.1] * 9, [0] * 3 + [1] * 6, baseline=baseline, scale="batch").tolist() == [0.0] * 9


def test_batch_norm_divides_group_baselined_advantages() -> None:
    """REINFORCE++-baseline: the std is over the batch, zeros of the uninformative group included."""
    adv = group_advantages([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], scale="batch")
    std = math.sqrt((0.25 + 0.25) / 4)
    np.testing.assert_allclose(adv, [0.5 / std, -0.5 / std, 0, 0])


def test_everything_masked_is_finite() -> None:
    for baseline in ("group", "batch"):
        adv = group_advantages([1.0, 0.0], baseline=baseline, scale="batch", masked=[True, True])
        assert np.isfinite(adv).all()


def test_absent_answers_are_in_no_baseline() -> None:
    adv = group_advantages([1.0, 0.0, math.nan], absent=[False, False, True], scale="none")
    assert adv.tolist() == [0.5, -0.5, 0.0]
    adv = group_advantages([1.0, 0.0, math.nan], absent=[False, False, True], baseline="loo", scale="none")
    assert adv.tolist() == [1.0, -1.0, 0.0]
    assert group_advantages([1.0, math.nan], absent=[False, True]).tolist() == [0.0, 0.0]


def test_nonfinite_reward_is_an_internal_error() -> None:
    with pytest.raises(AssertionError, match="not finite"):
        group_advantages([1.0, math.nan])
    with pytest.raises(AssertionError, match="not finite"):
        group_advantages([1.0, math.inf])


def test_spread_is_judged_on_the_raw_reward() -> None:
    """A length penalty makes no signal in an all-right group, and may cancel the signal of another without a NaN."""
    penalised = [1.0, 0.5, 0.0, 0.5]
    raw = [1.0, 1.0, 0.0, 1.0]
    adv = group_advantages(penalised, [0, 0, 1, 1], raw=raw, scale="std")
    np.testing.assert_allclose(adv, [0, 0, -1, 1])
    assert group_advantages([0.0, 0.0], raw=[0.0, 1.0], scale="std").tolist() == [0.0, 0.0]


def test_gdpo_normalises_each_reward_then_the_batch() -> None:
    """Two rewards of very different scale count the same; each group's spread is judged per reward (GDPO)."""
    rewards = np.array([[1.0, 0.0, 1.0, 1.0], [0.0, 100.0, 300.0, 300.0]])
    group = [0, 0, 1, 1]
    parts = np.array([[1.0, -1.0, 0, 0], [-1.0, 1.0, 0, 0]])
    summed = 2.0 * parts[0] + 1.0 * parts[1]
    expected = summed / summed.std()
    adv = group_advantages(rewards, group, reward_norm="gdpo", reward_weights=[2.0, 1.0])
    np.testing.assert_allclose(adv, expected, rtol=1e-13)
    assert adv[2:].tolist() == [0.0, 0.0]


def test_gdpo_whitens_over_unmasked_answers_and_leaves_silent_groups_at_zero() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]])
    adv = group_advantages(rewards, [0, 0, 0, 0, 1, 1], reward_norm="gdpo", masked=[False, False, True, False, False, False])
    seen = np.array([1.0, -1.0, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(adv[:4], (np.array([1.0, -1.0, -1.0, 1.0]) - seen.mean()) / seen.std())
    assert adv[4:].tolist() == [0.0, 0.0]


def test_sum_weighs_rewards_before_the_baseline() -> None:
    rewards = np.array([[1.0, 0.0], [0.0, 4.0]])
    np.testing.assert_allclose(weigh_rewards(rewards, [1.0, 0.5]), [1.0, 2.0])
    np.testing.assert_allclose(group_advantages(rewards, [0, 0], scale="none", reward_weights=[1.0, 0.5]), [-0.5, 0.5])


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"baseline": "critic"}, "value network"),
        ({"baseline": "batch", "scale": "std"}, "equal rewards"),
        ({"reward_norm": "gdpo", "scale": "none"}, "gdpo"),
        ({"reward_norm": "gdpo", "baseline": "batch", "scale": "batch"}, "gdpo"),
    ],
)
def test_combinations_without_meaning_are_refused(kwargs: dict, word: str) -> None:
    with pytest.raises(UserError, match=word):
        group_advantages([1.0, 0.0], **kwargs)


def test_golden_overlong_penalty() -> None:
    """Golden number 4: maximum 20,000, cache 4,000."""
    lengths = [15_000, 16_000, 18_000, 20_000, 20_001, 50_000]
    assert overlong_penalty(lengths, 20_000, 4_000).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0, -1.0]
    with pytest.raises(UserError, match="overlong_cache"):
        overlong_penalty(lengths, 20_000, 0)


def test_treatments_of_overlong_answers() -> None:
    truncated, lengths = [False, True, True], [5, 10, 10]
    for mode, adjust, masked in [
        ("score", [0, 0, 0], [False] * 3),
        ("mask", [0, 0, 0], truncated),
        ("penalty", [0, -1, -1], [False] * 3),
    ]:
        got_adjust, got_masked = treat_overlong(mode, truncated, lengths, 10, 5)
        assert got_adjust.tolist() == adjust and got_masked.tolist() == masked


def test_kl_in_the_reward() -> None:
    np.testing.assert_allclose(kl_in_reward([1.0, 0.0], [10.0, -2.0], 0.01), [0.9, 0.02])
