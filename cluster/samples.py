"""What a run keeps of its answers: some groups of every step in full, and of all the batch's answers their lengths.

Shape legend: T tokens of one answer, G answers of one group, A answers of the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from learner.admission import RIGHT
from learner.answers import by_group, split_groups, tabulate
from learner.config import ObjectiveConfig
from learner.denominators import answer_weights
from learner.records import TrainGroup
from verifier.records import GroupSummary, ScoredGroup

TOKENS_KEPT = 4096
"""Token ids of an answer that a sample keeps; its text is kept whole."""
BINS = 64
"""Bins of a length histogram, at most."""


def sample_row(
    scored: ScoredGroup,
    advantages_G: Sequence[float] | None = None,
    outcome: str = "trained",
    weights_G: Sequence[float] | None = None,
) -> dict[str, Any]:
    """A scored group as a line of `samples.jsonl`: prompt, answers, verdicts, advantages, and what became of it.

    `weights_G` are those of every token in the loss (`batch_weights`); advantage · weight is the push on a token. `ids` are
    the answer's first TOKENS_KEPT tokens.
    """
    group = scored.group
    answers = [
        {
            "text": completion.text,
            "tokens": len(completion.tokens_T),
            "finish": completion.finish,
            "reward": verdict.reward,
            "status": verdict.status,
            "detail": verdict.detail,
            "rewards": dict(verdict.rewards),
            "advantage": None if advantages_G is None else float(advantages_G[i]),
            "weight": None if weights_G is None else float(weights_G[i]),
            "ids": completion.tokens_T[:TOKENS_KEPT].tolist(),
        }
        for i, (completion, verdict) in enumerate(zip(group.completions, scored.verdicts, strict=True))
    ]
    prompt = group.prompt
    return {
        "uid": group.uid,
        "source": prompt.source,
        "row": prompt.row,
        "outcome": outcome,
        "versions": list(group.versions),
        "prompt": prompt.text,
        "gold": prompt.answer,
        "answers": answers,
    }


def batch_weights(
    summaries: Sequence[GroupSummary], fillers: int, objective: ObjectiveConfig, max_tokens: int, minibatches: int
) -> dict[int, np.ndarray]:
    """The weight of each answer's tokens in the loss of its optimiser step, weights_G by uid; 0 where an answer is out of the loss.

    Tokens that the mismatch correction takes out, which the learner alone knows, are counted as if they were in.
    """
    size = len(summaries[0].rewards_G)
    groups = [TrainGroup.of(summary) for summary in summaries]
    groups += [TrainGroup.filler(-1 - i, size) for i in range(fillers)]
    table = tabulate(groups, objective, max_tokens)
    lengths_A = np.where(table.trains_A, table.written_A, 0)
    weights_A = np.zeros(len(lengths_A))
    for part in split_groups(len(groups), minibatches):
        at = np.isin(table.group_A, part)
        weights_A[at] = answer_weights(lengths_A[at], table.group_A[at], mode=objective.loss_agg, max_len=max_tokens)
    return by_group(table, weights_A)


def length_row(summaries: Sequence[GroupSummary], max_tokens: int) -> dict[str, Any]:
    """The lengths of a batch's answers as a line of `lengths.jsonl`: answers by bin, those that are right apart from the others.

    Bin b holds the lengths from b · width to (b + 1) · width − 1 in tokens; empty bins are left out. Answers without a reward
    are not counted.
    """
    width = -(-(max_tokens + 1) // BINS)
    found: dict[str, Counter[int]] = {"right": Counter(), "other": Counter()}
    for summary in summaries:
        for reward, length in zip(summary.rewards_G.tolist(), summary.lengths_G.tolist(), strict=True):
            if reward == reward:
                found["right" if reward >= RIGHT else "other"][length // width] += 1
    return {"width": width, **{kind: {str(b): n for b, n in sorted(bins.items())} for kind, bins in found.items()}}
