"""The buffer under any interleaving: lagging engines, failures, lost data, doubled and late results, cuts, commits and resumes.

The model knows only what it did and what the buffer answered. After every rule: the books close and count each uid once, the bound on
staleness holds by the versions that engines really had, batches come in dispatch order, and there is always something left to do.
Does not cover: rates and times (test_buffer.py).
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from learner.buffer_records import CutBatch, RefillError
from learner.ledger import BatchTokens
from tests.learner.sampling_world import make_buffer, summary

REWARDS = st.sampled_from([(0.0, 1.0, 1.0, 0.0)] * 4 + [(0.0,) * 4, (1.0,) * 4, (0.5,) * 4, (float("nan"), 1.0, 1.0, 0.0)])


class BufferMachine(RuleBasedStateMachine):
    """Random moves of engines, verifiers, learner and faults."""

    @initialize(
        size=st.integers(1, 3),
        k=st.integers(0, 2),
        over=st.sampled_from([0.0, 0.0, 1.0]),
        policy=st.sampled_from(["raise", "short", "relax"]),
        limit=st.sampled_from([2, 5, 1000]),
        filtering=st.booleans(),
        drop=st.booleans(),
        engines=st.integers(1, 3),
    )
    def start(self, size: int, k: int, over: float, policy: str, limit: int, filtering: bool, drop: bool, engines: int) -> None:
        self.options: dict[str, Any] = {
            "batch_size": size, "max_staleness": k, "overprovision": over, "on_refill_limit": policy, "refill_limit": limit,
            "filter_groups": filtering, "drop_errors": drop, "attempts": 2,
        }  # fmt: skip
        self.buffer = make_buffer(**self.options)
        self.k, self.size = k, size
        self.versions = [0] * engines
        self.running: dict[int, tuple[int, int]] = {}  # uid -> attempt, oldest version that wrote a token
        self.delivered: list[tuple[int, int, int]] = []  # uid, attempt, version of results that were handed over
        self.queued: set[int] = set()
        self.kept_version: dict[int, int] = {}
        self.cuts: list[CutBatch] = []
        self.ended: dict[int, str] = {}
        self.committed: list[int] = []
        self.next_uid, self.b, self.stopped = 0, 0, False

    def pick(self, data: st.DataObject, uids: list[int]) -> int:
        return data.draw(st.sampled_from(sorted(uids)))

    @rule(data=st.data())
    def dispatch(self, data: st.DataObject) -> None:
        engine = data.draw(st.integers(0, len(self.versions) - 1))
        version = self.versions[engine]
        uid = self.pick(data, list(self.queued)) if self.queued else None
        if not self.buffer.may_dispatch(version, uid):
            return
        if uid is None:
            uid, self.next_uid = self.next_uid, self.next_uid + data.draw(st.integers(1, 2))
        self.running[uid] = (self.buffer.dispatch(uid, engine, version), version)
        self.queued.discard(uid)

    @rule(data=st.data())
    def weights_arrive(self, data: st.DataObject) -> None:
        engine = data.draw(st.integers(0, len(self.versions) - 1))
        self.versions[engine] = data.draw(st.integers(self.versions[engine], self.b))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def generated(self, data: st.DataObject) -> None:
        uid = self.pick(data, list(self.running))
        assert self.buffer.generated(uid, self.running[uid][0])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), rewards=REWARDS)
    def scored(self, data: st.DataObject, rewards: tuple[float, ...]) -> None:
        uid = self.pick(data, list(self.running))
        attempt, version = self.running.pop(uid)
        outcome = self.buffer.scored(uid, attempt, summary(uid, attempt, rewards, version), uid)
        self.delivered.append((uid, attempt, version))
        if outcome.state == "kept":
            self.kept_version[uid] = version
            assert outcome.judgement == "informative" or not self.options["filter_groups"]
        else:
            self.ended[uid] = str(outcome)
            assert outcome.state == ("failed" if outcome.judgement == "error" else "uninformative")

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 3))
    def attempt_fails(self, data: st.DataObject, tokens: int) -> None:
        uid = self.pick(data, list(self.running))
        attempt, version = self.running.pop(uid)
        verifying = self.buffer.ledger.state(uid) == "verifying"
        if self.buffer.attempt_failed(uid, attempt, "engine_died", tokens):
            self.queued.add(uid)
        else:
            self.ended[uid] = "failed(verification)" if verifying else "failed(generation)"
        self.delivered.append((uid, attempt, version))

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def result_of_an_attempt_that_is_over(self, data: st.DataObject) -> None:
        uid, attempt, version = data.draw(st.sampled_from(self.delivered))
        before = self.buffer.ledger.to_json()["groups"], self.buffer.kept, self.buffer.in_flight
        assert self.buffer.scored(uid, attempt, summary(uid, attempt, version=version), None).state in ("stale", "surplus")
        assert before == (self.buffer.ledger.to_json()["groups"], self.buffer.kept, self.buffer.in_flight)

    @precondition(lambda self: not self.stopped and self.buffer.batch_ready() and len(self.cuts) < 2)
    @rule()
    def cut(self) -> None:
        before = self.buffer.state()
        try:
            batch = self.buffer.cut()
        except RefillError:
            assert self.buffer.limit_reached() and self.buffer.in_flight == 0 and self.buffer.state() == before
            self.stopped = True
            return
        in_cuts = {uid for cut in self.cuts for uid in cut.uids}
        assert list(batch.uids) == sorted(set(self.kept_version) - in_cuts)[: self.size]
        assert batch.payloads == batch.uids and batch.index == self.b + len(self.cuts)
        assert len(batch.uids) == self.size or self.buffer.in_flight == 0
        assert batch.fillers == (self.size - len(batch.uids) if self.options["on_refill_limit"] == "relax" else 0)
        for uid in batch.uids:
            assert 0 <= batch.index - self.kept_version[uid] <= self.k
        self.cuts.append(batch)
        self.end_surplus(batch, set(self.kept_version) - in_cuts - set(batch.uids))

    def end_surplus(self, batch: CutBatch, kept: set[int]) -> None:
        """With k = 0 whatever is left behind a batch was dispatched by overprovision, and ends."""
        if self.k:
            assert not batch.surplus
            return
        left = {*kept, *self.running, *self.queued}
        assert not left or (self.options["overprovision"] and min(left) > batch.uids[-1])
        assert {uid for uid, _, _ in batch.surplus} == set(self.running)
        self.ended |= dict.fromkeys(left, "surplus")
        self.delivered += [(uid, *run) for uid, run in self.running.items()]
        self.queued, self.running = set(), {}
        for uid in kept:
            del self.kept_version[uid]

    @precondition(lambda self: self.cuts)
    @rule(skipped=st.booleans())
    def commit(self, skipped: bool) -> None:
        batch = self.cuts.pop(0)
        failed = batch.uids[:1] if skipped else ()
        self.buffer.commit(batch, BatchTokens(trained=sum(s.tokens for s in batch.summaries if s.uid not in failed)), failed)
        self.b += 1
        for uid in batch.uids:
            del self.kept_version[uid]
            self.ended[uid] = "failed(nonfinite)" if uid in failed else "trained"
        assert not self.committed or batch.uids[0] > self.committed[-1], "in dispatch order over all batches"
        self.committed.extend(batch.uids)

    @precondition(lambda self: self.kept_version)
    @rule(data=st.data())
    def data_is_lost(self, data: st.DataObject) -> None:
        uid = self.pick(data, list(self.kept_version))
        held = [i for i, cut in enumerate(self.cuts) if uid in cut.uids]
        assert self.buffer.payload_lost(uid) == bool(held)
        del self.cuts[held[0] if held else len(self.cuts) :]
        del self.kept_version[uid]
        self.queued.add(uid)

    @rule()
    def resume(self) -> None:
        before = self.buffer.state()
        new = make_buffer(**self.options)
        new.load(json.loads(json.dumps(before, allow_nan=False)), self.buffer.payloads())
        after = new.state()
        for part in ("cuts", "origin", "unkept", "evidence", "window"):
            assert after[part] == before[part], part
        assert new.ledger.groups == self.buffer.ledger.groups and new.ledger.tokens == self.buffer.ledger.tokens
        self.queued |= set(self.running)
        self.buffer, self.running, self.delivered = new, {}, []
        self.versions = [self.b] * len(self.versions)
        again = [new.cut() for _ in self.cuts]
        assert [(c.index, c.uids, c.fillers, c.payloads) for c in again] == [(c.index, c.uids, c.fillers, c.payloads) for c in self.cuts]
        self.cuts = again

    @invariant()
    def books_close_and_count_each_group_once(self) -> None:
        if not hasattr(self, "buffer"):
            return
        ledger = self.buffer.ledger
        assert ledger.check() == []
        assert ledger.groups == Counter(self.ended.values())
        assert self.buffer.kept == len(self.kept_version)
        assert self.buffer.requeued() == sorted(self.queued)
        assert [w.uid for w in self.buffer.held()] == sorted({*self.running, *self.queued})
        assert self.buffer.in_flight == len(self.running) + len(self.queued)
        assert ledger.dispatched == len(self.ended) + self.buffer.kept + self.buffer.in_flight
        assert self.buffer.batches == self.b

    @invariant()
    def something_is_left_to_do(self) -> None:
        if not hasattr(self, "buffer") or self.running or self.cuts or self.stopped or self.buffer.batch_ready():
            return
        assert self.buffer.may_dispatch(self.b, min(self.queued) if self.queued else None)


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
