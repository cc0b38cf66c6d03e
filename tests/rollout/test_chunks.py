"""What a CPU engine's model runner samples with while some requests' prompts are not whole.

Does not cover that vLLM's sampler looks into this dict, nor when it throws a token away: `tests/e2e/test_engine.py` has the real engine.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout.chunks import spare_seeds


def runner(thrown_away: list[bool], sample: Any) -> Any:
    """Three requests, of which the middle one has no generator of its own; the mask's last place belongs to no request."""
    mask = SimpleNamespace(np=np.array([*thrown_away, True]))
    batch = SimpleNamespace(num_reqs=3, generators={0: "first", 2: "third"})
    made = SimpleNamespace(input_batch=batch, discard_request_mask=mask, sample_tokens=sample)
    spare_seeds(made)
    return made


@pytest.mark.parametrize(
    ("thrown_away", "left"),
    [([False, False, False], {0: "first", 2: "third"}), ([True, True, False], {2: "third"}), ([True, True, True], {})],
)
def test_what_is_thrown_away_is_not_drawn_from_its_own_generator(thrown_away: list[bool], left: dict[int, str]) -> None:
    made: Any = runner(thrown_away, lambda grammar: (grammar, dict(made.input_batch.generators)))
    assert made.sample_tokens("grammar") == ("grammar", left)
    assert made.input_batch.generators == {0: "first", 2: "third"}, "all are there again for the next step"


def test_an_error_loses_no_generator() -> None:
    def fails(_: Any) -> None:
        raise ValueError

    made = runner([True, False, False], fails)
    with pytest.raises(ValueError):
        made.sample_tokens(None)
    assert made.input_batch.generators == {0: "first", 2: "third"}
