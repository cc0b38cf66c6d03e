"""The rules of dynamic sampling: signal, the admission rule and overprovision, by worked examples.

Does not cover: the buffer that applies them (test_buffer.py).
"""

from __future__ import annotations

import math

import pytest

from learner.admission import has_room, judge, wants_extra
from tests.learner.sampling_world import RIGHT, WRONG, summary


@pytest.mark.parametrize(
    ("place", "v_e", "b", "k", "room"),
    [
        (3, 0, 0, 0, True),
        (4, 0, 0, 0, False),
        (7, 0, 0, 1, True),
        (8, 0, 0, 1, False),
        (3, 4, 5, 1, True),
        (4, 4, 5, 1, False),
        (0, 3, 5, 1, False),
    ],
)
def test_admission_rule(place: int, v_e: int, b: int, k: int, room: bool) -> None:
    assert has_room(place, v_e, b, 4, k) is room


@pytest.mark.parametrize(
    ("rewards", "drop", "verdict"),
    [
        (RIGHT, True, "all_right"),
        (WRONG, True, "all_wrong"),
        ((-1.0,) * 4, True, "all_wrong"),
        ((0.5,) * 4, True, "equal"),
        ((0.5, 0.5, 0.5, 0.5 + 9e-7), True, "equal"),
        ((0.5, 0.5, 0.5, 0.5 + 2e-6), True, "informative"),
        ((1e9 + 0.1,) * 4, True, "all_right"),
        ((math.nan, 1.0, 0.0, 1.0), True, "error"),
        ((math.nan, 1.0, 0.0, 1.0), False, "informative"),
        ((math.nan, 1.0, 1.0, 1.0), False, "all_right"),
        ((math.nan,) * 4, False, "error"),
    ],
)
def test_judge(rewards: tuple[float, ...], drop: bool, verdict: str) -> None:
    group = summary(0, rewards=rewards)
    assert judge(group.rewards_G, group.rewards_RG, 1e-6, drop_errors=drop, per_reward=False) == verdict


def test_judge_each_reward_apart() -> None:
    group = summary(0, rewards=(1.0,) * 4, rows=((1.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0)))
    assert judge(group.rewards_G, group.rewards_RG, 1e-6, drop_errors=True, per_reward=False) == "all_right"
    assert judge(group.rewards_G, group.rewards_RG, 1e-6, drop_errors=True, per_reward=True) == "informative"


@pytest.mark.parametrize(
    ("need", "in_flight", "kept", "dropped", "largest", "wanted"),
    [
        (4, 4, 0, 0, 8, True),  # nothing known: p = ½ ± 0.35
        (4, 12, 0, 0, 8, False),  # the cap
        (32, 32, 1000, 0, 16, False),  # p = 0.9995: all will be kept
        (32, 32, 950, 50, 16, True),  # p = 0.95: 30.4 − 1.2 are likely
        (32, 34, 950, 50, 16, True),  # 32.3 − 1.3 = 31.0
        (32, 35, 950, 50, 16, False),  # 33.2 − 1.3 = 31.9
        (32, 35, 19, 1, 16, True),  # the same rate on less evidence: 32.5 − 2.5 = 30.0
    ],
)
def test_overprovision_is_sized_by_the_rate_and_its_uncertainty(
    need: int, in_flight: int, kept: int, dropped: int, largest: int, wanted: bool
) -> None:
    assert wants_extra(need, in_flight, kept, dropped, largest) is wanted
