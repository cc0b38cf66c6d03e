"""Dynamic sampling: admission, order, refill, attempts, surplus, statistics, resume; single cases and simulated runs.

Does not cover: Ray, real engines and the loop that calls the buffer (tests/e2e); random interleavings (test_buffer_machine.py);
the ledger's own rules (test_ledger.py).
"""

from __future__ import annotations

import json
import math

import pytest

from learner.admission import has_room, judge, wants_extra
from learner.buffer import SamplingBuffer
from learner.buffer_records import RefillError
from learner.ledger import BatchTokens
from tests.learner.sampling_world import World, all_tokens, coin, make_buffer, stratified, summary

WRONG, RIGHT = (0.0,) * 4, (1.0,) * 4


def send(buffer: SamplingBuffer, *uids: int, version: int = 0) -> None:
    for uid in uids:
        buffer.dispatch(uid, 0, version)


def score(buffer: SamplingBuffer, uid: int, rewards: tuple[float, ...] = (0.0, 1.0, 0.0, 1.0), attempt: int = 1, **options: int) -> str:
    return str(buffer.scored(uid, attempt, summary(uid, attempt, rewards, **options), f"payload {uid}"))


# -- admission and order -----------------------------------------------------------------------------------------------


def test_order_beats_speed() -> None:
    buffer = make_buffer(batch_size=2, max_staleness=1)
    send(buffer, 0, 1, 2, 3)
    for uid in (3, 2, 1):
        assert score(buffer, uid) == "kept"
        assert not buffer.batch_ready(), "group 0 was sent before them"
    assert buffer.waiting_for().uid == 0 and buffer.waiting_for().blocks
    score(buffer, 0)
    batch = buffer.cut()
    assert (batch.uids, batch.payloads) == ((0, 1), ("payload 0", "payload 1"))
    assert buffer.cut().uids == (2, 3)


def test_a_group_without_signal_frees_its_place_at_once() -> None:
    buffer = make_buffer(batch_size=2)
    send(buffer, 0, 1)
    assert not buffer.may_dispatch(0)
    assert score(buffer, 1, WRONG) == "uninformative(all_wrong)"
    assert buffer.may_dispatch(0)
    send(buffer, 2)
    assert not buffer.may_dispatch(0), "one for one"


def test_a_lagging_engine_gets_less_and_a_requeued_group_keeps_its_place() -> None:
    buffer = make_buffer(batch_size=2, max_staleness=1)
    send(buffer, 0, 1)
    for uid in (0, 1):
        score(buffer, uid)
    batch = buffer.cut()
    assert buffer.may_dispatch(0) and buffer.may_dispatch(0)
    send(buffer, 2, 3)
    buffer.commit(batch, all_tokens(batch))
    assert not buffer.may_dispatch(0) and buffer.may_dispatch(1)
    send(buffer, 4, version=1)
    buffer.attempt_failed(4, 1, "engine_died")
    buffer.attempt_failed(2, 1, "engine_died")
    assert buffer.requeued() == [2, 4]
    assert buffer.may_dispatch(0, 2), "place 0 trains as batch 1, one after version 0"
    assert not buffer.may_dispatch(0, 4), "place 2 trains as batch 2, two after version 0"
    with pytest.raises(AssertionError, match="may not be sent under version 0"):
        buffer.dispatch(4, 0, 0)
    assert buffer.dispatch(4, 0, 1) == 2


@pytest.mark.parametrize(
    ("place", "v_e", "b", "k", "room"),
    [
        (3, 0, 0, 0, True),
        (4, 0, 0, 0, False),
        (7, 0, 0, 1, True),
        (8, 0, 0, 1, False),
        (3, 4, 5, 1, True),
        (4, 4, 5, 1, False),
        (0, 3, 5, 1, False),
    ],
)
def test_admission_rule(place: int, v_e: int, b: int, k: int, room: bool) -> None:
    assert has_room(place, v_e, b, 4, k) is room


def test_staleness_beyond_the_bound_is_an_internal_error() -> None:
    buffer = make_buffer(batch_size=1, max_staleness=1)
    send(buffer, 0, 1)
    score(buffer, 0)
    score(buffer, 1, version=-1)  # an engine that lied about its version
    assert buffer.cut().staleness == (0,)
    with pytest.raises(AssertionError, match="staleness"):
        buffer.cut()


