"""A small world around the sampling buffer: groups whose answers depend on their uid alone, engines and verifiers with speeds, a learner.

Shared by the buffer's tests; simulated time, no actor.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import numpy as np

from learner.buffer import SamplingBuffer
from learner.buffer_records import CutBatch, StepSummary
from learner.config import BufferConfig
from learner.ledger import BatchTokens
from verifier.records import GroupSummary

G = 4
WRONG, RIGHT = (0.0,) * G, (1.0,) * G


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


def make_buffer(clock: Callable[[], float] = lambda: 0.0, **options: Any) -> SamplingBuffer:
    """A filtering buffer of batches of 4 groups; options of the config and of the buffer by their names."""
    config = {k: options.pop(k) for k in list(options) if k in BufferConfig.model_fields}
    defaults: dict[str, Any] = {
        "group_size": G,
        "filter_groups": True,
        "spread_tol": 1e-6,
        "max_staleness": 0,
        "attempts": 3,
        "drop_errors": True,
    }
    return SamplingBuffer(BufferConfig(**{"batch_size": 4} | config), clock=clock, **(defaults | options))


def all_tokens(batch: CutBatch, failed: Sequence[int] = ()) -> BatchTokens:
    """The learner's report when it masks nothing."""
    return BatchTokens(trained=sum(s.tokens for s in batch.summaries if s.uid not in failed))


def send(buffer: SamplingBuffer, *uids: int, version: int = 0) -> None:
    """To engine 0."""
    for uid in uids:
        buffer.dispatch(uid, 0, version)


def score(buffer: SamplingBuffer, uid: int, rewards: tuple[float, ...] = (0.0, 1.0, 0.0, 1.0), attempt: int = 1, **options: Any) -> str:
    """The group comes back; the outcome in words."""
    return str(buffer.scored(uid, attempt, summary(uid, attempt, rewards, **options), f"payload {uid}"))


def last_step(buffer: SamplingBuffer) -> StepSummary:
    """The prompts end, what is kept trains as the last batch, and its step is summed up."""
    buffer.exhaust()
    batch = buffer.cut()
    buffer.commit(batch, all_tokens(batch))
    return buffer.step_summary()


@dataclass
class World:
    """Runs the loop in simulated time until `steps` batches are committed.

    `informative(uid)` and `length(uid)` are the nature of the prompts; `speeds` are tokens per second of each engine, `slots` the groups
    that an engine generates at once, `learn_seconds` the learner's time per batch. Engines load new weights `sync_lag` seconds after a
    commit. `crash` decides after each event whether all of it dies; it goes on from the last checkpoint, of which one is written every
    `checkpoint_every` events.
    """

    make: Callable[[Callable[[], float]], SamplingBuffer]
    informative: Callable[[int], bool]
    length: Callable[[int], int] = lambda uid: 5
    speeds: Sequence[float] = (10.0,)
    slots: int = 1000
    learn_seconds: float = 1.0
    sync_lag: float = 0.0
    verify_seconds: Callable[[int], float] = lambda uid: 0.0
    crash: Callable[[], bool] = lambda: False
    checkpoint_every: int = 1
    now: float = 0.0
    next_uid: int = 0
    batches: list[CutBatch] = field(default_factory=list)  # committed
    summaries: list[StepSummary] = field(default_factory=list)
    learner_idle: float = 0.0
    crashes: int = 0

    def __post_init__(self) -> None:
        self.buffer = self.make(self.clock)
        self._events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self._tickets = count()
        self._learning: CutBatch | None = None
        self._begin(0)
        self._save()

    def clock(self) -> float:
        """The simulated time."""
        return self.now

    @property
    def trained(self) -> list[tuple[int, ...]]:
        """The uids of each committed batch."""
        return [batch.uids for batch in self.batches]

    def run(self, steps: int) -> World:
        """Until `steps` batches are committed; RefillError passes through."""
        for event in count(1):
            self._dispatch()
            if self._learning is None and self.buffer.batch_ready():
                self._learning = self.buffer.cut()
                self.learner_idle += self.now - self._idle_since
                self._at(self.learn_seconds, "learned")
            if len(self.batches) == steps:
                break
            self.now, _, kind, args = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(*args)
            if event % self.checkpoint_every == 0:
                self._save()
            if self.crash():
                self._restore()
        return self

    def _begin(self, version: int) -> None:
        self._versions, self._load = [version] * len(self.speeds), [0] * len(self.speeds)
        self._learning = None
        self._idle_since = self.now
        self._events.clear()

    def _at(self, delay: float, kind: str, *args: int) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._tickets), kind, args))

    def _dispatch(self) -> None:
        again = self.buffer.requeued()
        while True:
            uid = again[0] if again else None
            free = [e for e in range(len(self._load)) if self._load[e] < self.slots and self.buffer.may_dispatch(self._versions[e], uid)]
            if not free:
                return
            engine = min(free, key=self._load.__getitem__)
            if uid is None:
                uid, self.next_uid = self.next_uid, self.next_uid + 1
            again = again[1:]
            attempt = self.buffer.dispatch(uid, engine, self._versions[engine])
            self._load[engine] += 1
            self._at(self.length(uid) / self.speeds[engine], "generated", uid, attempt, engine, self._versions[engine])

    def _generated(self, uid: int, attempt: int, engine: int, version: int) -> None:
        self._load[engine] -= 1
        self.buffer.generated(uid, attempt)
        self._at(self.verify_seconds(uid), "scored", uid, attempt, version)

    def _scored(self, uid: int, attempt: int, version: int) -> None:
        rewards = (0.0, 1.0, 0.0, 1.0) if self.informative(uid) else (0.0,) * G
        self.buffer.scored(uid, attempt, summary(uid, attempt, rewards, version, self.length(uid)), f"payload {uid}")

    def _learned(self) -> None:
        assert self._learning is not None
        self.buffer.commit(self._learning, all_tokens(self._learning))
        self.batches.append(self._learning)
        self.summaries.append(self.buffer.step_summary())
        assert not self.buffer.ledger.check()
        self._learning, self._idle_since = None, self.now
        self._at(self.sync_lag, "synced", self.buffer.batches)

    def _synced(self, version: int) -> None:
        self._versions = [version] * len(self._versions)

    def _save(self) -> None:
        if self.checkpoint_every > 1 or self.crash is not World.crash:
            self._saved = json.dumps(self.buffer.state()), self.buffer.payloads(), self.next_uid, len(self.batches)

    def _restore(self) -> None:
        state, payloads, self.next_uid, steps = self._saved
        self.buffer = self.make(self.clock)
        self.buffer.load(json.loads(state), payloads)
        assert not self.buffer.ledger.check()
        del self.batches[steps:], self.summaries[steps:]
        self._begin(self.buffer.batches)
        self.crashes += 1


def coin(rate: float, seed: int = 0) -> Callable[[int], bool]:
    """Informative with probability `rate`, by uid."""
    return lambda uid: random.Random(uid * 7919 + seed).random() < rate


def stratified(rate: float, block: int = 100) -> Callable[[int], bool]:
    """Informative at exactly `rate` in every block of uids, shuffled within it: a long run's rate without a long run's chance."""

    @cache
    def drawn(number: int) -> frozenset[int]:
        return frozenset(random.Random(number).sample(range(block), round(rate * block)))

    return lambda uid: uid % block in drawn(uid // block)
