"""The schedule of faults: fixed by the seed, with every kind, and over before the training is.

Does not cover: what the faults do.
"""

from __future__ import annotations

from collections import Counter

from tests.chaos.schedule import COUNTS, LAST, schedule


def test_a_schedule_has_at_least_twenty_faults_of_every_kind_in_order() -> None:
    for seed in range(20):
        faults = schedule(seed, 120)
        assert Counter(f.kind for f in faults) == COUNTS and len(faults) >= 20
        steps = [f.step for f in faults]
        assert steps == sorted(steps) and steps[0] >= 2 and steps[-1] <= LAST * 120 + 1


def test_the_seed_decides_everything() -> None:
    assert schedule(3, 120) == schedule(3, 120)
    assert [f.kind for f in schedule(3, 120)] != [f.kind for f in schedule(4, 120)]