# -- judging -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "drop", "verdict"),
    [
        (RIGHT, True, "all_right"),
        (WRONG, True, "all_wrong"),
        ((-1.0,) * 4, True, "all_wrong"),
        ((0.5,) * 4, True, "equal"),
        ((0.5, 0.5, 0.5, 0.5 + 9e-7), True, "equal"),
        ((0.5, 0.5, 0.5, 0.5 + 2e-6), True, "informative"),
        ((1e9 + 0.1,) * 4, True, "all_right"),
        ((math.nan, 1.0, 0.0, 1.0), True, "error"),
        ((math.nan, 1.0, 0.0, 1.0), False, "informative"),
        ((math.nan, 1.0, 1.0, 1.0), False, "all_right"),
        ((math.nan,) * 4, False, "error"),
    ],
)
def test_judge(rewards: tuple[float, ...], drop: bool, verdict: str) -> None:
    group = summary(0, rewards=rewards)
    assert judge(group.rewards_G, group.rewards_RG, 1e-6, drop_errors=drop, per_reward=False) == verdict


def test_judge_each_reward_apart() -> None:
    group = summary(0, rewards=(1.0,) * 4, rows=((1.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0)))
    assert judge(group.rewards_G, group.rewards_RG, 1e-6, drop_errors=True, per_reward=False) == "all_right"
    assert judge(group.rewards_G, group.rewards_RG, 1e-6, drop_errors=True, per_reward=True) == "informative"


def test_without_filter_groups_without_signal_train_and_are_counted() -> None:
    buffer = make_buffer(batch_size=2, filter_groups=False)
    send(buffer, 0, 1)
    outcome = buffer.scored(0, 1, summary(0, rewards=RIGHT), None)
    assert (outcome.state, outcome.judgement) == ("kept", "all_right")
    score(buffer, 1)
    batch = buffer.cut()
    buffer.commit(batch, all_tokens(batch))
    assert buffer.ledger.groups == {"trained": 2} and buffer.ledger.trained_uninformative == {"all_right": 1}
    assert buffer.step_summary().informative == 0.5


def test_verifier_error_fails_the_group() -> None:
    buffer = make_buffer()
    send(buffer, 0)
    assert score(buffer, 0, (math.nan, 1.0, 0.0, 1.0)) == "failed(verifier_error)"
    assert buffer.ledger.tokens == {"failed": 26}


def test_a_partial_group_is_an_internal_error() -> None:
    buffer = make_buffer()
    send(buffer, 0)
    with pytest.raises(AssertionError, match="3 answers of 4"):
        score(buffer, 0, (0.0, 1.0, 1.0))


# -- attempts ----------------------------------------------------------------------------------------------------------


def test_attempts_end_in_a_named_failure_while_the_rest_goes_on() -> None:
    buffer = make_buffer(batch_size=2, attempts=2)
    send(buffer, 0, 1)
    assert buffer.attempt_failed(0, 1, "deadline", tokens_lost=9)
    assert buffer.dispatch(0, 1, 0) == 2
    assert not buffer.attempt_failed(0, 1, "deadline"), "the first attempt is over already"
    assert not buffer.attempt_failed(0, 2, "engine_died")
    buffer.generated(1, 1)
    buffer.attempt_failed(1, 1, "verifier_died")
    buffer.dispatch(1, 0, 0)
    buffer.generated(1, 2)
    buffer.attempt_failed(1, 2, "verifier_died")
    assert buffer.ledger.groups == {"failed(generation)": 1, "failed(verification)": 1}
    assert buffer.ledger.attempts_failed == {"deadline": 1, "engine_died": 1, "verifier_died": 2}
    assert buffer.ledger.tokens == {"lost_attempt": 9}
    step = buffer.step_summary()
    assert (step.failed, step.attempts_failed, step.unkept) == ({"generation": 1, "verification": 1}, 4, 2)


