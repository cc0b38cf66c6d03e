"""The batch as columns: what trains, advantages with penalties and missing rewards, mini-batches of whole groups.

Not covered: the formulas of advantages themselves (test_advantage.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from learner.answers import batch_advantages, by_group, split_groups, tabulate
from learner.config import ObjectiveConfig
from learner.records import TrainGroup


def group(uid: int, rewards: list[float], lengths: list[int], cut: list[bool] | None = None, masked: bool = False) -> TrainGroup:
    r, n = np.array(rewards, dtype=np.float64), np.array(lengths)
    return TrainGroup(uid, r, r[None], n, n, np.array(cut or [False] * len(n)), 4, masked)


def test_columns_keep_the_order_of_groups_and_sizes_may_differ() -> None:
    table = tabulate([group(5, [1, 0], [3, 4]), group(9, [0, 1, 1], [1, 0, 2])], ObjectiveConfig(), 8)
    assert table.group_A.tolist() == [0, 0, 1, 1, 1] and table.slot_A.tolist() == [0, 1, 0, 1, 2]
    assert table.sequence_A.tolist() == [6, 7, 4, 3, 5]
    assert table.trains_A.tolist() == [True, True, True, False, True], "an empty answer has nothing to train on"
    cut = by_group(table, np.arange(5.0))
    assert {k: v.tolist() for k, v in cut.items()} == {5: [0, 1], 9: [2, 3, 4]}


def test_each_token_is_masked_for_one_reason() -> None:
    groups = [group(0, [1, np.nan], [3, 5], cut=[True, True]), group(1, [np.nan, 0], [2, 7], cut=[True, True], masked=True)]
    table = tabulate(groups, ObjectiveConfig(overlong="mask"), 8)
    assert table.masked_tokens() == {"overlong": 3, "error": 7, "filler": 7} and not table.trains_A.any()
    scored = tabulate(groups, ObjectiveConfig(), 8)
    assert table.masked_tokens(failed=[0]) == {"overlong": 0, "error": 2, "filler": 7}
    assert scored.masked_tokens() == {"overlong": 0, "error": 7, "filler": 7} and scored.trains_A.tolist() == [True, False, False, False]


def test_the_length_penalty_changes_advantages_and_not_who_is_informative() -> None:
    flags = ObjectiveConfig(overlong="penalty", overlong_cache=4, adv_norm="none")
    table = tabulate([group(0, [1, 0], [6, 8], cut=[False, True]), group(1, [1, 1], [8, 2])], flags, 8)
    # Penalties: 6 tokens −0.5, 8 tokens −1. Group 1 has no spread in its raw reward: 0, although the penalty differs.
    assert batch_advantages(table, flags) == pytest.approx([0.75, -0.75, 0, 0])


def test_kl_goes_off_the_reward_before_the_baseline() -> None:
    flags = ObjectiveConfig(kl_in="reward", kl_coef=0.1, kl_estimator="k1", adv_norm="none")
    table = tabulate([group(0, [1, 0], [6, 8])], flags, 8)
    got = batch_advantages(table, flags, kl_sum_A=np.array([2.0, 4.0]))
    assert got == pytest.approx([(0.8 + 0.4) / 2, -(0.8 + 0.4) / 2])


def test_gdpo_normalises_each_reward_and_ignores_answers_without_one() -> None:
    flags = ObjectiveConfig(reward_norm="gdpo")
    rewards = np.array([[1.0, 0.0, 1.0, np.nan], [5.0, 0.0, 0.0, np.nan]])
    one = TrainGroup(0, rewards.sum(0), rewards, np.array([2, 2, 2, 2]), np.array([2, 2, 2, 2]), np.zeros(4, bool), 3)
    got = batch_advantages(tabulate([one], flags, 8), flags, reward_weights=[1.0, 2.0])
    parts = [(r - r.mean()) / r.std() for r in rewards[:, :3]]
    want = parts[0] + 2 * parts[1]
    assert got[:3] == pytest.approx((want - want.mean()) / want.std()) and got[3] == 0


def test_mini_batches_are_whole_groups_in_order() -> None:
    assert [p.tolist() for p in split_groups(5, 2)] == [[0, 1, 2], [3, 4]]
    assert [p.tolist() for p in split_groups(2, 4)] == [[0], [1]]
