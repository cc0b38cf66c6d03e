"""What counts as growth: a slope after the warm-up, whatever single jumps there are; open files by the ends of the window.

Does not cover: the sampling of real processes (`make soak`).
"""

from __future__ import annotations

import random

from tests.chaos.memory import Series, growth


def series(grow: float, *, noise: float = 0.0, jump: float = 0.0, files: int = 0, seconds: int = 600, size: float = 500.0) -> Series:
    """A process that starts with 100 MiB a minute for two minutes, then grows by `grow` MiB a minute."""
    draw = random.Random(1)
    times = [float(t) for t in range(0, seconds, 3)]
    private = []
    for t in times:
        warm = min(t, 120.0) / 60 * 100
        private.append(size + warm + grow * max(t - 120, 0) / 60 + draw.uniform(-noise, noise) + (jump if t > 500 else 0))
    return Series("learner", times, private, [20 + int(files * t / seconds) for t in times])


def test_the_slope_after_the_warm_up_is_found_under_noise_and_a_late_jump() -> None:
    (steady,) = growth({1: series(0.0, noise=5.0, jump=8.0)}, warm=120, least=120)
    (leak,) = growth({1: series(4.0, noise=5.0)}, warm=120, least=120)
    assert abs(steady.slope) < 0.9 and steady.flat
    assert abs(leak.slope - 4.0) < 0.9 and not leak.flat
    assert steady.minutes > 7.9


def test_open_files_that_pile_up_are_found() -> None:
    (found,) = growth({1: series(0.0, files=60)}, warm=120, least=120)
    assert found.files > 20 and not found.flat


def test_a_process_that_lived_too_briefly_is_not_judged() -> None:
    assert growth({1: series(50.0, seconds=180)}, warm=120, least=120) == []
