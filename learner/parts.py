"""What a rank holds while it trains a batch: micro-batches on the device, mini-batches of them, and what it measures.

Shape legend: A answers of the batch, R rows and W tokens of a micro-batch, K its answers, N its policy-written tokens.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from learner.attention import Segments
from learner.diagnostics import ObjectiveSums
from learner.pack import Micro
from learner.records import Mismatch, OptimiserStep


@dataclass
class MicroBatch:
    """A micro-batch on the device, and what earlier passes left there: log-probabilities; with a critic values and what follows."""

    input_RW: Tensor
    position_RW: Tensor
    flat_N: Tensor
    target_N: Tensor
    answer_N: Tensor
    behav_N: Tensor
    mask_N: Tensor
    ids_K: np.ndarray
    segments: Segments
    old_N: Tensor | None = None
    ref_N: Tensor | None = None
    value_N: Tensor | None = None
    return_N: Tensor | None = None
    advantage_N: Tensor | None = None

    @classmethod
    def on(cls, device: torch.device, micro: Micro) -> MicroBatch:
        """Copy the arrays to the device."""
        names = ("input_RW", "position_RW", "flat_N", "target_N", "answer_N", "behav_N", "mask_N")
        tensors = {n: torch.from_numpy(getattr(micro, n)).to(device, non_blocking=True) for n in names}
        return cls(**tensors, ids_K=micro.ids_K, segments=Segments.of(micro.segments_S3, device))

    def per_answer(self, values_A: np.ndarray) -> Tensor:
        """[K] float64: a column of the batch at this micro-batch's answers, 0 for a dummy."""
        column = np.where(self.ids_K >= 0, values_A[np.maximum(self.ids_K, 0)], 0.0)
        return torch.from_numpy(column).to(self.input_RW.device)


@dataclass
class Part:
    """A mini-batch: the groups of one optimiser step, and this rank's micro-batches of it.

    `weights_A` are the answers' weights in the policy's loss; those in the value's loss and in the likelihood of right answers are
    set where there is a critic.
    """

    groups: np.ndarray
    weights_A: np.ndarray
    tokens: int
    answers: int
    micro: list[MicroBatch]
    value_weights_A: np.ndarray | None = None
    nll_weights_A: np.ndarray | None = None


@dataclass
class Clock:
    """Seconds by part of the work."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time that the block took."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


class MismatchSums:
    """Sums of learner − engine over this rank's tokens, to be added over ranks, and their largest magnitude."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # tokens, |difference|, engine − learner
        self.top = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, learner_N: Tensor, engine_N: Tensor, mask_N: Tensor) -> None:
        """Count a micro-batch's tokens."""
        difference = (learner_N - engine_N).double()[mask_N]
        self.sums += torch.stack([torch.ones_like(difference).sum(), difference.abs().sum(), -difference.sum()])
        if difference.numel():
            self.top = torch.maximum(self.top, difference.abs().max())

    def finish(self) -> Mismatch:
        """The named means, once `sums` and `top` are those of all ranks."""
        tokens, absolute, kl = self.sums.tolist()
        count = max(tokens, 1.0)
        return Mismatch(tokens=int(tokens), mean_abs=absolute / count, max_abs=self.top.item(), kl=kl / count)


@dataclass
class StepsTaken:
    """The optimiser steps of a batch, those of the value model `alone` apart, and their sums over tokens that trained."""

    total: ObjectiveSums
    steps: list[OptimiserStep] = field(default_factory=list)
    alone: list[OptimiserStep] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)  # groups that no finite step has seen, by their place in the table
    cut: int = 0  # tokens that the mismatch correction took out
