"""Retiring and curriculum: when a prompt has been solved often enough, and how often one is drawn by its pass rate.

Does not cover: the stream that asks (test_prompts.py), and runs that end because all is retired (tests/cluster/test_lives.py).
"""

from __future__ import annotations

import json

import pytest

from rollout.config import DataConfig
from rollout.mastery import Mastery

RETIRE = DataConfig(retire_after=3)
CURRICULUM = DataConfig(curriculum=True)


def test_a_prompt_is_retired_when_it_has_been_solved_so_often_in_a_row() -> None:
    mastery = Mastery()
    told = [mastery.note(5, right, 4, RETIRE) for right in (4, 4, 3, 4, 4, 4)]
    assert told == [False] * 5 + [True]
    assert not mastery.note(6, 4, 4, RETIRE), "rows are counted apart"
    mastery.forget(5)
    assert mastery.streak == {6: 1} and mastery.rate == {}


def test_off_nothing_is_remembered_and_all_is_drawn() -> None:
    mastery = Mastery()
    assert not any(mastery.note(1, 4, 4, DataConfig()) for _ in range(10))
    assert mastery == Mastery() and mastery.drawn(1, "key", DataConfig())


@pytest.mark.parametrize(("right", "chance"), [(0, 0.36), (1, 0.84), (2, 1.0), (3, 0.84), (4, 0.36)])
def test_the_chance_of_a_prompt_is_the_variance_of_its_reward(right: int, chance: float) -> None:
    mastery = Mastery()
    assert mastery.chance(1, CURRICULUM) == 1.0, "no group yet"
    mastery.note(1, right, 4, CURRICULUM)
    assert mastery.chance(1, CURRICULUM) == pytest.approx(chance)


def test_the_pass_rate_follows_the_policy_and_the_floor_holds() -> None:
    mastery = Mastery()
    for _ in range(40):
        mastery.note(1, 0, 64, CURRICULUM)
    assert mastery.chance(1, CURRICULUM) == CURRICULUM.curriculum_floor == 0.1
    mastery.note(1, 64, 64, CURRICULUM)
    assert mastery.rate[1] == pytest.approx((64, 128)) and mastery.chance(1, CURRICULUM) == pytest.approx(1.0)


def test_draws_come_at_their_chance_and_are_the_same_after_a_resume() -> None:
    mastery = Mastery()
    mastery.note(1, 0, 4, CURRICULUM)
    again = Mastery.load(json.loads(json.dumps(mastery.state())))
    drawn = [mastery.drawn(1, f"seed/{epoch}", CURRICULUM) for epoch in range(2000)]
    assert sum(drawn) / 2000 == pytest.approx(0.36, abs=0.03)
    assert drawn == [again.drawn(1, f"seed/{epoch}", CURRICULUM) for epoch in range(2000)]
