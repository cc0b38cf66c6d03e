"""Who worked when: unions of spans, windows that follow each other, and work under way. Not that the loop notes all its work."""

from __future__ import annotations

import pytest

from cluster.timeline import Timeline, covered


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_spans_that_overlap_count_once_and_only_within_the_window() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7), (9, 20)], 1, 10) == pytest.approx(2 + 1 + 1)
    assert covered([], 0, 5) == 0 and covered([(-5, 50)], 0, 5) == 5 and covered([(6, 7)], 0, 5) == 0


def test_idle_is_when_nobody_worked() -> None:
    clock = Clock()
    line = Timeline(clock)
    line.begin("engines", 1)
    clock.now += 4
    line.end("engines", 1, seconds=3.0)  # 101 to 104
    line.worked("verifiers", 0.5)  # 103.5 to 104, while the engine did
    clock.now += 2
    with line.during("learner"):  # 106 to 109
        clock.now += 3
    line.worked("transfer", 1.0)  # 108 to 109
    clock.now += 1
    use = line.cut()
    assert (use.window, use.engines, use.verifiers, use.learner, use.transfer) == (10, 3, 0.5, 3, 1)
    assert use.idle == pytest.approx(1 + 2 + 1)


def test_work_under_way_counts_in_both_windows_and_never_twice() -> None:
    clock = Clock()
    line = Timeline(clock)
    clock.now += 1
    line.begin("engines", "a")
    clock.now += 4
    first = line.cut()
    clock.now += 2
    line.end("engines", "a", seconds=5.9)
    clock.now += 1
    second = line.cut()
    assert (first.engines, first.idle) == (4, 1)
    assert (second.window, second.engines, second.idle) == (3, 2, 1)


def test_work_that_ends_without_a_word_of_its_length_counts_as_it_was_seen() -> None:
    clock = Clock()
    line = Timeline(clock)
    line.begin("engines", "lost")
    clock.now += 2
    line.end("engines", "lost")
    line.end("engines", "never begun")
    clock.now += 1
    assert line.cut().engines == 2
