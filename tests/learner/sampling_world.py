"""A small world around the sampling buffer: groups whose answers depend on their uid alone, engines and verifiers with speeds, a learner.

Shared by the buffer's tests; simulated time, no actor.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from learner.buffer import SamplingBuffer
from learner.buffer_records import CutBatch, StepSummary
from learner.config import BufferConfig
from learner.ledger import BatchTokens
from verifier.records import GroupSummary

G = 4


def summary(
    uid: int,
    attempt: int = 1,
    rewards: Sequence[float] = (0.0, 1.0, 0.0, 1.0),
    version: int = 0,
    length: int = 5,
    source: str = "s",
    rows: Sequence[Sequence[float]] | None = None,
    truncated: int = 0,
) -> GroupSummary:
    """A scored group whose answers have `length`, `length` + 1, … tokens."""
    rewards_G = np.array(rewards, dtype=np.float64)
    return GroupSummary(
        uid=uid,
        attempt=attempt,
        engine=0,
        source=source,
        row=str(uid),
        rewards_G=rewards_G,
        rewards_RG=rewards_G[None] if rows is None else np.array(rows, dtype=np.float64),
        names=("correct",) if rows is None else tuple(f"r{i}" for i in range(len(rows))),
        lengths_G=np.arange(length, length + len(rewards_G), dtype=np.int64),
        truncated_G=np.arange(len(rewards_G)) < truncated,
        prompt_length=3,
        version_min=version,
        version_max=version,
        errors=int(np.isnan(rewards_G).sum()),
        timeouts=0,
        detail="",
        seconds_generate=0.0,
        seconds_verify=0.0,
    )


def make_buffer(clock: Callable[[], float] = lambda: 0.0, **options: object) -> SamplingBuffer:
    """A filtering buffer of batches of 4 groups; options of the config and of the buffer by their names."""
    config = {k: options.pop(k) for k in list(options) if k in BufferConfig.model_fields}
    defaults = {"group_size": G, "filter_groups": True, "spread_tol": 1e-6, "max_staleness": 0, "attempts": 3, "drop_errors": True}
    return SamplingBuffer(BufferConfig(**{"batch_size": 4} | config), clock=clock, **(defaults | options))  # type: ignore[arg-type]


def all_tokens(batch: CutBatch, failed: Sequence[int] = ()) -> BatchTokens:
    """The learner's report when it masks nothing."""
    return BatchTokens(trained=sum(s.tokens for s in batch.summaries if s.uid not in failed))


@dataclass
class World:
    """Runs the loop in simulated time until `steps` batches are committed.

    `informative(uid)` and `length(uid)` are the nature of the prompts; `speeds` are tokens per second of each engine, `slots` the groups
    that an engine generates at once, `learn_seconds` the learner's time per batch. Engines load new weights `sync_lag` seconds after a
    commit.
    """

    buffer: SamplingBuffer
    informative: Callable[[int], bool]
    length: Callable[[int], int] = lambda uid: 5
    speeds: Sequence[float] = (10.0,)
    slots: int = 1000
    learn_seconds: float = 1.0
    sync_lag: float = 0.0
    verify_seconds: Callable[[int], float] = lambda uid: 0.0
    now: float = 0.0
    next_uid: int = 0
    trained: list[tuple[int, ...]] = field(default_factory=list)
    batches: list[CutBatch] = field(default_factory=list)
    summaries: list[StepSummary] = field(default_factory=list)
    learner_idle: float = 0.0

    def clock(self) -> float:
        """The simulated time."""
        return self.now

    def run(self, steps: int) -> World:
        """Until `steps` batches are committed; RefillError passes through."""
        buffer, self.buffer._clock = self.buffer, self.clock
        versions, load = [0] * len(self.speeds), [0] * len(self.speeds)
        events: list[tuple[float, int, str, tuple[int, ...]]] = []
        ticket, learning, idle_since = 0, None, self.now

        def at(delay: float, kind: str, *args: int) -> None:
            nonlocal ticket
            ticket += 1
            heapq.heappush(events, (self.now + delay, ticket, kind, args))

        while len(self.trained) < steps:
            for engine in sorted(range(len(versions)), key=load.__getitem__):
                while load[engine] < self.slots and buffer.may_dispatch(versions[engine]):
                    uid, self.next_uid = self.next_uid, self.next_uid + 1
                    attempt = buffer.dispatch(uid, engine, versions[engine])
                    load[engine] += 1
                    at(self.length(uid) / self.speeds[engine], "generated", uid, attempt, engine, versions[engine])
            if learning is None and buffer.batch_ready():
                learning = buffer.cut()
                self.batches.append(learning)
                self.learner_idle += self.now - idle_since
                at(self.learn_seconds, "learned")
            self.now, _, kind, args = heapq.heappop(events)
            if kind == "generated":
                uid, attempt, engine, version = args
                load[engine] -= 1
                buffer.generated(uid, attempt)
                at(self.verify_seconds(uid), "scored", *args)
            elif kind == "scored":
                uid, attempt, engine, version = args
                rewards = (0.0, 1.0, 0.0, 1.0) if self.informative(uid) else (0.0,) * G
                buffer.scored(uid, attempt, summary(uid, attempt, rewards, version, self.length(uid)), f"payload {uid}")
            elif kind == "learned":
                assert learning is not None
                buffer.commit(learning, all_tokens(learning))
                self.trained.append(learning.uids)
                self.summaries.append(buffer.step_summary())
                assert not buffer.ledger.check()
                learning, idle_since = None, self.now
                at(self.sync_lag, "synced", buffer.batches)
            else:
                versions = [args[0]] * len(versions)
        return self


def coin(rate: float, seed: int = 0) -> Callable[[int], bool]:
    """Informative with probability `rate`, by uid."""
    return lambda uid: random.Random(uid * 7919 + seed).random() < rate


def stratified(rate: float, block: int = 100) -> Callable[[int], bool]:
    """Informative at exactly `rate` in every block of uids, shuffled within it: a long run's rate without a long run's chance."""

    @cache
    def drawn(number: int) -> frozenset[int]:
        return frozenset(random.Random(number).sample(range(block), round(rate * block)))

    return lambda uid: uid % block in drawn(uid // block)