def test_first_complete_result_wins_and_tokens_are_booked_once() -> None:
    buffer = make_buffer(batch_size=2)
    send(buffer, 0)
    buffer.attempt_failed(0, 1, "deadline")
    buffer.dispatch(0, 0, 0)
    assert score(buffer, 0, attempt=1) == "stale(lost attempt)"
    assert score(buffer, 0, attempt=2) == "kept"
    assert score(buffer, 0, WRONG, attempt=2) == "stale(delivered twice)"
    assert (buffer.ledger.tokens["lost_attempt"], buffer.ledger.held, buffer.ledger.received) == (26, 26, 52)
    assert not buffer.generated(0, 1)


def test_failure_budget() -> None:
    buffer = make_buffer(batch_size=3, attempts=1, max_failed_groups=1)
    send(buffer, 0, 1)
    buffer.attempt_failed(0, 1, "deadline")
    assert buffer.over_failure_budget() == ""
    buffer.attempt_failed(1, 1, "deadline")
    assert buffer.over_failure_budget().startswith("More groups failed than max_failed_groups = 1 (failed(generation) 2)")


def test_lost_data_of_a_kept_group_is_generated_again_at_its_place() -> None:
    buffer = make_buffer(batch_size=2, max_staleness=1)
    send(buffer, 0, 1, 2)
    for uid in (0, 1, 2):
        score(buffer, uid)
    assert buffer.cut().uids == (0, 1)
    assert not buffer.payload_lost(2) and buffer.payload_lost(0)
    assert buffer.requeued() == [0, 2] and not buffer.batch_ready()
    buffer.dispatch(0, 0, 0)
    score(buffer, 0, attempt=2)
    assert buffer.cut().uids == (0, 1)
    assert buffer.ledger.tokens == {"lost_attempt": 52}


# -- refill limit and the end of the prompts ---------------------------------------------------------------------------


def refill(policy: str, kept: int) -> SamplingBuffer:
    """A buffer of B = 4 whose limit of 5 is reached, with `kept` groups kept and nothing in flight."""
    buffer = make_buffer(batch_size=4, refill_limit=5, on_refill_limit=policy)
    uid = 0
    for _ in range(kept):
        send(buffer, uid)
        score(buffer, uid)
        uid += 1
    while not buffer.limit_reached():
        assert buffer.may_dispatch(0) and not buffer.batch_ready()
        send(buffer, uid)
        score(buffer, uid, WRONG)
        uid += 1
    assert uid == kept + 5 and not buffer.may_dispatch(0) and buffer.batch_ready()
    return buffer


@pytest.mark.parametrize("policy", ["raise", "short", "relax"])
@pytest.mark.parametrize("kept", [0, 3])
def test_refill_limit(policy: str, kept: int) -> None:
    buffer = refill(policy, kept)
    before = buffer.state()
    if policy == "raise" or not kept:
        with pytest.raises(RefillError, match="refill_limit is 5") as caught:
            buffer.cut()
        assert f"{kept or 'none'} of" in str(caught.value) and buffer.state() == before
        return
    batch = buffer.cut()
    assert (batch.uids, batch.fillers) == ((0, 1, 2), 1 if policy == "relax" else 0)
    assert not buffer.limit_reached() and not buffer.may_dispatch(0), "a short batch takes all B places"
    buffer.commit(batch, all_tokens(batch))
    assert buffer.may_dispatch(1) and buffer.step_summary().refill_left == 5


def test_at_the_limit_what_is_in_flight_finishes_and_may_fill_the_batch() -> None:
    buffer = make_buffer(batch_size=2, refill_limit=1, on_refill_limit="short")
    send(buffer, 0, 1)
    score(buffer, 0, WRONG)
    assert buffer.limit_reached() and not buffer.may_dispatch(0) and not buffer.batch_ready()
    buffer.attempt_failed(1, 1, "engine_died")
    assert buffer.may_dispatch(0, 1), "a retry is no refill"
    buffer.dispatch(1, 0, 0)
    score(buffer, 1, attempt=2)
    assert buffer.cut().uids == (1,)


