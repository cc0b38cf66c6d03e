"""The pool's books: who waits for which verdict, what is known already, what is on its way. No processes and no clock in here."""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifier import entry
from verifier.verdict import Verdict

CACHE_ITEMS = 100_000
MAX_LOST = 3  # processes that may die with an item before they begin on it
MAX_RESPONSE = 1 << 22  # characters; a longer response scores 0 unread


@dataclass(frozen=True)
class Item:
    """One answer to judge. `response` None: is the gold answer usable at all? `meta`: what JSON can carry."""

    verifier: str
    gold: str
    response: str | None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class PoolStats:
    """Counts since the pool started."""

    values: int = 0
    timeouts: int = 0
    errors: int = 0
    cached: int = 0
    retries: int = 0
    started: int = 0
    killed: int = 0
    died: int = 0


class Job:
    """One caller's items, and its verdicts as they come in."""

    __slots__ = ("future", "items", "left", "verdicts")

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.verdicts: list[Verdict | None] = [None] * len(items)
        self.left = len(items)
        self.future: concurrent.futures.Future[list[Verdict]] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()  # a caller that goes away must not make the pool's thread fail


class Ticket:
    """An item on its way, and everyone who waits for it."""

    __slots__ = ("done", "item", "key", "lost", "targets", "tries")

    def __init__(self, item: Item, key: bytes | int) -> None:
        self.item, self.key = item, key
        self.tries = 0
        self.lost = 0
        self.done = False
        self.targets: list[tuple[Job, int]] = []


class Desk:
    """Takes jobs in, gives verdicts out. `pending` waits for any process, `fresh` for its second try in one that has done nothing yet."""

    def __init__(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        """`options`: settings by verifier name."""
        self.stats = PoolStats()
        self.pending: deque[Ticket] = deque()
        self.fresh: deque[Ticket] = deque()
        self._options = options
        self._serial = itertools.count()
        self._in_flight: dict[bytes | int, Ticket] = {}
        self._cache: OrderedDict[bytes | int, tuple[float | None, str]] = OrderedDict()

    def take(self, job: Job) -> None:
        """Queue a job: what is known is answered, what is already on its way is joined."""
        for i, item in enumerate(job.items):
            if item.response is not None and len(item.response) > MAX_RESPONSE:
                self._answer(job, i, Verdict("value", 0.0, f"longer than {MAX_RESPONSE} characters"))
                continue
            cached = entry(item.verifier, self._options.get(item.verifier)).cached
            key = _key(item) if cached else None
            if key is not None and key in self._cache:
                self._cache.move_to_end(key)
                self.stats.cached += 1
                self._answer(job, i, Verdict("value", *self._cache[key]))
                continue
            ticket = self._in_flight.get(key) if key is not None else None
            if ticket is None:
                ticket = Ticket(item, key or next(self._serial))
                self._in_flight[ticket.key] = ticket
                self.pending.append(ticket)
            else:
                self.stats.cached += 1
            ticket.targets.append((job, i))

    def finish(self, ticket: Ticket, verdict: Verdict) -> None:
        """Tell everyone who waits. The first verdict counts; a second one, after a recall, changes nothing."""
        if ticket.done:
            return
        ticket.done = True
        del self._in_flight[ticket.key]
        if isinstance(ticket.key, bytes) and verdict.status == "value":
            self._cache[ticket.key] = (verdict.reward, verdict.detail)
            if len(self._cache) > CACHE_ITEMS:
                self._cache.popitem(last=False)
        for job, i in ticket.targets:
            self._answer(job, i, verdict)

    def failed(self, ticket: Ticket, why: str, seconds: float = 0.0) -> None:
        """A fault of ours: once more in a fresh process, then an error."""
        if ticket.done:
            return
        ticket.tries += 1
        if ticket.tries > 1:
            self.finish(ticket, Verdict("error", None, why, seconds))
        else:
            self.stats.retries += 1
            self.fresh.append(ticket)

    def never_begun(self, ticket: Ticket, why: str) -> None:
        """Its process died before it began: nobody's fault, unless that happens again and again."""
        ticket.lost += 1
        if ticket.lost > MAX_LOST:
            self.failed(ticket, why)
        elif ticket.tries and not ticket.done:
            self.fresh.appendleft(ticket)

    def requeue(self, tickets: Iterable[Ticket]) -> None:
        """Back to the head of the queue, in order; those that are done or wait for a fresh process stay where they are."""
        self.pending.extendleft(reversed([t for t in tickets if not t.done and t not in self.fresh]))

    def give_up(self, why: str) -> None:
        """An error for all that waits for a process."""
        for ticket in [*self.fresh, *self.pending]:
            self.finish(ticket, Verdict("error", None, why))
        self.fresh.clear()
        self.pending.clear()

    def abandon(self, jobs: Iterable[Job], why: str) -> None:
        """The pool has ended: a RuntimeError for everyone who still waits."""
        waiting = {id(j): j for t in self._in_flight.values() for j, _ in t.targets} | {id(j): j for j in jobs}
        for job in waiting.values():
            if not job.future.done():
                job.future.set_exception(RuntimeError(why))

    def _answer(self, job: Job, i: int, verdict: Verdict) -> None:
        if verdict.status == "value":
            self.stats.values += 1
        elif verdict.status == "timeout":
            self.stats.timeouts += 1
        else:
            self.stats.errors += 1
        job.verdicts[i] = verdict
        job.left -= 1
        if not job.left:
            job.future.set_result(job.verdicts)  # type: ignore[arg-type]


def _key(item: Item) -> bytes:
    """What the verdict depends on, as a digest: a cache of these does not hold the texts."""
    h = hashlib.blake2b(digest_size=16)
    meta = json.dumps(dict(item.meta), sort_keys=True, default=str) if item.meta else ""
    for part in (item.verifier, item.gold, "\0" if item.response is None else "\1" + item.response, meta):
        data = part.encode("utf-8", "surrogatepass")
        h.update(len(data).to_bytes(8, "big") + data)
    return h.digest()
