"""Which fault comes when: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

# How often each kind comes in one run. A node is an extra raylet with all its workers; `checkpoint` is a controller killed with its
# newest checkpoint cut short.
COUNTS = {
    "verifier_process": 5,
    "verifier": 5,
    "engine_core": 2,
    "generator": 2,
    "learner": 2,
    "controller": 1,
    "node": 2,
    "checkpoint": 1,
}
LAST = 0.75  # share of the steps by which the last fault has come


@dataclass(frozen=True)
class Fault:
    """One fault. It comes `delay` seconds after the run works normally again, or once `step` is reached, whichever is first.

    So a fault may come while another is not yet recovered from, and all come before the training ends.

    `choice` in [0, 1) picks the victim among those of its kind; `pause` is the seconds until a killed node is replaced, or a killed
    controller is started again.
    """

    kind: str
    step: int
    delay: float
    choice: float
    pause: float


def schedule(seed: int, steps: int, counts: Mapping[str, int] = COUNTS) -> list[Fault]:
    """Every fault of a run of `steps` steps, in order."""
    draw = random.Random(f"chaos {seed}")
    kinds = [kind for kind, n in counts.items() for _ in range(n)]
    draw.shuffle(kinds)
    due = [2 + round((i + draw.random()) * max(LAST * steps - 2, 0) / len(kinds)) for i in range(len(kinds))]
    return [Fault(k, step, draw.uniform(0.2, 4.0), draw.random(), draw.uniform(1.0, 6.0)) for k, step in zip(kinds, due, strict=True)]
