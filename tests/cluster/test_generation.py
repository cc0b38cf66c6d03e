"""The time in which engines have nothing to generate.

Does not cover the way of the groups, which the end-to-end tests follow on real actors.
"""

from __future__ import annotations

from cluster.generation import EngineLoad


def test_idle_time_is_that_of_engines_without_a_group_mean_over_the_engines() -> None:
    now = [10.0]
    load = EngineLoad(2, clock=lambda: now[0])
    now[0] = 12.0  # both without a group for 2 s
    load.add(0, 1)
    now[0] = 15.0  # one of them for 3 s more
    load.add(0, 1)
    load.add(1, 1)
    now[0] = 19.0  # none
    load.add(0, -1)
    load.add(0, -1)
    now[0] = 20.0  # the first again for 1 s
    assert load.groups == [0, 1]
    assert load.take_idle() == 2.0 + 1.5 + 0.5
    now[0] = 21.0
    assert load.take_idle() == 0.5, "since the last call alone"
