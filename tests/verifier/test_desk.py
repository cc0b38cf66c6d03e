"""The pool's books without processes: who is told what, tried again, remembered. Does not cover processes or time (test_pool)."""

from __future__ import annotations

import pytest

from verifier.desk import MAX_LOST, MAX_RESPONSE, Desk, Item, Job
from verifier.verdict import Verdict

RIGHT = Verdict("value", 1.0, "right", 0.5)


def desk_with(*items):
    desk, job = Desk({}), Job(items)
    desk.take(job)
    return desk, job


def test_equal_items_wait_for_one_verdict_and_are_remembered():
    item = Item("numeric", "5", "5")
    desk, job = desk_with(item, item, Item("numeric", "5", "6"))
    assert len(desk.pending) == 2
    desk.finish(desk.pending.popleft(), RIGHT)
    assert job.verdicts[:2] == [RIGHT, RIGHT] and not job.future.done()
    later = Job([item])
    desk.take(later)
    assert later.future.result()[0].reward == 1 and later.future.result()[0].seconds == 0
    assert desk.stats.cached == 2


@pytest.mark.parametrize("verdict", [Verdict("timeout", 0.0), Verdict("error", None)])
def test_only_values_are_remembered(verdict):
    desk, job = desk_with(Item("numeric", "5", "5"))
    desk.finish(desk.pending.popleft(), verdict)
    assert job.future.result() == [verdict]
    desk.take(Job([Item("numeric", "5", "5")]))
    assert len(desk.pending) == 1


def test_what_may_change_its_mind_is_asked_every_time():
    item = Item("function", "5", "5")
    desk, _ = desk_with(item, item)
    assert len(desk.pending) == 2


@pytest.mark.parametrize(
    "other", [Item("gsm8k", "5", "5"), Item("numeric", "55", ""), Item("numeric", "5", None), Item("numeric", "5", "5", {"a": 1})]
)
def test_what_differs_is_judged_apart(other):
    desk, _ = desk_with(Item("numeric", "5", "5"), other)
    assert len(desk.pending) == 2


def test_the_first_verdict_counts():
    desk, job = desk_with(Item("numeric", "5", "5"))
    ticket = desk.pending.popleft()
    desk.finish(ticket, RIGHT)
    desk.finish(ticket, Verdict("value", 0.0))
    desk.failed(ticket, "late")
    assert job.future.result() == [RIGHT] and not desk.fresh and desk.stats.values == 1


def test_a_fault_is_tried_once_more_and_then_an_error():
    desk, job = desk_with(Item("numeric", "5", "5"))
    ticket = desk.pending.popleft()
    desk.failed(ticket, "first")
    assert list(desk.fresh) == [ticket]
    desk.requeue([ticket])
    assert not desk.pending  # it waits for a fresh process, not for any
    desk.failed(desk.fresh.popleft(), "second")
    assert job.future.result()[0] == Verdict("error", None, "second") and desk.stats.errors == 1


def test_dying_before_it_began_is_nobodys_fault_for_a_while():
    desk, job = desk_with(Item("numeric", "5", "5"))
    ticket = desk.pending.popleft()
    for _ in range(MAX_LOST):
        desk.never_begun(ticket, "killed")
        assert ticket.tries == 0
    desk.never_begun(ticket, "killed")
    assert ticket.tries == 1 and desk.fresh.popleft() is ticket
    desk.never_begun(ticket, "killed")
    assert job.future.result()[0].status == "error"


def test_order_is_kept_when_items_come_back():
    desk, _ = desk_with(*(Item("numeric", "5", str(i)) for i in range(4)))
    taken = [desk.pending.popleft() for _ in range(3)]
    desk.requeue(taken)
    assert [t.item.response for t in desk.pending] == ["0", "1", "2", "3"]


def test_a_response_too_long_to_send_scores_0():
    _, job = desk_with(Item("numeric", "5", "5" * (MAX_RESPONSE + 1)))
    assert job.future.result()[0].reward == 0


def test_giving_up_and_the_end():
    desk, job = desk_with(Item("numeric", "5", "5"), Item("numeric", "5", "6"))
    desk.failed(desk.pending.popleft(), "x")
    desk.give_up("no process")
    assert [v.detail for v in job.future.result()] == ["no process"] * 2
    waiting = Job([Item("numeric", "1", "1")])
    desk.take(waiting)
    desk.abandon([Job([Item("numeric", "2", "2")])], "closed")
    with pytest.raises(RuntimeError, match="closed"):
        waiting.future.result()
