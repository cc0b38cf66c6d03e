"""Statistics over the groups of each step, whatever became of them.

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
from rollout.records import PromptResult
from verifier.records import GroupSummary

NAN = float("nan")


@dataclass
class _Scored:
    """The numbers of one group that the statistics need; sums over its answers."""

    judgement: str
    source: str
    row: str
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
        row=summary.row,
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
    """Groups that have ended or are kept and stand in no step's summary yet, by uid, and events since the last summary.

    A step's statistics are over the groups up to the end of its batch *in dispatch order* (`take`), not over what happened to have arrived:
    so they depend on no worker's speed, and are those of any other run with the same answers.
    """

    groups: dict[int, _Scored] = field(default_factory=dict)  # those with a result
    ends: dict[int, str] = field(default_factory=dict)  # "kept", "uninformative", "failed(reason)" or "surplus"
    attempts_failed: int = 0
    nonfinite: int = 0  # groups
    fillers: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    def add(self, summary: GroupSummary, judgement: str) -> None:
        """Count a group that was scored; `judgement` as in learner/admission.py."""
        self.groups[summary.uid] = _scored(summary, judgement)

    def forget(self, uid: int) -> None:
        """The group is generated again: what it was does not count."""
        self.groups.pop(uid, None)
        self.ends.pop(uid, None)

    def evidence(self) -> tuple[int, int]:
        """Groups that were kept, and those resolved without being kept; a surplus one that had a result would have been kept."""
        unkept = sum(e not in ("kept", "surplus") for e in self.ends.values())
        return sum(e == "kept" or (e == "surplus" and uid in self.groups) for uid, e in self.ends.items()), unkept

    def take(self, last: int) -> Window:
        """The groups up to uid `last` and all events so far, as a window of their own; they are counted no more here."""
        old = [uid for uid in self.ends if uid <= last]
        groups = {uid: self.groups.pop(uid) for uid in old if uid in self.groups}
        taken = Window(groups, {uid: self.ends.pop(uid) for uid in old}, self.attempts_failed, self.nonfinite, self.fillers, self.staleness)
        self.attempts_failed = self.nonfinite = self.fillers = 0
        self.staleness = Counter()
        return taken

    def statistics(self) -> dict[str, Any]:
        """The fields of `StepSummary` that follow from this window."""
        every = list(self.groups.values())
        judged = [g for g in every if g.judgement != "error"]
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
            "results": tuple(PromptResult(g.source, g.row, g.right, g.rewarded) for _, g in sorted(self.groups.items())),
            "dispatched": len(self.ends),
            "unkept": self.evidence()[1],
            "failed": self._failed(),
            "attempts_failed": self.attempts_failed,
            "surplus": sum(e == "surplus" for e in self.ends.values()),
            "staleness": dict(sorted(self.staleness.items())),
            "fillers": self.fillers,
        }

    def _failed(self) -> dict[str, int]:
        reasons = Counter(e.removeprefix("failed(").removesuffix(")") for e in self.ends.values() if e.startswith("failed("))
        reasons["nonfinite"] += self.nonfinite
        return {reason: n for reason, n in sorted(reasons.items()) if n}

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        tables = {
            "groups": [[uid, dict(vars(g))] for uid, g in sorted(self.groups.items())],
            "ends": [list(item) for item in sorted(self.ends.items())],
            "staleness": [list(item) for item in sorted(self.staleness.items())],
        }
        return vars(self) | tables

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Window:
        """The inverse of `to_json`."""
        groups = {uid: _Scored(**g) for uid, g in data["groups"]}
        tables = {"groups": groups, "ends": dict(data["ends"]), "staleness": Counter(dict(data["staleness"]))}
        return cls(**dict(data) | tables)


def _ratio(total: float, count: float) -> float:
    return total / count if count else NAN


def _mean_reward(groups: list[_Scored]) -> float:
    return _ratio(math.fsum(g.reward for g in groups), sum(g.rewarded for g in groups))


def _mean_part(groups: list[_Scored], name: str) -> float:
    return _ratio(math.fsum(g.parts[name] for g in groups), sum(g.rewarded for g in groups))


def _share(groups: list[_Scored], judgement: str) -> float:
    return _ratio(sum(g.judgement == judgement for g in groups), len(groups))
