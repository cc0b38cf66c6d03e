"""Giving up a step half-way: at once for every rank, and only while weights and optimiser are still those of the version before it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Abandoned(RuntimeError):
    """The step was given up before its first optimiser step: nothing of the learner has changed."""


class Abandonment:
    """Asked for from another thread; heeded by all ranks at the same micro-batch."""

    def __init__(self, agree: Callable[[Tensor], None]) -> None:
        """`agree` puts the largest value of all ranks into a tensor on the CPU."""
        self._asked = threading.Event()
        self._agree = agree

    def ask(self) -> None:
        """From now on `check` raises: there is no step after one that was given up."""
        self._asked.set()

    def check(self) -> None:
        """A collective, between two micro-batches. Raises Abandoned on every rank when one of them was asked."""
        import torch  # here: the controller, which knows Abandoned, does without it

        asked = torch.tensor(float(self._asked.is_set()))
        self._agree(asked)
        if asked > 0:
            raise Abandoned("the step was given up, and nothing has changed")
