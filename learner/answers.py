"""A batch as flat columns over its answers: which of them train, their advantages, and the parts of an optimiser step.

Pure and the same on every rank: it reads numbers, never a token. Shape legend: A answers of the batch, in the order of
its groups; R named rewards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from learner.advantage import group_advantages, kl_in_reward, treat_overlong
from learner.config import ObjectiveConfig
from learner.records import TrainGroup


@dataclass(frozen=True)
class AnswerTable:
    """One row per answer. `group_A` numbers the groups of the batch from 0, `slot_A` the answers of a group.

    `masked_A`: out of the loss as a whole (a filler group, or cut off under `overlong = mask`). `absent_A`: no reward.
    `trains_A`: in the loss, that is, none of these and with at least one token that the policy wrote.
    """

    uids: tuple[int, ...]
    group_A: np.ndarray  # int64
    slot_A: np.ndarray  # int64
    prompt_A: np.ndarray  # int64, tokens
    length_A: np.ndarray  # int64, tokens
    written_A: np.ndarray  # int64, tokens
    rewards_A: np.ndarray  # float64
    rewards_RA: np.ndarray  # float64
    penalty_A: np.ndarray  # float64
    filler_A: np.ndarray  # bool
    overlong_A: np.ndarray  # bool
    absent_A: np.ndarray  # bool

    @property
    def masked_A(self) -> np.ndarray:
        """Masked as a whole, but with a reward."""
        return (self.filler_A | self.overlong_A) & ~self.absent_A

    @property
    def trains_A(self) -> np.ndarray:
        """In the loss."""
        return ~self.filler_A & ~self.overlong_A & ~self.absent_A & (self.written_A > 0)

    @property
    def sequence_A(self) -> np.ndarray:
        """Tokens that the model reads: all but the answer's last."""
        return self.prompt_A + self.length_A - 1

    def masked_tokens(self, failed: Collection[int] = ()) -> dict[str, int]:
        """Policy-written tokens that are out of the loss, by reason; each token under one reason only.

        Those of `failed` groups (by their place in the batch) are not counted: the group as a whole has another state.
        """
        trained_A = ~np.isin(self.group_A, list(failed))
        error = self.absent_A
        fill = self.filler_A & ~error
        overlong = self.overlong_A & ~error & ~fill
        return {k: int(self.written_A[m & trained_A].sum()) for k, m in (("overlong", overlong), ("error", error), ("filler", fill))}


def tabulate(groups: Sequence[TrainGroup], objective: ObjectiveConfig, max_tokens: int) -> AnswerTable:
    """The table of a batch. `max_tokens` is the generation budget L."""
    sizes = [len(g.rewards_G) for g in groups]
    rewards_A = np.concatenate([g.rewards_G for g in groups]).astype(np.float64)
    length_A = np.concatenate([g.lengths_G for g in groups]).astype(np.int64)
    truncated_A = np.concatenate([g.truncated_G for g in groups]).astype(bool)
    penalty_A, overlong_A = treat_overlong(objective.overlong, truncated_A, length_A, max_tokens, objective.overlong_cache)
    return AnswerTable(
        uids=tuple(g.uid for g in groups),
        group_A=np.repeat(np.arange(len(groups)), sizes),
        slot_A=np.concatenate([np.arange(n) for n in sizes]),
        prompt_A=np.repeat(np.array([g.prompt_length for g in groups], dtype=np.int64), sizes),
        length_A=length_A,
        written_A=np.concatenate([g.written_G for g in groups]).astype(np.int64),
        rewards_A=rewards_A,
        rewards_RA=np.concatenate([g.rewards_RG for g in groups], axis=1).astype(np.float64),
        penalty_A=penalty_A,
        filler_A=np.repeat(np.array([g.masked for g in groups], dtype=bool), sizes),
        overlong_A=overlong_A,
        absent_A=~np.isfinite(rewards_A),
    )


def batch_advantages(
    table: AnswerTable, objective: ObjectiveConfig, *, kl_sum_A: np.ndarray | None = None, reward_weights: Sequence[float] | None = None
) -> np.ndarray:
    """`advantage_A` in float64, 0 where an answer has no reward. `kl_sum_A` is Σ_t k1 of each answer, where it goes off the reward.

    `reward_weights` (one per named reward) are used under `reward_norm = gdpo`; otherwise the rewards were weighed
    when they were given. A length penalty is one reward more under gdpo.
    """
    present_A = ~table.absent_A
    extra_A = table.penalty_A.copy()
    if kl_sum_A is not None:
        extra_A = kl_in_reward(extra_A, kl_sum_A, objective.kl_coef)
    raw_A = np.where(present_A, table.rewards_A, 0.0)
    rewards = raw_A + extra_A
    raw: np.ndarray | None = raw_A
    weights: list[float] | None = None
    if objective.reward_norm == "gdpo":
        rewards = np.where(present_A, table.rewards_RA, 0.0)
        weights = list(reward_weights) if reward_weights is not None else [1.0] * len(rewards)
        raw = None
        if extra_A.any():
            rewards, weights = np.concatenate([rewards, extra_A[None]]), [*weights, 1.0]
    return np.asarray(
        group_advantages(
            rewards,
            table.group_A,
            baseline=objective.baseline,
            scale=objective.adv_norm,
            std_ddof=objective.std_ddof,
            std_eps=objective.std_eps,
            spread_tol=objective.spread_tol,
            masked=table.masked_A,
            absent=table.absent_A,
            raw=raw,
            reward_norm=objective.reward_norm,
            reward_weights=weights,
        ),
        dtype=np.float64,
    )


def split_groups(groups: int, parts: int) -> list[np.ndarray]:
    """Indices of the groups of each mini-batch: whole groups, in order, numbers differing by at most one."""
    return [p for p in np.array_split(np.arange(groups), parts) if len(p)]


def by_group(table: AnswerTable, values_A: np.ndarray) -> dict[int, np.ndarray]:
    """A column cut into groups, by uid."""
    ends = np.flatnonzero(np.diff(table.group_A)) + 1
    return dict(zip(table.uids, np.split(values_A, ends), strict=True))
