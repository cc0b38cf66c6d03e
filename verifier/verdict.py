"""A verdict, without numpy: verifier processes import this and little else, so they start in a tenth of a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["value", "timeout", "error"]


@dataclass(frozen=True)
class Verdict:
    """What a verifier said of one answer.

    `value`: a reward was found. `timeout`: the *response* made the verifier run past its deadline or its memory; it scores 0.
    `error`: *our* fault (unparsable gold, a broken verifier); there is no reward, and `reward` is None.
    `rewards` has the parts by name when several verifiers are weighed; `detail` says why, in words.
    """

    status: Status
    reward: float | None
    detail: str = ""
    seconds: float = 0.0
    rewards: Mapping[str, float] = field(default_factory=dict)


def value(reward: float, detail: str = "") -> Verdict:
    """A reward that was found."""
    return Verdict("value", float(reward), detail)


def timeout(detail: str, seconds: float = 0.0) -> Verdict:
    """The response used up its time or memory: it scores 0 and is not tried again."""
    return Verdict("timeout", 0.0, detail, seconds)


def error(detail: str, seconds: float = 0.0) -> Verdict:
    """A fault of ours: no reward."""
    return Verdict("error", None, detail, seconds)
