"""A pool of verifier processes: deadlines, hard kills, replacement, one retry.

One thread of the pool's own owns the processes, their pipes and every decision, so a blocked caller delays no deadline. What it promises:

- an item's deadline runs from the moment a process starts on it, by the monotonic clock, whatever batch it came in;
- past its deadline or its memory an item is a `timeout` (the response's making: reward 0, not tried again), and its process is killed with all its children;
- an exception, or a process that dies otherwise, is ours: the item is tried once more in a fresh process, then it is an `error` without a reward;
- the rest of a batch never suffers for one item: what it had not started goes to another process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import json
import os
import selectors
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.errors import UserError
from verifier import entry, frames
from verifier.config import VerifyConfig
from verifier.process import Process
from verifier.verdict import Verdict

BATCH_SECONDS = 0.02  # expected work in one message
BATCH_ITEMS = 256
SLOW = 0.25  # seconds on one item after which the rest of its batch is given to others
START_LIMIT = 120.0  # seconds for a process to start, or to import a verifier
START_FAILURES = 3  # processes in a row that do not come up before waiting items are given up
BATCH_CHARACTERS = 1 << 20
MAX_RESPONSE = 1 << 22  # characters; a longer response scores 0 unread
CACHE_ITEMS = 100_000
RETIRE_SHARE = 0.5  # of the memory limit: a process that has grown past it is replaced between batches


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


class _Entry:
    """An item on its way, and everyone who waits for it."""

    __slots__ = ("done", "item", "key", "targets", "tries")

    def __init__(self, item: Item, key: bytes | None) -> None:
        self.item, self.key = item, key
        self.tries = 0
        self.done = False
        self.targets: list[tuple[_Job, int]] = []


class _Job:
    """One call of `submit`."""

    __slots__ = ("future", "left", "verdicts")

    def __init__(self, n: int) -> None:
        self.verdicts: list[Verdict | None] = [None] * n
        self.left = n
        self.future: concurrent.futures.Future[list[Verdict]] = concurrent.futures.Future()


class VerifierPool:
    """`verifier_processes` processes that work, and one more that is ready to take the place of one that is killed."""

    def __init__(self, config: VerifyConfig, prewarm: Sequence[str] = ()) -> None:
        """Start the processes, with the verifiers in `prewarm` imported. Raises UserError for a name that does not exist."""
        self.config = config
        self.stats = PoolStats()
        names = list(dict.fromkeys(n for n in [*prewarm, *config.reward_weights] if n != "row"))
        for name in names:
            entry(name, config.verifier_options.get(name))
        self._hello = {"options": config.verifier_options, "prewarm": names, "memory_mb": config.verify_memory_mb, "path": [p or os.getcwd() for p in sys.path]}
        try:
            json.dumps(self._hello)
        except (TypeError, ValueError) as e:
            raise UserError(f"verifier_options = {config.verifier_options!r} must be plain values ({e}): use strings, numbers, booleans, lists and tables.") from e
        self._inbox: deque[tuple[_Job, Sequence[Item]]] = deque()
        self._pending: deque[_Entry] = deque()
        self._fresh: deque[_Entry] = deque()  # to be tried again, each by a process that has done nothing yet
        self._in_flight: dict[bytes, _Entry] = {}
        self._cache: OrderedDict[bytes, tuple[Any, ...]] = OrderedDict()
        self._mean: dict[str, float] = {}
        self._processes: list[Process] = []
        self._failures, self._next_start, self._reason = 0, 0.0, ""
        self._closing = False
        self._up: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._selector = selectors.DefaultSelector()
        self._ended = "the verifier pool is closed"
        self._wake_lock = threading.Lock()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        # The thread that starts the processes must live as long as the pool: the kernel sends the parent-death signal when *it* ends.
        self._thread = threading.Thread(target=self._serve, name="verifier-pool", daemon=True)
        self._thread.start()

    # -- callers' side ---------------------------------------------------------------------------------------------------

    def submit(self, items: Sequence[Item]) -> concurrent.futures.Future[list[Verdict]]:
        """Verdicts of `items`, in order, as a future; from any thread. Raises UserError for a verifier that does not exist."""
        for name in {i.verifier for i in items}:
            entry(name, self.config.verifier_options.get(name))
        job = _Job(len(items))
        if not items:
            job.future.set_result([])
            return job.future
        job.future.set_running_or_notify_cancel()  # a caller that goes away must not make the pool's thread fail
        self._inbox.append((job, items))
        self._wake()
        if not self._thread.is_alive():
            self._abandon()
        return job.future

    async def verify(self, items: Sequence[Item]) -> list[Verdict]:
        """Verdicts of `items`, in order."""
        return await asyncio.wrap_future(self.submit(items))

    def verify_sync(self, items: Sequence[Item]) -> list[Verdict]:
        """The same for callers without an event loop."""
        return self.submit(items).result()

    def wait_ready(self, timeout: float = START_LIMIT) -> None:
        """Return when a process is ready. Raises RuntimeError with its last words when none comes up."""
        self._up.result(timeout)

    def pids(self) -> list[int]:
        """Pids of the living processes, the spare included."""
        return [p.pid for p in list(self._processes)]

    def close(self) -> None:
        """Kill and reap every process. Waiting callers get a RuntimeError. May be called twice."""
        self._closing = True
        self._wake()
        self._thread.join()
        with self._wake_lock:
            for fd in (self._wake_r, self._wake_w):
                if fd >= 0:
                    os.close(fd)
            self._wake_r = self._wake_w = -1

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wake(self) -> None:
        with self._wake_lock, contextlib.suppress(OSError):  # it is awake already, or closed
            os.write(self._wake_w, b"x")

    def _abandon(self) -> None:
        """Tell everyone who still waits that the pool has ended."""
        jobs = {id(j): j for e in [*self._pending, *self._fresh, *self._in_flight.values()] for j, _ in e.targets}
        while self._inbox:
            job, _ = self._inbox.popleft()
            jobs[id(job)] = job
        for future in [self._up, *(j.future for j in jobs.values())]:
            if not future.done():
                future.set_exception(RuntimeError(self._ended))

    # -- the pool's thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._take_inbox()
                self._keep_staffed()
                self._dispatch()
                for key, mask in self._selector.select(self._patience()):
                    if key.data is None:
                        os.read(self._wake_r, 4096)
                    elif key.data in self._processes:
                        self._hear(key.data, key.fd, mask)
                self._watch()
        except BaseException as e:
            self._ended = f"the verifier pool broke: {type(e).__name__}: {e}"
            raise
        finally:
            self._closing = True
            for p in list(self._processes):
                self._remove(p)
            self._selector.close()
            self._abandon()

    def _take_inbox(self) -> None:
        """Queue what has been submitted; what is known is answered, what is already on its way is joined."""
        while self._inbox:
            job, items = self._inbox.popleft()
            for i, item in enumerate(items):
                if item.response is not None and len(item.response) > MAX_RESPONSE:
                    self._answer(job, i, Verdict("value", 0.0, f"longer than {MAX_RESPONSE} characters"))
                    continue
                options = self.config.verifier_options.get(item.verifier)
                key = _key(item) if entry(item.verifier, options).cached else None
                if key is not None and key in self._cache:
                    self._cache.move_to_end(key)
                    self.stats.cached += 1
                    self._answer(job, i, Verdict(*self._cache[key]))
                    continue
                known = self._in_flight.get(key) if key is not None else None
                if known is None:
                    known = _Entry(item, key)
                    self._in_flight[key if key is not None else id(known).to_bytes(8, "big")] = known
                    self._pending.append(known)
                else:
                    self.stats.cached += 1
                known.targets.append((job, i))

    def _keep_staffed(self) -> None:
        """One process more than may work at once; after failed starts, with a pause."""
        while len(self._processes) < self.config.verifier_processes + 1 and time.monotonic() >= self._next_start:
            try:
                p = Process(self._hello)
            except OSError as e:
                self._start_failed(str(e))
                return
            self.stats.started += 1
            self._processes.append(p)
            self._selector.register(p.stdout, selectors.EVENT_READ, p)
            self._selector.register(p.stderr, selectors.EVENT_READ, p)
            self._want_write(p)

    def _start_failed(self, why: str) -> None:
        self._failures += 1
        self._reason = f"no verifier process comes up: {why}"
        if self._failures < START_FAILURES:
            return
        self._next_start = time.monotonic() + min(30.0, 0.5 * 2 ** (self._failures - START_FAILURES))
        if not self._up.done():
            self._up.set_exception(RuntimeError(self._reason))
        if not any(p.ready for p in self._processes):
            for e in [*self._fresh, *self._pending]:
                self._finish(e, Verdict("error", None, self._reason))
            self._fresh.clear()
            self._pending.clear()

    def _dispatch(self) -> None:
        """Give waiting items to idle processes. A second try goes first, alone, and only to a process that has done nothing yet."""
        free = self.config.verifier_processes - sum(bool(p.batch) for p in self._processes)
        for p in self._processes:
            if free <= 0 or not (self._pending or self._fresh):
                return
            if not p.ready or p.batch:
                continue
            batch = [self._fresh.popleft()] if self._fresh and not p.served else self._next_batch(free)
            if batch:
                p.give(batch, [[e.item.verifier, e.item.gold, e.item.response, dict(e.item.meta)] for e in batch])
                self._want_write(p)
                free -= 1

    def _next_batch(self, free: int) -> list[_Entry]:
        """As many waiting items as make about BATCH_SECONDS of work, and no more than this process's share."""
        batch: list[_Entry] = []
        share = min(BATCH_ITEMS, -(-len(self._pending) // free))
        expected, characters = 0.0, 0
        while self._pending and len(batch) < share and expected < BATCH_SECONDS and characters < BATCH_CHARACTERS:
            e = self._pending.popleft()
            if e.done:
                continue
            batch.append(e)
            characters += len(e.item.response or "") + len(e.item.gold)
            expected += self._mean.get(e.item.verifier, BATCH_SECONDS / 8)
        return batch

    def _want_write(self, p: Process) -> None:
        """Listen for room in the pipe only while something waits to be written."""
        registered = p.stdin in self._selector.get_map()
        if p.unsent and not registered:
            self._selector.register(p.stdin, selectors.EVENT_WRITE, p)
        elif registered and not p.unsent:
            self._selector.unregister(p.stdin)

    def _hear(self, p: Process, fd: int, mask: int) -> None:
        if fd == p.stdin:
            p.flush()
            self._want_write(p)
        elif fd == p.stderr:
            p.listen()
        else:
            self._receive(p)

    def _receive(self, p: Process) -> None:
        """Take what it says; see it off when it has ended."""
        messages, ended = p.receive()
        try:
            for message in messages:
                self._message(p, message)
        except (IndexError, KeyError, TypeError, ValueError):
            ended = True  # not what a process of ours says
        if ended and p in self._processes:
            self._lost(p)

    def _message(self, p: Process, message: list[Any]) -> None:
        if message[0] == "ready":
            p.ready = True
            self._failures = 0
            if not self._up.done():
                self._up.set_result(None)
            return
        for index, status, reward, detail, seconds in message[1]:
            self._result(p.batch[index], status, reward, detail, seconds)
        if message[0] == "some":
            return
        batch, p.batch = p.batch, []
        if not p.recalled:
            self._requeue(e for e in batch if e not in self._fresh)
        if message[0] == "last" or message[2] > RETIRE_SHARE * 1024 * self.config.verify_memory_mb:
            self._remove(p)

    def _result(self, e: _Entry, status: str, reward: float | None, detail: str, seconds: float) -> None:
        if status == "raised":
            self._failed(e, detail, seconds)
            return
        mean = self._mean.get(e.item.verifier, seconds)
        self._mean[e.item.verifier] = mean + 0.05 * (seconds - mean)
        self._finish(e, Verdict(status, reward, detail, seconds))  # type: ignore[arg-type]

    def _failed(self, e: _Entry, why: str, seconds: float) -> None:
        """A fault of ours: once more in a fresh process, then an error."""
        e.tries += 1
        if e.done:
            return
        if e.tries > 1:
            self._finish(e, Verdict("error", None, why, seconds))
        else:
            self.stats.retries += 1
            self._fresh.append(e)

    def _requeue(self, entries: Any) -> None:
        self._pending.extendleft(reversed([e for e in entries if not e.done]))

    def _lost(self, p: Process) -> None:
        """It died and nobody asked it to: the item it was at is tried again, the others have not been touched."""
        index = p.progress()[0]
        batch, recalled, ready = p.batch, p.recalled, p.ready
        how = self._remove(p)
        self.stats.died += 1
        if not ready:
            self._start_failed(p.last_words or how)
        culprit = batch[index] if 0 <= index < len(batch) else next((e for e in batch if not e.done), None)
        if culprit is not None and not culprit.done:
            self._failed(culprit, f"the verifier process {how}", 0.0)
        if not recalled:
            self._requeue(e for e in batch if e is not culprit)

    def _remove(self, p: Process) -> str:
        """Kill, reap, forget."""
        self._processes.remove(p)
        for fd in (p.stdin, p.stdout, p.stderr):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        return p.kill()

    def _patience(self) -> float:
        """Seconds until something may have to be done though nobody says anything."""
        now, limit = time.monotonic(), 1.0 if self._failures else 60.0
        if any(not p.ready for p in self._processes):
            limit = min(limit, 1.0)
        for p in self._processes:
            if p.batch:
                index, since = p.progress()
                due = since + (self.config.verify_timeout if p.recalled or len(p.batch) == 1 else min(SLOW, self.config.verify_timeout))
                limit = min(limit, max(due - now, 0.001) if index >= 0 else SLOW)
        return limit

    def _watch(self) -> None:
        """Recall batches whose item is slow, kill what is past its deadline or never came up."""
        now = time.monotonic()
        for p in list(self._processes):
            if not p.ready:
                if now - p.born > START_LIMIT:
                    self._lost(p)
            elif p.batch:
                self._watch_batch(p, now)

    def _watch_batch(self, p: Process, now: float) -> None:
        index, since = p.progress()
        if index < 0:
            if now - max(since, p.sent) > START_LIMIT + self.config.verify_timeout:
                self._lost(p)  # stopped, or stuck in an import
            return
        if now - since > SLOW and not p.recalled and index + 1 < len(p.batch):
            p.recall(index + 1)
            self._requeue(p.batch[index + 1 :])
        if now - since <= self.config.verify_timeout:
            return
        self._receive(p)  # it may have finished just now
        if p not in self._processes or not p.batch or p.progress()[0] != index or p.batch[index].done:
            return
        batch, recalled = p.batch, p.recalled
        self._remove(p)
        self.stats.killed += 1
        self._finish(batch[index], Verdict("timeout", 0.0, f"past its deadline of {self.config.verify_timeout:g} s", now - since))
        self._requeue(batch[:index] if recalled else batch)

    def _finish(self, e: _Entry, verdict: Verdict) -> None:
        """Tell everyone who waits for the item. The first verdict counts; a second one, after a recall, changes nothing."""
        if e.done:
            return
        e.done = True
        self._in_flight.pop(e.key if e.key is not None else id(e).to_bytes(8, "big"), None)
        if e.key is not None and verdict.status == "value":
            self._cache[e.key] = (verdict.status, verdict.reward, verdict.detail, 0.0)
            if len(self._cache) > CACHE_ITEMS:
                self._cache.popitem(last=False)
        for job, i in e.targets:
            self._answer(job, i, verdict)

    def _answer(self, job: _Job, i: int, verdict: Verdict) -> None:
        if verdict.status == "value":
            self.stats.values += 1
        elif verdict.status == "timeout":
            self.stats.timeouts += 1
        else:
            self.stats.errors += 1
        job.verdicts[i] = verdict
        job.left -= 1
        if not job.left and not job.future.cancelled():
            job.future.set_result(job.verdicts)  # type: ignore[arg-type]


def _key(item: Item) -> bytes:
    """What the verdict depends on, as a digest: a cache of these does not hold the texts."""
    h = hashlib.blake2b(digest_size=16)
    parts = (item.verifier, item.gold, "\0" if item.response is None else "\1" + item.response, json.dumps(dict(item.meta), sort_keys=True, default=str) if item.meta else "")
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        h.update(len(data).to_bytes(8, "big") + data)
    return h.digest()
