"""As `time_to_accuracy`, on worked-out sums of 2, 4 and 8 numbers: long answers of uneven lengths, up to 256 tokens."""

from __future__ import annotations

from tests.bench.rows import Row
from tests.bench.time_to_accuracy import race
from tests.bench.warmed import LONG


def run() -> list[Row]:
    """Sums of several numbers."""
    return race("time_to_accuracy_long", [*LONG, "--steps", "40", "--eval_every", "2", "--eval_prompts", "256"], 2.0)
