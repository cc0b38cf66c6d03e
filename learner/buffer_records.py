"""What the sampling buffer gives and takes: outcomes, cut batches, what is waited for, and a step's statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from learner.ledger import state_name
from rollout.records import PromptResult
from verifier.records import GroupSummary

Stage = Literal["queued", "generating", "verifying", "prompts", "learner", "nothing"]


class RefillError(RuntimeError):
    """The batch cannot be filled within the refill limit and the policy is to stop; one sentence with the remedy."""


@dataclass(frozen=True)
class Outcome:
    """What became of a scored group. `stale`: another attempt counts, or the group is closed; nothing changed but the token books.

    `judgement` is informative, all_right, all_wrong, equal or error, whatever `state` is ("" when stale or surplus).
    """

    state: Literal["kept", "uninformative", "failed", "surplus", "stale"]
    detail: str = ""
    judgement: str = ""

    def __str__(self) -> str:
        return state_name(self.state, self.detail)


@dataclass(frozen=True)
class CutBatch:
    """The groups of one batch, in dispatch order.

    `index` is the number of batches before it, which is the policy version it trains from; `staleness` is `index` minus the oldest version
    in each group. `fillers` masked groups complete the shape (refill policy `relax`). `surplus` are groups that will never train and may be
    aborted where they still run: (uid, attempt, engine).
    """

    index: int
    uids: tuple[int, ...]
    payloads: tuple[Any, ...]
    summaries: tuple[GroupSummary, ...]
    staleness: tuple[int, ...]
    fillers: int = 0
    surplus: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Waiting:
    """One thing that the loop waits for, since when, and why in words.

    `stage`: `queued` (for an engine), `generating`, `verifying`, `prompts` (nothing is in flight), `learner` (a batch is cut), or `nothing`
    (a batch is ready). `seconds` in that stage. `blocks` is True for the group that keeps a full batch from being cut.
    """

    stage: Stage
    seconds: float
    uid: int | None = None
    attempt: int = 0
    engine: int | None = None
    blocks: bool = False
    why: str = ""

    def __str__(self) -> str:
        return self.why


def refill_sentence(unkept: int, limit: int, kept: int, size: int, policy: str) -> str:
    """Why a batch cannot be filled, and what to do about it."""
    ended = f"{unkept} groups ended without signal or failed since the last batch, and refill_limit is {limit}"
    if not kept:
        return f"{ended}, with none of batch_size = {size} kept: make the prompts easier or harder, or raise refill_limit."
    remedy = "raise refill_limit, or choose short or relax"
    return f"{ended}, with {kept} of batch_size = {size} kept under on_refill_limit = {policy}: {remedy}."


@dataclass(frozen=True)
class StepSummary:
    """Statistics over a step's groups in dispatch order, dropped ones included; NaN where nothing was counted.

    Shares are of the groups that have rewards (`judged`), or of answers where said. `right` is a reward ≥ 1, `wrong` one ≤ 0.
    """

    scored: int  # groups with a result, errors included
    judged: int  # groups whose rewards are known
    reward: float  # mean over answers
    rewards: Mapping[str, float]  # the same for each named reward
    informative: float  # share of judged groups with reward spread
    all_right: float
    all_wrong: float
    equal: float
    resp_len: float  # tokens, mean over answers
    resp_len_right: float
    resp_len_wrong: float
    right: float  # share of answers
    truncated: float  # share of answers that the generation budget cut off
    verifier_errors: int  # answers without reward
    verifier_timeouts: int  # answers that the verifier's deadline scored 0
    tokens: int  # generated, of the scored groups
    seconds_generate: float  # mean over groups
    seconds_verify: float  # mean over groups
    reward_by_source: Mapping[str, float]
    informative_by_source: Mapping[str, float]
    results: tuple[PromptResult, ...]  # of the groups scored, in dispatch order
    dispatched: int  # groups, whatever became of them
    unkept: int  # groups resolved without being kept: the refill
    failed: Mapping[str, int]  # groups failed, by reason
    attempts_failed: int
    surplus: int
    staleness: Mapping[int, int]  # groups of the batches cut, by staleness
    fillers: int
    kept: int  # now
    in_flight: int  # now
    refill_left: int  # now: groups that may still be resolved unkept before refilling stops
    informative_rate: float  # estimate that sizes overprovision
    blocked_by_oldest_s: float  # B groups were kept, and an earlier one was unresolved
    refill_wait_s: float  # no batch, and only refills were in flight


_FLOAT = ("rewards_G", "rewards_RG")
_ARRAYS: Mapping[str, Any] = {"rewards_G": np.float64, "rewards_RG": np.float64, "lengths_G": np.int64, "truncated_G": np.bool_}


def summary_to_json(summary: GroupSummary) -> dict[str, Any]:
    """A summary ready for strict JSON: NaN becomes null, and every float comes back bit by bit."""
    data = {f.name: getattr(summary, f.name) for f in fields(summary)}
    for name in _ARRAYS:
        data[name] = np.asarray(data[name]).tolist()
    data["rewards_RG_shape"] = list(np.shape(summary.rewards_RG))
    for name in _FLOAT:
        data[name] = _nan_to_none(data[name])
    data["names"] = list(summary.names)
    return data


def summary_from_json(data: Mapping[str, Any]) -> GroupSummary:
    """The inverse of `summary_to_json`."""
    values = {f.name: data[f.name] for f in fields(GroupSummary)}
    for name, dtype in _ARRAYS.items():
        values[name] = np.array(_none_to_nan(values[name]) if name in _FLOAT else values[name], dtype=dtype)
    values["rewards_RG"] = values["rewards_RG"].reshape(data["rewards_RG_shape"])
    values["names"] = tuple(values["names"])
    return GroupSummary(**values)


def _nan_to_none(values: list[Any]) -> list[Any]:
    return [_nan_to_none(v) if isinstance(v, list) else (None if v != v else v) for v in values]


def _none_to_nan(values: list[Any]) -> list[Any]:
    return [_none_to_nan(v) if isinstance(v, list) else (float("nan") if v is None else v) for v in values]