@pytest.mark.parametrize(("policy", "k"), [("raise", 0), ("short", 0), ("relax", 2)])
def test_rate_zero_ends_by_the_policy(policy: str, k: int) -> None:
    buffer = make_buffer(batch_size=4, on_refill_limit=policy, max_staleness=k)
    with pytest.raises(RefillError, match="none of batch_size = 4 kept"):
        World(buffer, lambda uid: False).run(1)
    assert 40 <= buffer.ledger.closed("uninformative") < 40 + 4 * (k + 1) and buffer.in_flight == 0


def test_exhausted_prompts_end_with_a_short_batch() -> None:
    buffer = make_buffer(batch_size=2)
    send(buffer, 0, 1)
    score(buffer, 0)
    buffer.exhaust()
    assert not buffer.may_dispatch(0) and not buffer.batch_ready() and not buffer.finished
    score(buffer, 1, RIGHT)
    batch = buffer.cut()
    assert batch.uids == (0,) and not buffer.finished
    buffer.commit(batch, all_tokens(batch))
    assert buffer.finished and not buffer.batch_ready()


# -- overprovision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("need", "in_flight", "kept", "dropped", "largest", "wanted"),
    [
        (4, 4, 0, 0, 8, True),  # nothing known: p = ½ ± 0.35
        (4, 12, 0, 0, 8, False),  # the cap
        (32, 32, 1000, 0, 16, False),  # p = 0.9995: all will be kept
        (32, 32, 950, 50, 16, True),  # p = 0.95: 30.4 − 1.2 are likely
        (32, 34, 950, 50, 16, True),  # 32.3 − 1.3 = 31.0
        (32, 35, 950, 50, 16, False),  # 33.2 − 1.3 = 31.9
        (32, 35, 19, 1, 16, True),  # the same rate on less evidence: 32.5 − 2.5 = 30.0
    ],
)
def test_overprovision_is_sized_by_the_rate_and_its_uncertainty(
    need: int, in_flight: int, kept: int, dropped: int, largest: int, wanted: bool
) -> None:
    assert wants_extra(need, in_flight, kept, dropped, largest) is wanted


def test_surplus_never_trains_and_finishing_first_does_not_save_it() -> None:
    buffer = make_buffer(batch_size=2, overprovision=1.0)
    send(buffer, 0, 1, 2, 3)
    assert not buffer.may_dispatch(0), "at most B extra"
    score(buffer, 3)
    score(buffer, 2)
    assert not buffer.batch_ready()
    score(buffer, 0)
    buffer.generated(1, 1)
    score(buffer, 1, WRONG)
    batch = buffer.cut()
    assert (batch.uids, batch.surplus) == ((0, 2), ())
    assert (buffer.ledger.groups["surplus"], buffer.ledger.tokens["surplus"]) == (1, 26)
    assert not buffer.may_dispatch(0), "no extra while the learner has the batch"
    buffer.commit(batch, all_tokens(batch))
    assert buffer.kept == buffer.in_flight == 0


def test_surplus_in_flight_is_named_for_abortion_and_its_late_tokens_are_booked_once() -> None:
    buffer = make_buffer(batch_size=2, overprovision=1.0)
    send(buffer, 0, 1, 2, 3)
    buffer.attempt_failed(3, 1, "engine_died")
    score(buffer, 0)
    score(buffer, 1)
    batch = buffer.cut()
    assert batch.surplus == ((2, 1, 0),) and buffer.ledger.groups["surplus"] == 2
    assert score(buffer, 2) == "surplus" and score(buffer, 2) == "stale(delivered twice)"
    assert buffer.ledger.tokens == {"surplus": 26}


# -- simulated runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.25, 0.5, 0.75, 0.95])
@pytest.mark.parametrize("k", [0, 2])
def test_refill_wastes_nothing(rate: float, k: int) -> None:
    """Groups generated ÷ (groups needed ÷ true rate) is 1 but for the end of the run, and at most 1.05."""
    steps = 25
    buffer = make_buffer(batch_size=32, max_staleness=k, refill_limit=10_000)
    World(buffer, stratified(rate), lambda uid: 5 + uid % 7, speeds=(10.0, 3.0)).run(steps)
    needed = buffer.ledger.groups["trained"]
    generated = buffer.ledger.dispatched - buffer.kept - buffer.in_flight  # those belong to batches to come
    assert needed == 32 * steps
    assert 0.95 <= generated / (needed / rate) <= 1.05
    assert buffer.ledger.groups["surplus"] == 0


