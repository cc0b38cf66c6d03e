"""Statistics over all groups scored between two steps, whatever became of them.

Sums are taken with `math.fsum`, which is exact: the order in which groups arrive changes no bit of a metric.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from learner.admission import RIGHT, WRONG
from verifier.records import GroupSummary

NAN = float("nan")


@dataclass
class _Scored:
    """The numbers of one group that the statistics need; sums over its answers."""

    judgement: str
    source: str
    answers: int
    rewarded: int
    reward: float
    parts: dict[str, float]
    tokens: int
    right: int
    tokens_right: int
    wrong: int
    tokens_wrong: int
    truncated: int
    errors: int
    timeouts: int
    seconds_generate: float
    seconds_verify: float


def _scored(summary: GroupSummary, judgement: str) -> _Scored:
    known_G = ~np.isnan(summary.rewards_G)
    right_G, wrong_G = known_G & (summary.rewards_G >= RIGHT), known_G & (summary.rewards_G <= WRONG)
    return _Scored(
        judgement=judgement,
        source=summary.source,
        answers=len(summary.rewards_G),
        rewarded=int(known_G.sum()),
        reward=math.fsum(summary.rewards_G[known_G]),
        parts={name: math.fsum(row[~np.isnan(row)]) for name, row in zip(summary.names, summary.rewards_RG, strict=True)},
        tokens=summary.tokens,
        right=int(right_G.sum()),
        tokens_right=int(summary.lengths_G[right_G].sum()),
        wrong=int(wrong_G.sum()),
        tokens_wrong=int(summary.lengths_G[wrong_G].sum()),
        truncated=int(summary.truncated_G.sum()),
        errors=summary.errors,
        timeouts=summary.timeouts,
        seconds_generate=float(summary.seconds_generate),
        seconds_verify=float(summary.seconds_verify),
    )


@dataclass
class Window:
    """What was counted since the last step's summary."""

    groups: list[_Scored] = field(default_factory=list)
    dispatched: int = 0
    unkept: int = 0
    attempts_failed: int = 0
    surplus: int = 0
    fillers: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)

    def add(self, summary: GroupSummary, judgement: str) -> None:
        """Count a group that was scored; `judgement` as in learner/admission.py."""
        self.groups.append(_scored(summary, judgement))

    def statistics(self) -> dict[str, Any]:
        """The fields of `StepSummary` that follow from this window."""
        every, judged = self.groups, [g for g in self.groups if g.judgement != "error"]
        known = [g for g in every if g.rewarded]
        names = sorted({name for g in known for name in g.parts})
        sources = sorted({g.source for g in judged})
        share = {kind: _share(judged, kind) for kind in ("informative", "all_right", "all_wrong", "equal")}
        return share | {
            "scored": len(every),
            "judged": len(judged),
            "reward": _mean_reward(known),
            "rewards": {n: _mean_part([g for g in known if n in g.parts], n) for n in names},
            "resp_len": _ratio(sum(g.tokens for g in every), sum(g.answers for g in every)),
            "resp_len_right": _ratio(sum(g.tokens_right for g in every), sum(g.right for g in every)),
            "resp_len_wrong": _ratio(sum(g.tokens_wrong for g in every), sum(g.wrong for g in every)),
            "right": _ratio(sum(g.right for g in known), sum(g.rewarded for g in known)),
            "truncated": _ratio(sum(g.truncated for g in every), sum(g.answers for g in every)),
            "verifier_errors": sum(g.errors for g in every),
            "verifier_timeouts": sum(g.timeouts for g in every),
            "tokens": sum(g.tokens for g in every),
            "seconds_generate": _ratio(math.fsum(g.seconds_generate for g in every), len(every)),
            "seconds_verify": _ratio(math.fsum(g.seconds_verify for g in every), len(every)),
            "reward_by_source": {s: _mean_reward([g for g in known if g.source == s]) for s in sources},
            "informative_by_source": {s: _share([g for g in judged if g.source == s], "informative") for s in sources},
            "dispatched": self.dispatched,
            "unkept": self.unkept,
            "failed": dict(sorted(self.failed.items())),
            "attempts_failed": self.attempts_failed,
            "surplus": self.surplus,
            "staleness": dict(sorted(self.staleness.items())),
            "fillers": self.fillers,
        }

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        tables = {"failed": dict(sorted(self.failed.items())), "staleness": [list(item) for item in sorted(self.staleness.items())]}
        return vars(self) | tables | {"groups": [dict(vars(g)) for g in self.groups]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Window:
        """The inverse of `to_json`."""
        values = dict(data) | {"groups": [_Scored(**g) for g in data["groups"]]}
        return cls(**values | {"failed": Counter(data["failed"]), "staleness": Counter({int(s): n for s, n in data["staleness"]})})


def _ratio(total: float, count: float) -> float:
    return total / count if count else NAN


def _mean_reward(groups: list[_Scored]) -> float:
    return _ratio(math.fsum(g.reward for g in groups), sum(g.rewarded for g in groups))


def _mean_part(groups: list[_Scored], name: str) -> float:
    return _ratio(math.fsum(g.parts[name] for g in groups), sum(g.rewarded for g in groups))


def _share(groups: list[_Scored], judgement: str) -> float:
    return _ratio(sum(g.judgement == judgement for g in groups), len(groups))
