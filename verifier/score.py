"""A group's answers through the pool: verdicts, rewards and their parts.

Shape legend: G answers of one group, R named rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rollout.records import Group
from verifier.config import VerifyConfig
from verifier.pool import Item, VerifierPool
from verifier.records import ScoredGroup, Verdict

ROW = "row"  # in reward_weights: the verifier that the prompt's own row names


async def score_group(pool: VerifierPool, group: Group, config: VerifyConfig) -> ScoredGroup:
    """Every answer judged by the row's verifier, or by all of `reward_weights` when that is set."""
    weights = dict(config.reward_weights) or {group.prompt.verifier: 1.0}
    names = tuple(weights)
    prompt = group.prompt
    items = [Item(prompt.verifier if n == ROW else n, prompt.answer, c.text, prompt.meta) for n in names for c in group.completions]
    flat = await pool.verify(items)
    size = len(group.completions)
    return combine(group, weights, [flat[r * size : (r + 1) * size] for r in range(len(names))])


def combine(group: Group, weights: Mapping[str, float], verdicts_RG: Sequence[Sequence[Verdict]]) -> ScoredGroup:
    """The weighted sum of each answer's rewards. One error among its parts leaves an answer without a reward; a timeout counts as 0."""
    names = tuple(weights)
    verdicts = tuple(_join(names, weights, parts) for parts in zip(*verdicts_RG, strict=True))
    rewards_RG = np.array([[math.nan if v.reward is None else v.reward for v in row] for row in verdicts_RG], dtype=np.float64)
    rewards_G = np.array([math.nan if v.reward is None else v.reward for v in verdicts], dtype=np.float64)
    return ScoredGroup(group, verdicts, rewards_G, rewards_RG, names)


def _join(names: tuple[str, ...], weights: Mapping[str, float], parts: Sequence[Verdict]) -> Verdict:
    """One verdict on one answer out of one per name."""
    rewards = {n: v.reward for n, v in zip(names, parts, strict=True) if v.reward is not None}
    seconds = sum(v.seconds for v in parts)
    worst = next((v for s in ("error", "timeout") for v in parts if v.status == s), parts[0])
    if worst.status == "error":
        return Verdict("error", None, worst.detail, seconds, rewards)
    total = math.fsum(weights[n] * r for n, r in rewards.items())
    if not math.isfinite(total):
        return Verdict("error", None, f"the weighted reward is {total}", seconds, rewards)
    return Verdict(worst.status, total, worst.detail, seconds, rewards)