def by_length(uid: int) -> int:
    """Long answers are right more often: below 10 tokens nearly never informative."""
    return 2 + (uid * 37) % 60


@pytest.mark.parametrize("k", [0, 1, 3])
def test_trained_groups_are_the_same_for_any_speed(k: int) -> None:
    def informative(uid: int) -> bool:
        return coin(0.2 + 0.6 * by_length(uid) / 62)(uid)

    def run(speeds: tuple[float, ...], slots: int, verify: float) -> World:
        buffer = make_buffer(batch_size=8, max_staleness=k, refill_limit=1000)
        return World(buffer, informative, by_length, speeds, slots, verify_seconds=lambda uid: verify * (uid % 5)).run(25)

    expected = [uid for uid in range(2000) if informative(uid)][: 8 * 25]
    worlds = [run((10.0,), 1000, 0.0), run((1.0, 100.0), 3, 0.1), run((100.0, 1.0, 7.0), 2, 3.0), run((1000.0, 1000.0), 50, 0.0)]
    for world in worlds:
        assert [uid for batch in world.trained for uid in batch] == expected
        assert all(len(batch) == 8 for batch in world.trained)
    lengths = [sum(step.tokens for step in world.summaries) / sum(step.scored for step in world.summaries) for world in worlds]
    assert max(lengths) - min(lengths) < 0.1 * min(lengths)


def test_finishing_first_would_have_been_an_advantage() -> None:
    """The control of the test above: batches of the first B finished differ from those in dispatch order, and are shorter."""
    fast_first = sorted(range(64), key=lambda uid: (by_length(uid), uid))[:8]
    assert set(fast_first) != set(range(8))
    assert sum(map(by_length, fast_first)) < 0.5 * sum(map(by_length, range(8)))


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("lag", [0.0, 2.5])
def test_staleness_is_bounded_with_engines_that_lag(k: int, lag: float) -> None:
    buffer = make_buffer(batch_size=4, max_staleness=k)
    world = World(buffer, coin(0.6), lambda uid: 5 + 200 * (uid % 31 == 0), speeds=(20.0, 5.0), sync_lag=lag).run(40)
    seen = {s for batch in world.batches for s in batch.staleness}
    assert max(seen) <= k and (k == 0 or max(seen) >= 1)
    assert sum(n for step in world.summaries for n in step.staleness.values()) == 4 * len(world.batches)


def test_staleness_one_keeps_the_learner_busy() -> None:
    """Generation of a batch takes 0.5 s and a step 1 s: synchronously the learner waits a third of the time, with k = 1 hardly ever."""
    share = {}
    for k in (0, 1):
        world = World(make_buffer(batch_size=4, max_staleness=k), lambda uid: True, speeds=(10.0,)).run(20)
        share[k] = world.learner_idle / world.now
    assert share[0] == pytest.approx(1 / 3, abs=0.01) and share[1] < 0.03


def test_overprovision_buys_time_with_surplus() -> None:
    def run(overprovision: float) -> tuple[World, SamplingBuffer]:
        buffer = make_buffer(batch_size=32, overprovision=overprovision)
        return World(buffer, coin(0.7), lambda uid: 10 + uid % 5).run(30), buffer

    (plain, no_surplus), (over, surplus) = run(0.0), run(1.0)
    wait = [sum(step.refill_wait_s for step in world.summaries) for world in (plain, over)]
    assert wait[1] < 0.35 * wait[0] and over.now < 0.75 * plain.now
    assert no_surplus.ledger.groups["surplus"] == 0 < surplus.ledger.groups["surplus"] < 0.25 * surplus.ledger.dispatched
    assert {s for batch in over.batches for s in batch.staleness} == {0}


def test_overprovision_wastes_little_when_nearly_all_groups_are_informative() -> None:
    buffer = make_buffer(batch_size=32, overprovision=1.0)
    World(buffer, lambda uid: True).run(20)
    assert buffer.ledger.groups["surplus"] < 0.1 * buffer.ledger.groups["trained"]


# -- statistics --------------------------------------------------------------------------------------------------------


