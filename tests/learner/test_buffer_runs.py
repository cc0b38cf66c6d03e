"""Simulated runs of the sampling buffer: refill, order, staleness, overprovision and crashes over many batches.

Does not cover: real engines' speeds; single cases (test_buffer.py); random interleavings (test_buffer_machine.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from learner.buffer import SamplingBuffer
from learner.buffer_records import RefillError, StepSummary
from tests.learner.sampling_world import World, coin, make_buffer, stratified


def world_of(**options: Any) -> Callable[[Callable[[], float]], SamplingBuffer]:
    """Makes a world's buffer, again after each crash."""
    return lambda clock: make_buffer(clock, **options)


@pytest.mark.parametrize(("policy", "k"), [("raise", 0), ("short", 0), ("relax", 2)])
def test_rate_zero_ends_by_the_policy(policy: str, k: int) -> None:
    world = World(world_of(batch_size=4, on_refill_limit=policy, max_staleness=k), lambda uid: False)
    with pytest.raises(RefillError, match="none of batch_size = 4 kept"):
        world.run(1)
    buffer = world.buffer
    assert 40 <= buffer.ledger.closed("uninformative") < 40 + 4 * (k + 1) and buffer.in_flight == 0


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.25, 0.5, 0.75, 0.95])
@pytest.mark.parametrize("k", [0, 2])
def test_refill_wastes_nothing(rate: float, k: int) -> None:
    """Groups generated ÷ (groups needed ÷ true rate) is 1 but for the end of the run, and at most 1.05."""
    steps = 25
    make = world_of(batch_size=32, max_staleness=k, refill_limit=10_000, last_batch=steps)
    world = World(make, stratified(rate), lambda uid: 5 + uid % 7, speeds=(10.0, 3.0)).run(steps)
    buffer = world.buffer
    needed = buffer.ledger.groups["trained"]
    generated = buffer.ledger.dispatched
    assert needed == 32 * steps and buffer.kept == buffer.in_flight == 0
    assert 0.95 <= generated / (needed / rate) <= 1.05
    assert buffer.ledger.groups["surplus"] == 0
    assert k or sum(step.refill_wait_s for step in world.summaries) > 0, "what refilling cost is told"


def lasting(step: StepSummary) -> StepSummary:
    """A step's statistics without times, staleness and what is so at the moment alone."""
    now = {"kept": 0, "in_flight": 0, "refill_left": 0, "refill_wait_s": 0.0, "blocked_by_oldest_s": 0.0}
    return replace(step, staleness={}, attempts_failed=0, **now)


def by_length(uid: int) -> int:
    """Long answers are right more often: below 10 tokens nearly never informative."""
    return 2 + (uid * 37) % 60


@pytest.mark.parametrize("k", [0, 1, 3])
def test_trained_groups_are_the_same_for_any_speed(k: int) -> None:
    def informative(uid: int) -> bool:
        return coin(0.2 + 0.6 * by_length(uid) / 62)(uid)

    def run(speeds: tuple[float, ...], slots: int, verify: float) -> World:
        make = world_of(batch_size=8, max_staleness=k, refill_limit=1000, last_batch=25)
        return World(make, informative, by_length, speeds, slots, verify_seconds=lambda uid: verify * (uid % 5)).run(25)

    expected = [uid for uid in range(2000) if informative(uid)][: 8 * 25]
    worlds = [run((10.0,), 1000, 0.0), run((1.0, 100.0), 3, 0.1), run((100.0, 1.0, 7.0), 2, 3.0), run((1000.0, 1000.0), 50, 0.0)]
    for world in worlds:
        assert [uid for batch in world.trained for uid in batch] == expected
        assert all(len(batch) == 8 for batch in world.trained)
        assert [lasting(step) for step in world.summaries] == [lasting(step) for step in worlds[0].summaries]
        assert world.buffer.ledger.to_json() == worlds[0].buffer.ledger.to_json()
        assert world.buffer.in_flight == world.buffer.kept == 0


