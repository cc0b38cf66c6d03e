"""The books: transitions, closing, persistence, and what `check` says of tampered ones.

Does not cover: which transition the buffer makes when (tests/learner/test_buffer.py) and the printed tables (tests/cluster/test_ledger.py).
"""

from __future__ import annotations

import copy
import json
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from learner.ledger import UNINFORMATIVE, BatchTokens, Ledger


def worked_example() -> Ledger:
    """Eight groups, one in every state: the numbers below are counted by hand."""
    ledger = Ledger()
    for uid in range(8):
        ledger.open(uid)
        ledger.move(uid, "generating")
    ledger.keep(0, 100)
    ledger.keep(1, 50)
    ledger.close(2, "uninformative", "all_right", 30)
    ledger.close(3, "failed", "verifier_error", 7)
    ledger.book("lost_attempt", 5)
    ledger.move(4, "queued")
    ledger.move(5, "verifying")
    ledger.close(6, "surplus", tokens=11)
    ledger.keep(7, 13)
    ledger.commit({0: "", 1: "all_wrong"}, [], BatchTokens(trained=120, overlong=20, error=3, mismatch=7))
    return ledger


def test_worked_example() -> None:
    ledger = worked_example()
    assert ledger.groups == {"trained": 2, "uninformative(all_right)": 1, "failed(verifier_error)": 1, "surplus": 1}
    assert (ledger.dispatched, ledger.kept, ledger.in_flight, ledger.live("queued"), ledger.batches) == (8, 1, 2, 1, 1)
    assert ledger.tokens == {
        "trained": 120, "masked(overlong)": 20, "masked(error)": 3, "masked(mismatch)": 7,
        "uninformative": 30, "failed": 7, "surplus": 11, "lost_attempt": 5,
    }  # fmt: skip
    assert (ledger.received, ledger.held) == (100 + 50 + 30 + 7 + 5 + 11 + 13, 13)
    assert ledger.trained_uninformative == {"all_wrong": 1}
    assert ledger.closed("failed") == 1 and ledger.state(4) == "queued" and ledger.state(0) is None
    assert ledger.check() == []


def test_groups_of_a_skipped_step_fail_with_their_tokens() -> None:
    ledger = Ledger()
    for uid, tokens in enumerate((10, 20)):
        ledger.open(uid)
        ledger.move(uid, "generating")
        ledger.keep(uid, tokens)
    ledger.commit({1: ""}, [0], BatchTokens(trained=20))
    assert ledger.groups == {"trained": 1, "failed(nonfinite)": 1}
    assert ledger.tokens == {"trained": 20, "failed": 10}


def test_lost_data_of_a_kept_group_becomes_a_lost_attempt() -> None:
    ledger = Ledger()
    ledger.open(3)
    ledger.move(3, "generating")
    ledger.keep(3, 40)
    ledger.move(3, "queued")
    assert (ledger.state(3), ledger.held, ledger.tokens, ledger.received) == ("queued", 0, {"lost_attempt": 40}, 40)


def test_illegal_transitions_are_refused() -> None:
    ledger = worked_example()
    with pytest.raises(AssertionError, match="dispatched after"):
        ledger.open(7)
    with pytest.raises(KeyError):
        ledger.close(0, "surplus")  # trained already
    with pytest.raises(AssertionError, match="cannot go from queued to kept"):
        ledger.keep(4, 1)
    with pytest.raises(AssertionError, match="cannot go from kept to generating"):
        ledger.move(7, "generating")
    with pytest.raises(AssertionError, match="accounts for 12 tokens of a batch that has 13"):
        ledger.commit({7: ""}, [], BatchTokens(trained=12))
    assert ledger.check() == [], "a refused transition changes nothing"


def test_json_round_trip_is_exact() -> None:
    ledger = worked_example()
    text = json.dumps(ledger.to_json())
    again = Ledger.from_json(json.loads(text))
    assert json.dumps(again.to_json()) == text
    again.move(4, "generating")
    again.keep(4, 2)
    assert again.held == 15 and again.check() == []


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("dispatched",), 9, "9 groups were dispatched, but trained 2"),
        (("groups", "trained"), 3, "8 groups were dispatched"),
        (("tokens", "trained"), 119, "216 tokens were received, but the accounts and the 13 held by kept groups add up to 215"),
        (("received",), 222, "222 tokens were received"),
        (("groups",), {"trained": 2, "lost": 3}, "lost is not a state"),
        (("tokens",), {"trained": 204}, "held by kept groups add up to 217"),
        (("trained_uninformative",), {"equal": 3}, "3 groups without signal"),
        (("groups",), {"trained": 4, "surplus": 1}, "30 tokens are booked as uninformative, but no group is uninformative"),
        (("last_uid",), 5, "Group 7 is kept, but the last one dispatched is 5"),
        (("live",), [[4, "queued", 13], [5, "verifying", 0], [7, "kept", 0]], "Group 4 holds tokens, but is queued"),
        (("attempts_failed",), {"deadline": -1}, "deadline counts -1"),
    ],
)
def test_check_names_what_does_not_close(path: tuple[str, ...], value: object, says: str) -> None:
    data = copy.deepcopy(worked_example().to_json())
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    wrong = Ledger.from_json(data).check()
    assert any(says in sentence for sentence in wrong), wrong


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.pop("live"),
        lambda d: d.update(format=2),
        lambda d: d["live"].append([7, "kept", 0]),
        lambda d: d["live"].append([9, "lost", 0]),
        lambda d: d.update(received="many"),
        lambda d: d.update(groups=[1]),
    ],
)
def test_what_is_no_ledger_is_refused(spoil) -> None:
    data = copy.deepcopy(worked_example().to_json())
    spoil(data)
    with pytest.raises(ValueError):
        Ledger.from_json(data)


