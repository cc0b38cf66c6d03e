"""What the learner is given and what it reports: plain data, numpy, no torch.

Shape legend: G answers of one group, R named rewards, A answers of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from verifier.records import GroupSummary, ScoredGroup

Skipped = Literal["", "nonfinite", "empty", "frozen"]


@dataclass(frozen=True)
class TrainGroup:
    """One group as every learner rank knows it: numbers, never a token.

    `lengths_G` counts all tokens of each answer, `written_G` those that the policy wrote; they differ only where
    an answer has spans that the policy did not write. `rewards_G` is NaN where an answer has no reward: such an
    answer is out of the loss, and of its group's baseline. A `masked` group fills the batch and trains nothing.
    """

    uid: int
    rewards_G: np.ndarray  # float64
    rewards_RG: np.ndarray  # float64
    lengths_G: np.ndarray  # int64
    written_G: np.ndarray  # int64
    truncated_G: np.ndarray  # bool
    prompt_length: int
    masked: bool = False

    @classmethod
    def of(cls, summary: GroupSummary, masked: bool = False) -> TrainGroup:
        """From the controller's summary of a single-turn group, in which the policy wrote every token."""
        return cls(
            uid=summary.uid,
            rewards_G=summary.rewards_G,
            rewards_RG=summary.rewards_RG,
            lengths_G=summary.lengths_G,
            written_G=summary.lengths_G,
            truncated_G=summary.truncated_G,
            prompt_length=summary.prompt_length,
            masked=masked,
        )

    @classmethod
    def filler(cls, uid: int, size: int) -> TrainGroup:
        """A group that is not there (refill policy `relax`): it keeps the batch's shape and trains nothing."""
        none = np.zeros(size, dtype=np.int64)
        return cls(uid, np.zeros(size), np.zeros((1, size)), none, none, np.zeros(size, dtype=bool), prompt_length=0, masked=True)

    @classmethod
    def of_scored(cls, scored: ScoredGroup, masked: bool = False) -> TrainGroup:
        """From the scored group itself."""
        completions = scored.group.completions
        return cls(
            uid=scored.uid,
            rewards_G=scored.rewards_G,
            rewards_RG=scored.rewards_RG,
            lengths_G=np.array([len(c.tokens_T) for c in completions], dtype=np.int64),
            written_G=np.array([sum(s.stop - s.start for s in c.spans if s.by_policy) for c in completions], dtype=np.int64),
            truncated_G=np.array([c.truncated for c in completions], dtype=bool),
            prompt_length=len(scored.group.prompt.tokens_P),
            masked=masked,
        )


@dataclass(frozen=True)
class Batch:
    """All groups of a batch by their numbers, in dispatch order, and the tokens of those that this rank works on.

    `index` counts batches from 0: training it yields version `index + 1`. `names` are the rows of `rewards_RG`.
    `tokens` must hold at least the uids that `Learner.needs(groups)` names.
    """

    index: int
    groups: tuple[TrainGroup, ...]
    names: tuple[str, ...] = ()
    tokens: Mapping[int, ScoredGroup] = field(default_factory=dict)


@dataclass(frozen=True)
class Fetched:
    """That a rank has a batch: the uids whose tokens are lost, and the seconds it took to plan its work and take the tokens in."""

    lost: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class OptimiserStep:
    """One optimiser step; every number is that of the whole step, over all ranks.

    `skipped`: the policy's step was not taken, because a loss or gradient was not finite, nothing was unmasked, or the policy is
    frozen while the value model steps alone. `stats` are the objective's statistics by name, the fields of
    `learner.diagnostics.ObjectiveStats`; None: not measured. `critic` is what `learner.critic` measured of the step.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    answers: int
    micro_batches: int
    skipped: Skipped = ""
    stats: Mapping[str, float | None] = field(default_factory=dict)
    critic: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Mismatch:
    """Engine against learner: log-probabilities of the same tokens, before the batch's first optimiser step.

    Differences are learner − engine in nats; `kl` is the mean of engine − learner, an estimate of KL(engine‖learner).
    """

    tokens: int = 0
    mean_abs: float = 0.0
    max_abs: float = 0.0
    kl: float = 0.0


@dataclass(frozen=True)
class StepStats:
    """What training one batch yields, the same on every rank.

    `seconds` is by part of the work: prepare, old, reference, values, advantages, forward_backward, value, optimiser, and `total`.
    `stats` are those of all steps that were not skipped as non-finite, added up (loss and its parts are sums over the steps).
    `advantages` has each group's advantages_G by uid (with a critic their mean over the tokens of an answer). `nonfinite` counts
    skipped steps of this batch, `nonfinite_in_a_row` those since the last step that was taken; `failed` are the uids of the
    groups of skipped non-finite steps, none of whose epochs was trained. `masked_tokens` counts tokens by why they are out of the loss.
    `critic` has what values, returns and advantages were before the batch's first step, by name; `value_steps` are those that the
    value model took alone after the policy's.
    """

    index: int
    steps: tuple[OptimiserStep, ...]
    mismatch: Mismatch
    advantages: Mapping[int, np.ndarray]
    tokens: int
    groups: int
    nonfinite: int
    nonfinite_in_a_row: int
    empty: int
    failed: tuple[int, ...]
    masked_tokens: Mapping[str, int]
    seconds: Mapping[str, float]
    stats: Mapping[str, float | None] = field(default_factory=dict)
    critic: Mapping[str, float | None] = field(default_factory=dict)
    value_steps: tuple[OptimiserStep, ...] = ()
