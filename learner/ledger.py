"""The books: every group in exactly one state, every received token in exactly one account, and both close.

    dispatched = trained + uninformative + failed + surplus + kept + in flight     (groups)
    received   = trained + masked + uninformative + failed + surplus + lost_attempt + held     (tokens)

`in flight` is queued, generating or verifying; `held` are the tokens of groups that are kept. Both lines are asserted at
every transition. Only groups that are not yet closed are remembered one by one, so the ledger's size does not grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

FORMAT = 1
FLIGHT = ("queued", "generating", "verifying")
LIVE = (*FLIGHT, "kept")
UNINFORMATIVE = ("all_right", "all_wrong", "equal")
MASKED = ("overlong", "error", "mismatch")
CLOSED = ("trained", "uninformative", "failed", "surplus")

_MOVES: Mapping[str, frozenset[str]] = {
    "queued": frozenset({"generating", "failed", "surplus"}),
    "generating": frozenset({"queued", "verifying", "kept", "uninformative", "failed", "surplus"}),
    "verifying": frozenset({"queued", "kept", "uninformative", "failed", "surplus"}),
    "kept": frozenset({"queued", "trained", "failed", "surplus"}),
}
_TOKEN_ACCOUNTS = ("trained", *(f"masked({m})" for m in MASKED), "uninformative", "failed", "surplus", "lost_attempt")


@dataclass(frozen=True)
class BatchTokens:
    """Where the tokens of a committed batch went, as the learner reports it; groups of a skipped step are not in it."""

    trained: int = 0
    overlong: int = 0
    error: int = 0
    mismatch: int = 0

    @property
    def total(self) -> int:
        """All tokens that are accounted for."""
        return self.trained + self.overlong + self.error + self.mismatch


def state_name(state: str, detail: str = "") -> str:
    """`failed(generation)`: a state as it is written in books, tables and messages."""
    return f"{state}({detail})" if detail else state


class Ledger:
    """Groups and tokens by state. Plain counts and dictionaries: no clock, no actor, no tensor."""

    def __init__(self) -> None:
        self.dispatched = 0  # groups ever opened
        self.batches = 0  # batches committed (b)
        self.received = 0  # tokens ever received
        self.held = 0  # tokens of kept groups
        self.last_uid = -1
        self.groups: Counter[str] = Counter()  # closed groups by state_name
        self.tokens: Counter[str] = Counter()  # booked tokens by account
        self.trained_uninformative: Counter[str] = Counter()  # among trained: groups without reward spread, by kind
        self.attempts_failed: Counter[str] = Counter()  # attempts at generating or verifying a group, by reason
        self._state: dict[int, str] = {}
        self._tokens: dict[int, int] = {}
        self._live: Counter[str] = Counter()

    # -- reading ---------------------------------------------------------------------------------------------------

    def state(self, uid: int) -> str | None:
        """The state of a group that is not closed; None for one that is closed or was never dispatched."""
        return self._state.get(uid)

    def live(self, state: str) -> int:
        """Number of groups in one of the states of `LIVE`."""
        return self._live[state]

    @property
    def kept(self) -> int:
        """Groups kept and not yet committed, cut batches included."""
        return self._live["kept"]

    @property
    def in_flight(self) -> int:
        """Groups queued, generating or verifying."""
        return sum(self._live[s] for s in FLIGHT)

    def closed(self, state: str) -> int:
        """Groups that ended in `state`, whatever the detail."""
        return sum(n for name, n in self.groups.items() if name.partition("(")[0] == state)

    # -- transitions -----------------------------------------------------------------------------------------------

    def open(self, uid: int) -> None:
        """A new group, queued. Uids count dispatches and only rise, so no group can be opened twice."""
        assert uid > self.last_uid, f"group {uid} was dispatched after group {self.last_uid}"
        self.last_uid = uid
        self.dispatched += 1
        self._state[uid] = "queued"
        self._live["queued"] += 1
        self._assert_closes()

    def move(self, uid: int, state: str) -> None:
        """Between states in flight, or from kept back to queued (its data was lost: the tokens become `lost_attempt`)."""
        assert state in FLIGHT, state
        self._leave(uid, state)
        self._book("lost_attempt", self._tokens.pop(uid, 0), held=True)
        self._state[uid] = state
        self._live[state] += 1
        self._assert_closes()

    def keep(self, uid: int, tokens: int) -> None:
        """The group carries signal; its tokens are held until its batch commits."""
        self._leave(uid, "kept")
        self._state[uid] = "kept"
        self._live["kept"] += 1
        self._tokens[uid] = tokens
        self.received += tokens
        self.held += tokens
        self._assert_closes()

    def close(self, uid: int, state: str, detail: str = "", tokens: int = 0) -> None:
        """The group ends as uninformative, failed or surplus; `tokens` arrived with this very transition."""
        assert state in CLOSED and state != "trained", state
        assert state != "uninformative" or detail in UNINFORMATIVE, detail
        assert state != "failed" or detail, "a failure has a reason"
        self._leave(uid, state)
        del self._state[uid]
        self.groups[state_name(state, detail)] += 1
        self._book(state, self._tokens.pop(uid, 0), held=True)
        self.book(state, tokens)

    def commit(self, trained: Mapping[int, str], failed: Collection[int], tokens: BatchTokens) -> None:
        """A batch is over: `trained` maps uid to its kind in `UNINFORMATIVE` or ""; `failed` are groups of skipped steps.

        `tokens` must account for every token of the trained groups.
        """
        total = sum(self._tokens[uid] for uid in trained)
        assert tokens.total == total, f"the learner accounts for {tokens.total} tokens of a batch that has {total}"
        assert min(tokens.trained, tokens.overlong, tokens.error, tokens.mismatch) >= 0, tokens
        for uid in failed:
            self.close(uid, "failed", "nonfinite")
        for uid, kind in trained.items():
            self._leave(uid, "trained")
            del self._state[uid], self._tokens[uid]
            self.groups["trained"] += 1
            if kind:
                self.trained_uninformative[kind] += 1
        self._book("trained", tokens.trained, held=True)
        for name in MASKED:
            self._book(f"masked({name})", getattr(tokens, name), held=True)
        self.batches += 1
        self._assert_closes()

    def book(self, account: str, tokens: int) -> None:
        """Tokens received of a group that holds none: a late surplus answer, a lost attempt."""
        assert account in _TOKEN_ACCOUNTS and tokens >= 0, (account, tokens)
        self.received += tokens
        self._book(account, tokens)
        self._assert_closes()

    def _leave(self, uid: int, state: str) -> None:
        old = self._state[uid]
        assert state in _MOVES[old], f"group {uid} cannot go from {old} to {state}"
        self._live[old] -= 1

    def _book(self, account: str, tokens: int, held: bool = False) -> None:
        if tokens:
            self.tokens[account] += tokens
            self.held -= tokens if held else 0

    def _assert_closes(self) -> None:
        live = sum(self._live.values())
        assert live == len(self._state) and self.dispatched == sum(self.groups.values()) + live, self.check()
        assert self.received == sum(self.tokens.values()) + self.held, self.check()

    # -- checking and keeping --------------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """What is wrong with the books, one sentence each; empty when they close. Trusts no running total."""
        wrong = []
        parts = {s: self.closed(s) for s in CLOSED} | {"kept": 0, "in flight": 0}
        for state in self._state.values():
            parts["kept" if state == "kept" else "in flight"] += 1
        if (total := sum(parts.values())) != self.dispatched:
            wrong.append(f"{self.dispatched} groups were dispatched, but {' + '.join(f'{k} {n}' for k, n in parts.items())} = {total}.")
        held = sum(self._tokens.values())
        if (total := sum(self.tokens.values()) + held) != self.received:
            wrong.append(f"{self.received} tokens were received, but the accounts and the {held} held by kept groups add up to {total}.")
        known = {"trained", "surplus", *(f"uninformative({k})" for k in UNINFORMATIVE)}
        wrong += [f"{name} is not a state that a group can end in." for name in self.groups if name not in known and name[:7] != "failed("]
        wrong += [f"{name} is not an account of tokens." for name in self.tokens if name not in _TOKEN_ACCOUNTS]
        wrong += [f"{name} is no kind of a group without signal." for name in self.trained_uninformative if name not in UNINFORMATIVE]
        wrong += [f"{name} counts {n}, which is less than nothing." for name, n in self._all_counts() if n < 0]
        if (silent := sum(self.trained_uninformative.values())) > parts["trained"]:
            wrong.append(f"{silent} groups without signal are said to be among the {parts['trained']} trained.")
        trained_tokens = sum(n for name, n in self.tokens.items() if name == "trained" or name[:7] == "masked(")
        for state, n in [("trained", trained_tokens), *((s, self.tokens[s]) for s in CLOSED[1:])]:
            if n > 0 and not parts[state]:
                wrong.append(f"{n} tokens are booked as {state}, but no group is {state}.")
        if self.last_uid + 1 < self.dispatched:
            wrong.append(f"{self.dispatched} groups were dispatched, but the last one's number, counted from 0, is {self.last_uid}.")
        beyond = [uid for uid in self._state if uid > self.last_uid]
        wrong += [f"Group {uid} is {self._state[uid]}, but the last one dispatched is {self.last_uid}." for uid in beyond]
        wrong += [f"Group {uid} holds tokens, but is {self._state.get(uid)}." for uid in self._tokens if self._state.get(uid) != "kept"]
        return wrong

    def check_after(self, earlier: Ledger) -> list[str]:
        """What went backwards since `earlier`, a ledger of the same run with fewer batches; counts of what is closed only rise."""
        wrong = []
        for name, before, now in (
            ("dispatched groups", earlier.dispatched, self.dispatched),
            ("received tokens", earlier.received, self.received),
            *((f"{n} groups", c, self.groups[n]) for n, c in earlier.groups.items()),
            *((f"{n} tokens", c, self.tokens[n]) for n, c in earlier.tokens.items()),
            *((f"attempts that failed by {n}", c, self.attempts_failed[n]) for n, c in earlier.attempts_failed.items()),
        ):
            if now < before:
                wrong.append(f"Between batches {earlier.batches} and {self.batches} the {name} fell from {before} to {now}.")
        return wrong

    def _all_counts(self) -> list[tuple[str, int]]:
        single = [("dispatched", self.dispatched), ("batches", self.batches), ("received", self.received)]
        tables = (self.groups, self.tokens, self.trained_uninformative, self.attempts_failed)
        return single + [item for table in tables for item in table.items()] + [(f"held by group {u}", n) for u, n in self._tokens.items()]

    def to_json(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`; the same books give the same text."""
        return {
            "format": FORMAT,
            "batches": self.batches,
            "dispatched": self.dispatched,
            "last_uid": self.last_uid,
            "groups": _sorted(self.groups),
            "trained_uninformative": _sorted(self.trained_uninformative),
            "live": [[uid, self._state[uid], self._tokens.get(uid, 0)] for uid in sorted(self._state)],
            "received": self.received,
            "tokens": _sorted(self.tokens),
            "attempts_failed": _sorted(self.attempts_failed),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        """The ledger as it was written, unchecked (`check` does that). Raises ValueError for what is no ledger."""
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']}, and this program reads {FORMAT}")
            new = cls()
            for name in ("batches", "dispatched", "last_uid", "received"):
                setattr(new, name, _whole(data[name]))
            for name in ("groups", "tokens", "trained_uninformative", "attempts_failed"):
                getattr(new, name).update({str(k): _whole(n) for k, n in data[name].items()})
            for uid, state, tokens in data["live"]:
                if _whole(uid) in new._state or state not in LIVE:
                    raise ValueError(f"its group {uid} is listed twice or in no known state ({state})")
                new._state[uid] = state
                new._live[state] += 1
                if tokens or state == "kept":
                    new._tokens[uid] = _whole(tokens)
            new.held = sum(new._tokens.values())
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it lacks or garbles a part ({error!r})") from error
        return new


def _whole(number: Any) -> int:
    """Raises ValueError for what is no whole number: rounded, a false book might close."""
    if type(number) is not int:
        raise ValueError(f"its {number!r} is no whole number")
    return number


def _sorted(table: Mapping[str, int]) -> dict[str, int]:
    return {name: table[name] for name in sorted(table) if table[name]}
