"""Dynamic sampling, case by case: admission, order, refill limit, attempts, surplus, commit and resume.

Does not cover: Ray, real engines and the loop that calls the buffer (tests/e2e); simulated runs (test_buffer_runs.py); random
interleavings (test_buffer_machine.py); the ledger's own rules (test_ledger.py).
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from learner.buffer import SamplingBuffer
from learner.buffer_records import RefillError
from learner.ledger import BatchTokens
from tests.learner.sampling_world import RIGHT, WRONG, all_tokens, last_step, make_buffer, score, send, summary

# -- admission and order -------------------------------------------------------------------------------------------------


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


def test_staleness_beyond_the_bound_is_an_internal_error() -> None:
    buffer = make_buffer(batch_size=1, max_staleness=1)
    send(buffer, 0, 1)
    score(buffer, 0)
    score(buffer, 1, version=-1)  # an engine that lied about its version
    assert buffer.cut().staleness == (0,)
    with pytest.raises(AssertionError, match="staleness"):
        buffer.cut()


@pytest.mark.parametrize("k", [0, 2])
def test_nothing_is_sent_that_could_train_only_after_the_last_batch(k: int) -> None:
    buffer = make_buffer(batch_size=2, max_staleness=k, last_batch=2)
    uid = 0
    while buffer.may_dispatch(0):
        send(buffer, uid)
        uid += 1
    assert uid == (4 if k else 2)
    score(buffer, 1, WRONG)
    assert buffer.may_dispatch(0), "a refill is one of the four"
    send(buffer, uid)
    for waiting in buffer.held():
        score(buffer, waiting.uid or 0)
    batch = buffer.cut()
    buffer.commit(batch, all_tokens(batch))
    assert buffer.may_dispatch(1) == (k == 0)


# -- judging -------------------------------------------------------------------------------------------------------------


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


# -- attempts ------------------------------------------------------------------------------------------------------------


def test_attempts_end_in_a_named_failure_while_the_rest_goes_on() -> None:
    buffer = make_buffer(batch_size=3, attempts=2)
    send(buffer, 0, 1, 2)
    score(buffer, 2)
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
    step = last_step(buffer)
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


def test_an_undone_cut_gives_back_the_refills_it_had_forgiven() -> None:
    buffer = make_buffer(batch_size=2, refill_limit=1, on_refill_limit="short")
    send(buffer, 0, 1)
    score(buffer, 0)
    score(buffer, 1, WRONG)
    assert buffer.limit_reached() and buffer.cut().uids == (0,) and not buffer.limit_reached()
    assert buffer.payload_lost(0) and buffer.limit_reached() and buffer.state()["origin"] == 0
    buffer.dispatch(0, 0, 0)
    score(buffer, 0, attempt=2)
    assert buffer.cut().uids == (0,)


# -- refill limit and the end of the prompts -----------------------------------------------------------------------------


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


# -- overprovision -------------------------------------------------------------------------------------------------------


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


# -- commit and resume ---------------------------------------------------------------------------------------------------


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


def reload(buffer: SamplingBuffer, payloads: dict[int, object] | None = None, **options: Any) -> SamplingBuffer:
    new = make_buffer(**options)
    state = json.loads(json.dumps(buffer.state(), allow_nan=False))
    new.load(state, buffer.payloads() if payloads is None else payloads)
    return new


def half_way(**options: Any) -> SamplingBuffer:
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
    assert new.step_summary().scored == 2, "0 and 1, whose batch had been committed before"
    batch = new.cut()
    assert batch.uids == (2, 3)
    new.commit(batch, all_tokens(batch))
    assert (new.step_summary().scored, last_step(new).scored) == (2, 2)


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
