"""What travels out of verification: a verdict per answer, and the group with its rewards.

Shape legend: G answers of one group, R named rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout.records import Group
from verifier.verdict import Status, Verdict

__all__ = ["GroupSummary", "ScoredGroup", "Status", "Verdict", "summarise"]


@dataclass(frozen=True)
class ScoredGroup:
    """A group with its verdicts. `rewards_G` is NaN where the verdict is an error."""

    group: Group
    verdicts: tuple[Verdict, ...]
    rewards_G: np.ndarray  # float64
    rewards_RG: np.ndarray  # float64, one row per name in `names`
    names: tuple[str, ...]

    @property
    def uid(self) -> int:
        """The uid of the group."""
        return self.group.uid


@dataclass(frozen=True)
class GroupSummary:
    """All that the controller needs of a scored group: counts and numbers, never a token.

    `lengths_G` counts policy-written tokens. `errors` counts error verdicts, with the first one's `detail`.
    """

    uid: int
    attempt: int
    engine: int
    source: str
    row: str
    rewards_G: np.ndarray  # float64
    rewards_RG: np.ndarray  # float64
    names: tuple[str, ...]
    lengths_G: np.ndarray  # int64
    truncated_G: np.ndarray  # bool
    prompt_length: int
    version_min: int
    version_max: int
    errors: int
    timeouts: int
    detail: str
    seconds_generate: float
    seconds_verify: float

    @property
    def tokens(self) -> int:
        """Generated tokens over all answers."""
        return int(self.lengths_G.sum())


def summarise(scored: ScoredGroup) -> GroupSummary:
    """The controller's view of a scored group."""
    group = scored.group
    oldest, newest = group.versions
    bad = [v for v in scored.verdicts if v.status == "error"]
    return GroupSummary(
        uid=group.uid,
        attempt=group.attempt,
        engine=group.engine,
        source=group.prompt.source,
        row=group.prompt.row,
        rewards_G=scored.rewards_G,
        rewards_RG=scored.rewards_RG,
        names=scored.names,
        lengths_G=np.array([len(c.tokens_T) for c in group.completions], dtype=np.int64),
        truncated_G=np.array([c.truncated for c in group.completions], dtype=bool),
        prompt_length=len(group.prompt.tokens_P),
        version_min=oldest,
        version_max=newest,
        errors=len(bad),
        timeouts=sum(v.status == "timeout" for v in scored.verdicts),
        detail=bad[0].detail if bad else "",
        seconds_generate=group.seconds,
        seconds_verify=sum(v.seconds for v in scored.verdicts),
    )
