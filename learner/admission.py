"""The rules of dynamic sampling as pure functions: is there signal, may one more group be sent, how many on top.

Shape legend: G answers of one group, R named rewards. B groups a batch, b batches committed, k = max_staleness.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

Judgement = Literal["informative", "all_right", "all_wrong", "equal", "error"]

RIGHT = 1.0 - 1e-6  # a reward from here on is a right answer
WRONG = 1e-6  # a reward up to here is a wrong one; between the two there is partial credit


def judge(rewards_G: np.ndarray, rewards_RG: np.ndarray, spread_tol: float, *, drop_errors: bool, per_reward: bool) -> Judgement:
    """Whether a group's raw rewards differ by more than `spread_tol` (max − min, float64).

    An answer without reward is NaN. `drop_errors`: one such answer makes the group an error; otherwise the others are judged, and only a
    group that has none left is an error. `per_reward` (GDPO): spread in any one of the named rewards is signal.
    """
    known_G = ~np.isnan(rewards_G)
    if not known_G.any() or (drop_errors and not known_G.all()):
        return "error"
    rewards = rewards_G[known_G].astype(np.float64)
    rows = rewards_RG[:, known_G].astype(np.float64) if per_reward and len(rewards_RG) else rewards[None]
    if float((rows.max(axis=1) - rows.min(axis=1)).max()) > spread_tol:
        return "informative"
    if rewards.min() >= RIGHT:
        return "all_right"
    return "all_wrong" if rewards.max() <= WRONG else "equal"


def has_room(place: int, engine_version: int, batches: int, batch_size: int, max_staleness: int) -> bool:
    """The admission rule: `place` groups are kept or in flight before this one, each counted as if it will be kept.

    place < (v_e + k + 1 − b) · B; then the group trains as batch v_e + k at the latest, so it is never staler than k. A batch that is
    cut and not committed counts as B, also when it is short.
    """
    return place < (engine_version + max_staleness + 1 - batches) * batch_size


def wants_extra(need: int, in_flight: int, kept: float, dropped: float, largest: int, z: float = 1.0) -> bool:
    """Whether to send one more group than the admission rule allows (k = 0), so that a batch does not wait for a last refill.

    `need` groups are missing and `in_flight` may yield them. The informative rate has `kept` and `dropped` as evidence: p with mean
    (kept + ½) / (n + 1) and variance p(1 − p) / (n + 2) (Jeffreys' prior). More is wanted while the yield that is likely at z standard
    deviations, in_flight·p − z·sqrt(in_flight·p(1−p) + in_flight²·var p), is short of `need` by half a group or more; never more than
    `largest` on top of `need`.
    """
    if in_flight >= need + largest:
        return False
    n = kept + dropped
    p = (kept + 0.5) / (n + 1.0)
    bernoulli = p * (1.0 - p)
    spread = math.sqrt(in_flight * bernoulli + in_flight**2 * bernoulli / (n + 2.0))
    return in_flight * p - z * spread <= need - 0.5