def test_step_summary_counts_dropped_groups_too() -> None:
    now = [0.0]
    buffer = make_buffer(lambda: now[0], batch_size=2, max_staleness=1)
    send(buffer, 0, 1, 2, 3)
    score(buffer, 0, (1.0, 0.0, 0.0, 0.0), length=10, truncated=1)  # lengths 10 … 13, the right answer has 10
    score(buffer, 1, RIGHT, length=20)
    score(buffer, 2, WRONG, length=1, source="hard")
    score(buffer, 3, (math.nan, 1.0, 1.0, 1.0), length=30)
    step = buffer.step_summary()
    assert (step.scored, step.judged, step.dispatched, step.unkept) == (4, 3, 4, 3)
    assert (step.informative, step.all_right, step.all_wrong, step.equal) == (1 / 3, 1 / 3, 1 / 3, 0.0)
    assert step.reward == 8 / 15 and step.rewards == {"correct": 8 / 15} and step.right == 8 / 15
    assert step.reward_by_source == {"s": 8 / 11, "hard": 0.0} and step.informative_by_source == {"s": 0.5, "hard": 0.0}
    assert step.resp_len == (46 + 86 + 10 + 126) / 16 and step.tokens == 268
    assert step.resp_len_right == (10 + 86 + 31 + 32 + 33) / 8 and step.resp_len_wrong == (11 + 12 + 13 + 10) / 7
    assert step.truncated == 1 / 16 and step.verifier_errors == 1 and step.failed == {"verifier_error": 1}
    assert (step.kept, step.in_flight, step.refill_left) == (1, 0, 17)
    again = buffer.step_summary()
    assert again.scored == 0 and math.isnan(again.reward) and again.kept == 1


def test_statistics_do_not_depend_on_the_order_of_arrival() -> None:
    steps = []
    for uids in (range(12), reversed(range(12))):
        buffer = make_buffer(batch_size=12)
        send(buffer, *range(12))
        for uid in uids:
            score(buffer, uid, (0.1 * uid, 1 / 3, 1e-9, 0.7))
        steps.append(buffer.step_summary())
    assert steps[0] == steps[1]


def test_waiting_names_stage_group_and_time() -> None:
    now = [100.0]
    buffer = make_buffer(lambda: now[0], batch_size=2, max_staleness=0)
    assert buffer.waiting_for().stage == "prompts"
    send(buffer, 0, 1)
    now[0] = 103.0
    assert str(buffer.waiting_for()) == "group 0 (attempt 1 of 3) is generated by engine 0, for 3.0 s; 0 of 2 groups are kept"
    buffer.generated(0, 1)
    now[0] = 104.5
    assert (buffer.waiting_for().stage, buffer.waiting_for().seconds) == ("verifying", 1.5)
    buffer.attempt_failed(0, 1, "verifier_died")
    assert str(buffer.waiting_for()).startswith("group 0 (attempt 1 of 3) waits for an engine, for 0.0 s")
    assert [(w.uid, w.stage, w.seconds) for w in buffer.held()] == [(0, "queued", 0.0), (1, "generating", 4.5)]
    buffer.dispatch(0, 0, 0)
    score(buffer, 0, attempt=2)
    score(buffer, 1)
    assert buffer.waiting_for().stage == "nothing"
    batch = buffer.cut()
    now[0] = 110.0
    assert (buffer.waiting_for().stage, buffer.waiting_for().seconds) == ("learner", 5.5)
    buffer.commit(batch, all_tokens(batch))
    assert buffer.waiting_for().stage == "prompts"


def test_times_of_waiting_are_told_apart() -> None:
    now = [0.0]
    buffer = make_buffer(lambda: now[0], batch_size=2, max_staleness=1)
    send(buffer, 0, 1, 2)
    now[0] = 1.0
    score(buffer, 1)
    now[0] = 3.0
    score(buffer, 2)  # 2 of 2 are kept, group 0 is the oldest
    now[0] = 7.0
    score(buffer, 0, WRONG)
    buffer.commit(batch := buffer.cut(), all_tokens(batch))
    send(buffer, 3, 4, version=1)
    now[0] = 8.0
    score(buffer, 3, WRONG)
    score(buffer, 4, WRONG)
    send(buffer, 5, 6, version=1)
    now[0] = 10.5
    score(buffer, 5)
    step = buffer.step_summary()
    assert (step.blocked_by_oldest_s, step.refill_wait_s) == (4.0, 2.5)