def test_closed_counts_only_rise() -> None:
    before, after = worked_example(), worked_example()
    assert after.check_after(before) == []
    after.groups["surplus"] -= 1
    after.tokens["uninformative"] -= 1
    assert [s.split("the ")[1] for s in after.check_after(before)] == [
        "surplus groups fell from 1 to 0.",
        "uninformative tokens fell from 30 to 29.",
    ]


class LedgerMachine(RuleBasedStateMachine):
    """Any legal sequence of transitions against a model that knows only uids, states and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.state: dict[int, str] = {}
        self.tokens: dict[int, int] = {}
        self.ended: dict[int, str] = {}
        self.accounts: Counter[str] = Counter()
        self.next = 0

    def pick(self, data: st.DataObject, *states: str) -> int | None:
        uids = [u for u, s in self.state.items() if s in states]
        return data.draw(st.sampled_from(uids)) if uids else None

    @rule(gap=st.integers(1, 3))
    def open(self, gap: int) -> None:
        self.next += gap
        self.ledger.open(self.next)
        self.state[self.next] = "queued"

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        if (uid := self.pick(data, "queued", "generating", "verifying", "kept")) is None:
            return
        to = {"queued": "generating", "generating": data.draw(st.sampled_from(["queued", "verifying"]))}.get(self.state[uid], "queued")
        self.ledger.move(uid, to)
        self.accounts["lost_attempt"] += self.tokens.pop(uid, 0)
        self.state[uid] = to

    @rule(data=st.data(), tokens=st.integers(0, 9))
    def keep(self, data: st.DataObject, tokens: int) -> None:
        if (uid := self.pick(data, "generating", "verifying")) is not None:
            self.ledger.keep(uid, tokens)
            self.state[uid], self.tokens[uid] = "kept", tokens

    @rule(data=st.data(), tokens=st.integers(0, 9))
    def drop(self, data: st.DataObject, tokens: int) -> None:
        if (uid := self.pick(data, "generating", "verifying")) is not None:
            state, details = data.draw(st.sampled_from([("uninformative", UNINFORMATIVE), ("failed", ("generation",)), ("surplus", ("",))]))
            self.ledger.close(uid, state, data.draw(st.sampled_from(details)), tokens)
            self.end(uid, state, tokens)

    @rule(data=st.data(), failed=st.booleans(), masked=st.integers(0, 5))
    @precondition(lambda self: "kept" in self.state.values())
    def commit(self, data: st.DataObject, failed: bool, masked: int) -> None:
        uids = [u for u, s in self.state.items() if s == "kept"]
        lost = uids[:1] if failed else []
        rest = [u for u in uids if u not in lost]
        total = sum(self.tokens[u] for u in rest)
        masked = min(masked, total)
        self.ledger.commit({u: "" for u in rest}, lost, BatchTokens(trained=total - masked, error=masked))
        for uid in lost:
            self.end(uid, "failed", self.tokens.pop(uid))
        for uid in rest:
            self.end(uid, "trained", 0)
            del self.tokens[uid]
        self.accounts["trained"] += total - masked
        self.accounts["masked(error)"] += masked

    @rule()
    def reload(self) -> None:
        self.ledger = Ledger.from_json(json.loads(json.dumps(self.ledger.to_json())))

    def end(self, uid: int, state: str, tokens: int) -> None:
        del self.state[uid]
        self.ended[uid] = state
        self.accounts[state] += tokens

    @invariant()
    def closes(self) -> None:
        ledger = self.ledger
        assert ledger.check() == []
        assert ledger.dispatched == len(self.state) + len(self.ended)
        for state, n in Counter(self.ended.values()).items():
            assert ledger.closed(state) == n
        assert +ledger.tokens == +self.accounts
        assert ledger.held == sum(self.tokens.values())
        assert all(ledger.state(u) == s for u, s in self.state.items()) and all(ledger.state(u) is None for u in self.ended)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
