"""What travels out of generation: a prompt, its answers, and where every token came from.

Shape legend: P prompt tokens, T tokens of one answer, G answers of one group.
All records are frozen, hold numpy (never torch), and pickle cheaply through Ray's object store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One question, already tokenised: token in, token out.

    `uid` counts dispatches over the whole life of a run (0, 1, 2, …); it names the group, its seeds and its
    place in the ledger. `row` names the question within `source`, whatever the epoch.
    """

    uid: int
    tokens_P: np.ndarray  # int32
    text: str
    answer: str
    verifier: str
    source: str
    row: str
    epoch: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptResult:
    """What a group says of its prompt: how many of the answers that have a reward were right."""

    source: str
    row: str
    right: int
    answers: int


@dataclass(frozen=True)
class Span:
    """Tokens `[start, stop)` of an answer, written under weight version `version`.

    `by_policy` is False for text that the policy did not write (a tool's output); no loss counts such tokens.
    """

    start: int
    stop: int
    version: int
    by_policy: bool = True


@dataclass(frozen=True)
class Completion:
    """One answer as the engine gave it.

    `logp_T` is the engine's own log-probability of each sampled token at the sampling temperature.
    `finish` is the engine's finish reason, the only source of truth about truncation.
    """

    tokens_T: np.ndarray  # int32
    logp_T: np.ndarray  # float32, nats
    finish: Finish
    spans: tuple[Span, ...]
    text: str

    @property
    def truncated(self) -> bool:
        """True when the generation budget cut the answer off."""
        return self.finish == "length"


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. `temperature` 0 is greedy. `seed` and the prompt's uid fix every answer's own seed."""

    n: int
    max_tokens: int
    temperature: float
    seed: int
    top_p: float = 1.0


@dataclass(frozen=True)
class Group:
    """G answers to one prompt: atomic, it is trained whole or not at all."""

    prompt: Prompt
    attempt: int
    completions: tuple[Completion, ...]
    engine: int
    seconds: float

    @property
    def uid(self) -> int:
        """The uid of the prompt, which is the group's name."""
        return self.prompt.uid

    @property
    def tokens(self) -> int:
        """Generated tokens over all answers."""
        return sum(len(c.tokens_T) for c in self.completions)

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest weight version that wrote any of its tokens."""
        seen = [s.version for c in self.completions for s in c.spans if s.by_policy]
        return (min(seen), max(seen)) if seen else (0, 0)
