"""Dynamic sampling: which group may be sent, what becomes of it, and which groups make the next batch.

Batches are filled in *dispatch* order (uids only rise), and one is cut only when no earlier group is unresolved: finishing first gives
no advantage, so short answers are not favoured. A group without signal frees its place at once. Staleness is bounded by the admission
rule, so nothing is ever dropped for being stale. The buffer holds counts, numbers and opaque payloads (object references); it knows no
actor, no tensor and no wall clock, and is used from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from learner.admission import has_room, judge, wants_extra
from learner.buffer_records import CutBatch, Outcome, RefillError, StepSummary, Waiting, refill_sentence
from learner.config import BufferConfig
from learner.ledger import BatchTokens, Ledger
from learner.order import DispatchOrder, OpenCut, Slot
from learner.results import Results
from learner.sampling_stats import Window
from learner.waiting import Stopwatch, batch_waiting, group_waiting
from verifier.records import GroupSummary

EVIDENCE_DECAY = 0.75  # weight that the measured informative rate keeps at each step, so that it follows the policy


class SamplingBuffer:
    """Groups between dispatch and commit, with their ledger (`self.ledger`)."""

    def __init__(
        self,
        config: BufferConfig,
        *,
        group_size: int,
        filter_groups: bool,
        spread_tol: float,
        max_staleness: int,
        attempts: int,
        drop_errors: bool,
        clock: Callable[[], float],
        spread_per_reward: bool = False,
        last_batch: int | None = None,
    ) -> None:
        """`clock` gives seconds that only rise. `spread_per_reward`: judge each named reward apart (`--reward_norm gdpo`).

        `last_batch`: batches of the whole run; no group is dispatched that could train only after them.
        """
        self.config = config
        self.size = config.batch_size
        self.limit = config.refill_limit or 10 * config.batch_size
        self.group_size, self.filter_groups, self.spread_tol = group_size, filter_groups, spread_tol
        self.max_staleness, self.attempts, self.drop_errors = max_staleness, attempts, drop_errors
        self.spread_per_reward = spread_per_reward
        self.last_batch = last_batch
        self.ledger = Ledger()
        self._clock = clock
        self._order = DispatchOrder(self.size)
        self._unkept = 0  # groups resolved without being kept since the last cut
        self._exhausted = False
        self._yes = self._no = 0.0  # evidence of the informative rate from the steps so far
        self._last = -1  # uid up to which groups count into the statistics of the batches committed
        self._results = Results()
        self._window = Window()
        self._watch = Stopwatch(clock)

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def batches(self) -> int:
        """Batches committed (b), which is the policy version of the learner."""
        return self.ledger.batches

    @property
    def kept(self) -> int:
        """Groups kept and not committed, those of a cut batch included."""
        return self.ledger.kept

    @property
    def in_flight(self) -> int:
        """Groups queued, generating or verifying."""
        return self.ledger.in_flight

    @property
    def finished(self) -> bool:
        """True when the prompts are exhausted and every group has ended."""
        return self._exhausted and not self._order.groups

    def requeued(self) -> list[int]:
        """Groups that wait for another dispatch (after a failed attempt, lost data or a resume), in order; send them first."""
        return [uid for uid in self._order.flight if self.ledger.state(uid) == "queued"]

    def last_chance(self, uid: int) -> bool:
        """True for a group that has failed so often that its next or present attempt is its last."""
        slot = self._order.groups.get(uid)
        return slot is not None and 0 < slot.failures == self.attempts - 1

    def held(self) -> list[Waiting]:
        """Every group in flight, in dispatch order, with its stage, engine, attempt and the seconds in that stage."""
        now = self._clock()
        return [group_waiting(self._order, self.ledger, uid, self.attempts, now) for uid in self._order.flight]

    def limit_reached(self) -> bool:
        """True when so many groups were resolved without being kept since the last cut that refilling stops."""
        return self._unkept >= self.limit

    def over_failure_budget(self) -> str:
        """A sentence when more groups failed than `max_failed_groups`, else "". Skipped optimiser steps have a budget of their own."""
        failed = {name: n for name, n in self.ledger.groups.items() if name.startswith("failed(") and name != "failed(nonfinite)"}
        if sum(failed.values()) <= self.config.max_failed_groups:
            return ""
        parts = ", ".join(f"{name} {n}" for name, n in sorted(failed.items()))
        return f"More groups failed than max_failed_groups = {self.config.max_failed_groups} ({parts}): see the run's log, or raise it."

    # -- dispatch --------------------------------------------------------------------------------------------------

    def may_dispatch(self, engine_version: int, uid: int | None = None) -> bool:
        """Whether an engine that has acknowledged `engine_version` may be given a new group, or the requeued group `uid`."""
        order = self._order
        if uid is None and (self._exhausted or self.limit_reached()):
            return False
        place = order.place(uid)
        if uid is None and self.last_batch is not None and place >= (self.last_batch - self.batches) * self.size:
            return False
        if has_room(place, engine_version, self.batches, self.size, self.max_staleness):
            return True
        if self.max_staleness or order.cuts or engine_version < self.batches:
            return False
        extra = int(self.config.overprovision * self.size)
        if uid is not None:
            return place < self.size + extra
        need = self.size - len(order.kept)
        yes, no = self._window.evidence()
        return need > 0 and wants_extra(need, len(order.flight), self._yes + yes, self._no + no, extra)

    def dispatch(self, uid: int, engine: int, engine_version: int) -> int:
        """The group goes to an engine, under the admission rule; returns the attempt (1, 2, …). A new uid is above all before it."""
        self._tick()
        new = uid not in self._order.groups
        assert self.may_dispatch(engine_version, None if new else uid), f"group {uid} may not be sent under version {engine_version}"
        if new:
            self._order.add(Slot(uid, ordinal=self.ledger.dispatched))
            self.ledger.open(uid)
        self._move(uid, "generating")
        slot = self._order.groups[uid]
        slot.engine, slot.version, slot.attempt = engine, engine_version, slot.attempt + 1
        return slot.attempt

    def exhaust(self) -> None:
        """There are no more prompts: what is in flight finishes, and the last batch may be short. Said again after a resume."""
        self._tick()
        self._exhausted = True

    # -- what comes back -------------------------------------------------------------------------------------------

    def generated(self, uid: int, attempt: int) -> bool:
        """All answers are there and go to a verifier; False when another attempt counts."""
        if not self._current(uid, attempt):
            return False
        if self.ledger.state(uid) == "generating":
            self._tick()
            self._move(uid, "verifying")
        return True

    def at_verifier(self, uid: int, attempt: int, verifier: int) -> None:
        """Which verifier has the group, for whoever asks what is waited for."""
        if self._current(uid, attempt):
            self._order.groups[uid].verifier = verifier

    def scored(self, uid: int, attempt: int, summary: GroupSummary, payload: Any) -> Outcome:
        """A whole group with its rewards. The first result of the current attempt counts; any other only books its tokens."""
        self._tick()
        if not self._current(uid, attempt):
            return self._unexpected(uid, attempt, summary.tokens)
        assert len(summary.rewards_G) == self.group_size, f"group {uid} has {len(summary.rewards_G)} answers of {self.group_size}"
        self._results.accept(uid, attempt)
        rewards = (summary.rewards_G, summary.rewards_RG)
        kind = judge(*rewards, self.spread_tol, drop_errors=self.drop_errors, per_reward=self.spread_per_reward)
        self._window.add(summary, kind)
        if kind == "error":
            return self._drop(uid, Outcome("failed", "verifier_error", kind), summary.tokens)
        if kind != "informative" and self.filter_groups:
            return self._drop(uid, Outcome("uninformative", kind, kind), summary.tokens)
        self.ledger.keep(uid, summary.tokens)
        self._order.keep(uid)
        slot = self._order.groups[uid]
        slot.summary, slot.payload, slot.since = summary, payload, self._clock()
        slot.kind = "" if kind == "informative" else kind
        self._window.ends[uid] = "kept"
        return Outcome("kept", "", kind)

    def attempt_failed(self, uid: int, attempt: int, reason: str, tokens_lost: int = 0) -> bool:
        """The engine or verifier died, crashed or ran past the deadline. True: the group is queued again, at its place.

        After the last attempt the group is failed(generation) or failed(verification), by the stage it was in. `tokens_lost` are
        tokens that were received and cannot arrive any more.
        """
        self._tick()
        self.ledger.book("lost_attempt", tokens_lost)
        if not self._current(uid, attempt):
            self._results.gone(uid, attempt)
            return False
        slot, stage = self._order.groups[uid], self.ledger.state(uid)
        slot.failures += 1
        self.ledger.attempts_failed[reason] += 1
        self._window.attempts_failed += 1
        if slot.failures >= self.attempts:
            self._drop(uid, Outcome("failed", "verification" if stage == "verifying" else "generation"), 0)
            return False
        self._move(uid, "queued")
        return True

    def payload_lost(self, uid: int) -> bool:
        """A kept group's data is gone with its node: it is generated again at its place. True when that undid a cut batch."""
        self._tick()
        holders = [i for i, cut in enumerate(self._order.cuts) if uid in cut.uids]
        if holders:
            self._unkept += self._order.undo_cuts(holders[0])
        self._order.back(uid)
        self._window.forget(uid)
        self._move(uid, "queued")
        return bool(holders)

    # -- batches ---------------------------------------------------------------------------------------------------

    def batch_ready(self) -> bool:
        """True when `cut` has something to say: a full batch, or one that cannot become full (short, filled up, or RefillError)."""
        order = self._order
        if order.full() or any(not cut.handed for cut in order.cuts):
            return True
        if order.flight or len(order.kept) >= self.size:
            return False
        return bool(order.kept) if self._exhausted else self.limit_reached()

    def cut(self) -> CutBatch:
        """The next batch: the first B kept groups in dispatch order. Call only when `batch_ready`.

        When refilling has stopped and fewer than B are kept, the policy `on_refill_limit` decides; with none kept, or under `raise`,
        RefillError is raised and the buffer is unchanged. The last batch of exhausted prompts may be short under any policy.
        """
        assert self.batch_ready(), "no batch is ready"
        self._tick()
        order, policy = self._order, self.config.on_refill_limit
        for again in order.cuts:
            if not again.handed:
                again.handed = True
                return self._batch(again)
        missing = max(self.size - len(order.kept), 0)
        if missing and not self._exhausted and (policy == "raise" or not order.kept):
            raise RefillError(refill_sentence(self._unkept, self.limit, len(order.kept), self.size, policy))
        # With k = 0 nothing is left behind a batch, nor behind a short one; else what stands behind the last group is the next batch's.
        last = self.ledger.last_uid if missing or self.max_staleness == 0 else order.kept[self.size - 1]
        cut = order.take(self.batches + len(order.cuts), missing if policy == "relax" else 0, self._unkept, last, self._clock())
        surplus = self._drop_surplus() if self.max_staleness == 0 else ()
        if not order.flight and not order.kept:
            order.origin = self.ledger.dispatched
        self._unkept = 0
        return self._batch(cut, surplus)

    def commit(self, batch: CutBatch, tokens: BatchTokens, failed: Collection[int] = ()) -> None:
        """The learner is done with the oldest cut batch, and b rises by one.

        `failed` are the groups none of whose optimiser steps was taken because loss or gradient were not finite. `tokens` accounts for
        every token of the other groups.
        """
        self._tick()
        cut, groups = self._order.cuts[0], self._order.groups
        assert cut.index == batch.index and tuple(cut.uids) == batch.uids, f"batch {batch.index} is not the one to be committed"
        assert set(failed) <= set(cut.uids), failed
        self.ledger.commit({uid: groups[uid].kind for uid in cut.uids if uid not in failed}, failed, tokens)
        self._order.commit()
        self._last = cut.last
        self._window.staleness.update(batch.staleness)
        self._window.fillers += cut.fillers
        self._window.nonfinite += len(failed)

    # -- statistics ------------------------------------------------------------------------------------------------

    def waiting_for(self) -> Waiting:
        """What the next batch waits for: its oldest unresolved group, the learner, or prompts."""
        return batch_waiting(self._order, self.ledger, self.attempts, self.batch_ready(), self._clock(), self._watch.ticked)

    def step_summary(self) -> StepSummary:
        """Statistics since the last call, over all groups up to the end of the last committed batch, in dispatch order."""
        self._tick()
        window, waited = self._window.take(self._last), self._watch.take()
        self._yes, self._no = (EVIDENCE_DECAY * (a + b) for a, b in zip((self._yes, self._no), window.evidence(), strict=True))
        return StepSummary(
            **window.statistics(),
            kept=self.kept,
            in_flight=self.in_flight,
            refill_left=max(self.limit - self._unkept, 0),
            informative_rate=(self._yes + 0.5) / (self._yes + self._no + 1.0),
            blocked_by_oldest_s=waited["oldest"],
            refill_wait_s=waited["refill"],
        )

    # -- keeping ---------------------------------------------------------------------------------------------------

    def payloads(self) -> dict[int, Any]:
        """Kept groups' payloads by uid, in dispatch order: what the caller persists beside `state`."""
        return {uid: slot.payload for uid, slot in sorted(self._order.groups.items()) if slot.summary is not None}

    def state(self) -> dict[str, Any]:
        """Everything but payloads and times, ready for `json.dumps`."""
        return {
            "ledger": self.ledger.to_json(),
            "groups": [slot.to_json() for _, slot in sorted(self._order.groups.items())],
            "cuts": [cut.to_json() for cut in self._order.cuts],
            "origin": self._order.origin,
            "unkept": self._unkept,
            "evidence": [self._yes, self._no],
            "last": self._last,
            "window": self._window.to_json(),
        }

    def load(self, state: Mapping[str, Any], payloads: Mapping[int, Any]) -> None:
        """Go on from `state`, in a buffer that is new. Groups in flight come back queued, with uid, place and attempt kept.

        A kept group whose payload is missing is generated again. A cut batch is given out again by the next `cut`. The caller drops
        results of an earlier life of the run: their attempts bear the same numbers. After a change of batch_size or max_staleness,
        groups that would now be too stale end as surplus.
        """
        assert not self.ledger.dispatched, "only a new buffer can be loaded"
        self.ledger = Ledger.from_json(state["ledger"])
        order = self._order = DispatchOrder.from_json(self.size, state["origin"], state["groups"], state["cuts"], self._clock())
        self._unkept = state["unkept"]
        self._yes, self._no = state["evidence"]
        self._last = state["last"]
        self._window = Window.from_json(state["window"])
        for uid in order.flight:
            if self.ledger.state(uid) != "queued":
                order.groups[uid].attempt -= 1
                self.ledger.move(uid, "queued")
        for uid, slot in list(order.groups.items()):
            if slot.summary is None:
                continue
            if uid in payloads:
                slot.payload = payloads[uid]
                self._results.accept(uid, slot.attempt)
            else:
                self.payload_lost(uid)
        for i, cut in enumerate(order.cuts):
            if any(order.groups[uid].staleness(cut.index) > self.max_staleness for uid in cut.uids):
                self._unkept += order.undo_cuts(i)
                break
        for uid in order.too_late(self.batches, self.max_staleness):
            self._close_surplus(uid)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _current(self, uid: int, attempt: int) -> bool:
        slot = self._order.groups.get(uid)
        return slot is not None and slot.attempt == attempt and self.ledger.state(uid) in ("generating", "verifying")

    def _move(self, uid: int, state: str) -> None:
        self.ledger.move(uid, state)
        self._order.groups[uid].since = self._clock()

    def _unexpected(self, uid: int, attempt: int, tokens: int) -> Outcome:
        kind = self._results.unexpected(uid, attempt)
        if kind == "twice":
            return Outcome("stale", "delivered twice")
        self.ledger.book("surplus" if kind == "late" else "lost_attempt", tokens)
        return Outcome("surplus") if kind == "late" else Outcome("stale", "lost attempt")

    def _drop(self, uid: int, outcome: Outcome, tokens: int) -> Outcome:
        """Resolved without being kept: its place is free."""
        self.ledger.close(uid, outcome.state, outcome.detail, tokens)
        self._order.remove(uid)
        self._unkept += 1
        self._window.ends[uid] = str(outcome) if outcome.state == "failed" else outcome.state
        return outcome

    def _close_surplus(self, uid: int) -> tuple[int, int, int] | None:
        """Ends a group as surplus; returns (uid, attempt, engine) when it still runs somewhere."""
        running = self.ledger.state(uid) in ("generating", "verifying")
        self.ledger.close(uid, "surplus")
        self._window.ends[uid] = "surplus"
        slot = self._order.remove(uid)
        if not running or slot.engine is None:
            return None
        self._results.expect_late(uid, slot.attempt)
        return (uid, slot.attempt, slot.engine)

    def _drop_surplus(self) -> tuple[tuple[int, int, int], ...]:
        """With k = 0, what overprovision dispatched beyond the batch that was just cut can never train."""
        running = [self._close_surplus(uid) for uid in sorted(self._order.kept + self._order.flight)]
        return tuple(r for r in running if r is not None)

    def _batch(self, cut: OpenCut, surplus: tuple[tuple[int, int, int], ...] = ()) -> CutBatch:
        slots = [self._order.groups[uid] for uid in cut.uids]
        summaries = tuple(slot.summary for slot in slots if slot.summary is not None)
        staleness = tuple(slot.staleness(cut.index) for slot in slots)
        assert len(summaries) == len(slots) and max(staleness) <= self.max_staleness, f"batch {cut.index}: staleness {staleness}"
        return CutBatch(cut.index, tuple(cut.uids), tuple(s.payload for s in slots), summaries, staleness, cut.fillers, surplus)

    def _tick(self) -> None:
        self._watch.tick(self._order, self.batch_ready())