# -- commit and resume -------------------------------------------------------------------------------------------------


def test_groups_of_a_skipped_step_fail_and_the_batch_still_counts() -> None:
    buffer = make_buffer(batch_size=2)
    send(buffer, 0, 1)
    score(buffer, 0)
    score(buffer, 1)
    batch = buffer.cut()
    buffer.commit(batch, BatchTokens(trained=20, mismatch=6), failed=[0])
    assert buffer.ledger.groups == {"trained": 1, "failed(nonfinite)": 1} and buffer.batches == 1
    assert buffer.ledger.tokens == {"trained": 20, "masked(mismatch)": 6, "failed": 26}
    assert buffer.step_summary().failed == {"nonfinite": 1} and buffer.over_failure_budget() == ""


def reload(buffer: SamplingBuffer, payloads: dict[int, object] | None = None, **options: object) -> SamplingBuffer:
    new = make_buffer(**options)
    state = json.loads(json.dumps(buffer.state(), allow_nan=False))
    new.load(state, buffer.payloads() if payloads is None else payloads)
    return new


def half_way(**options: object) -> SamplingBuffer:
    """B = 2, k = 1: batch (0, 1) is cut, 2 is kept, 3 is queued after a failed attempt, 4 was dropped and 5 is verified."""
    buffer = make_buffer(batch_size=2, max_staleness=1, **options)
    send(buffer, 0, 1, 2, 3)
    for uid in (0, 1, 2):
        score(buffer, uid)
    buffer.attempt_failed(3, 1, "deadline")
    batch = buffer.cut()
    buffer.commit(batch, all_tokens(batch))
    send(buffer, 4, 5, version=1)
    score(buffer, 4, WRONG, version=1)
    buffer.generated(5, 1)
    return buffer


def test_resume_keeps_uids_places_attempts_and_statistics() -> None:
    buffer = half_way()
    new = reload(buffer, batch_size=2, max_staleness=1)
    assert new.payloads() == {2: "payload 2"}
    assert new.requeued() == [3, 5]
    assert new.ledger.check() == [] and new.ledger.groups == buffer.ledger.groups
    assert (new.dispatch(3, 0, 1), new.dispatch(5, 0, 1)) == (2, 1)
    assert new.state()["groups"][1:] != buffer.state()["groups"][1:], "3 has had its second attempt"
    for uid, attempt in ((3, 2), (5, 1)):
        score(new, uid, attempt=attempt, version=1)
    assert new.cut().uids == (2, 3)
    assert new.step_summary().scored == 6 and new.step_summary().unkept == 0


def test_resume_with_an_open_cut_gives_it_out_again() -> None:
    buffer = refill("relax", 3)
    batch = buffer.cut()
    new = reload(buffer, batch_size=4, refill_limit=5, on_refill_limit="relax")
    assert new.batch_ready()
    again = new.cut()
    assert (again.index, again.uids, again.payloads, again.fillers, again.staleness) == (0, (0, 1, 2), batch.payloads, 1, (0, 0, 0))
    assert not new.batch_ready()
    new.commit(again, all_tokens(again))
    assert new.step_summary().staleness == {0: 3}, "counted once"


def test_resume_without_a_payload_generates_the_group_again() -> None:
    new = reload(half_way(), {}, batch_size=2, max_staleness=1)
    assert new.requeued() == [2, 3, 5] and new.ledger.tokens["lost_attempt"] == 26 and new.ledger.check() == []


def test_resume_under_a_lower_bound_ends_as_surplus_what_came_too_late() -> None:
    new = reload(half_way(), batch_size=2, max_staleness=0)
    assert new.ledger.groups["surplus"] == 1, "group 2 is of version 0, and b is 1"
    assert new.requeued() == [3, 5] and new.may_dispatch(1, 3) and new.may_dispatch(1, 5)
    assert new.ledger.check() == []