def test_finishing_first_would_have_been_an_advantage() -> None:
    """The control of the test above: batches of the first B finished differ from those in dispatch order, and are shorter."""
    fast_first = sorted(range(64), key=lambda uid: (by_length(uid), uid))[:8]
    assert set(fast_first) != set(range(8))
    assert sum(map(by_length, fast_first)) < 0.5 * sum(map(by_length, range(8)))


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("lag", [0.0, 2.5])
def test_staleness_is_bounded_with_engines_that_lag(k: int, lag: float) -> None:
    make = world_of(batch_size=4, max_staleness=k)
    world = World(make, coin(0.6), lambda uid: 5 + 200 * (uid % 31 == 0), speeds=(20.0, 5.0), sync_lag=lag).run(40)
    seen = {s for batch in world.batches for s in batch.staleness}
    assert max(seen) <= k and (k == 0 or max(seen) >= 1)
    assert sum(n for step in world.summaries for n in step.staleness.values()) == 4 * len(world.batches)


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("rollbacks", [False, True])
def test_staleness_is_bounded_after_short_batches_and_rollbacks_and_nothing_is_dropped_for_it(k: int, rollbacks: bool) -> None:
    """Thirty prompts in turn have signal, or hardly any, so that some batches are short; engines lag two versions and more."""
    make = world_of(batch_size=4, max_staleness=k, refill_limit=12, on_refill_limit="short", last_batch=40)
    dice = random.Random(k)
    crash = (lambda: dice.random() < 0.05) if rollbacks else World.crash
    nature: dict[str, Any] = {"length": lambda uid: 5 + 100 * (uid % 13 == 0), "speeds": (20.0, 5.0), "sync_lag": 2.5}
    world = World(make, lambda uid: uid % 60 < 30 or uid % 8 == 0, **nature, crash=crash, checkpoint_every=9 if rollbacks else 1).run(40)
    seen = {s for batch in world.batches for s in batch.staleness}
    assert max(seen) <= k and (k == 0 or max(seen) >= 1)
    assert any(len(batch.uids) < 4 for batch in world.batches) and bool(world.crashes) == rollbacks
    ended = world.buffer.ledger.groups
    assert set(ended) == {"trained", "uninformative(all_wrong)"} and ended["trained"] == sum(len(b.uids) for b in world.batches)


def test_staleness_one_keeps_the_learner_busy() -> None:
    """Generation of a batch takes 0.5 s and a step 1 s: synchronously the learner waits a third of the time, with k = 1 hardly ever."""
    share = {}
    for k in (0, 1):
        world = World(world_of(batch_size=4, max_staleness=k), lambda uid: True, speeds=(10.0,)).run(20)
        share[k] = world.learner_idle / world.now
    assert share[0] == pytest.approx(1 / 3, abs=0.01) and share[1] < 0.03


def test_overprovision_buys_time_with_surplus() -> None:
    def run(overprovision: float) -> World:
        return World(world_of(batch_size=32, overprovision=overprovision), coin(0.7), lambda uid: 10 + uid % 5).run(30)

    plain, over = run(0.0), run(1.0)
    no_surplus, surplus = plain.buffer, over.buffer
    wait = [sum(step.refill_wait_s for step in world.summaries) for world in (plain, over)]
    assert wait[1] < 0.35 * wait[0] and over.now < 0.75 * plain.now
    assert no_surplus.ledger.groups["surplus"] == 0 < surplus.ledger.groups["surplus"] < 0.25 * surplus.ledger.dispatched
    assert {s for batch in over.batches for s in batch.staleness} == {0}


def test_overprovision_wastes_little_when_nearly_all_groups_are_informative() -> None:
    buffer = World(world_of(batch_size=32, overprovision=1.0), lambda uid: True).run(20).buffer
    assert buffer.ledger.groups["surplus"] < 0.1 * buffer.ledger.groups["trained"]


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("every", [1, 40])
def test_crashes_change_nothing_that_trains(k: int, every: int) -> None:
    """Every moment of a run is a good one to die at; going back up to 40 events is, too. At the end the books are the same to the token."""
    make = world_of(batch_size=8, max_staleness=k, refill_limit=1000, last_batch=30)
    nature: dict[str, Any] = {"informative": coin(0.4), "length": by_length, "speeds": (10.0, 3.0)}
    nature["verify_seconds"] = lambda uid: 0.3 * (uid % 3)
    calm = World(make, **nature).run(30)
    dice = random.Random(every)
    chaos = World(make, **nature, crash=lambda: dice.random() < 0.6 / every, checkpoint_every=every).run(30)
    assert chaos.crashes > 10
    assert chaos.trained == calm.trained
    assert chaos.buffer.ledger.to_json() == calm.buffer.ledger.to_json()
    assert [lasting(step) for step in chaos.summaries] == [lasting(step) for step in calm.summaries]
