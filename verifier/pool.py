"""A pool of verifier processes: deadlines, hard kills, replacement, one retry.

One thread of the pool's own owns the processes, their pipes and every decision, so a blocked caller delays no deadline. What it promises:

- an item's deadline runs from the moment a process starts on it, by the monotonic clock, whatever batch it came in;
- past its deadline or its memory an item is a `timeout` (the response's making: reward 0, not tried again), and its process is killed with
  all its children;
- an exception, or a process that dies otherwise, is ours: the item is tried once more in a fresh process, then it is an `error` and has
  no reward;
- the rest of a batch never suffers for one item: what had not been started goes to another process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rollout.errors import UserError
from verifier import entry
from verifier.config import VerifyConfig
from verifier.desk import Desk, Item, Job, PoolStats, Ticket
from verifier.frames import LOADING
from verifier.process import Process
from verifier.verdict import Verdict

__all__ = ["Item", "PoolStats", "VerifierPool"]

BATCH_SECONDS = 0.02  # expected work in one message
BATCH_ITEMS = 256
BATCH_CHARACTERS = 1 << 20
SLOW = 0.25  # seconds on one item after which the rest of its batch is given to others
START_LIMIT = 120.0  # seconds for a process to start, or to import a verifier
STALL_LIMIT = 20.0  # seconds that a process may take to begin on a batch
START_FAILURES = 3  # processes in a row that do not come up before waiting items are given up
RETIRE_SHARE = 0.5  # of the memory limit: a process that has grown past it is replaced between batches


class VerifierPool:
    """`verifier_processes` processes that work, and one more that is ready to take the place of one that is killed."""

    def __init__(self, config: VerifyConfig, prewarm: Sequence[str] = ()) -> None:
        """Start the processes, with the verifiers in `prewarm` imported. Raises UserError for a name that does not exist."""
        self.config = config
        names = list(dict.fromkeys(n for n in [*prewarm, *config.reward_weights] if n != "row"))
        for name in names:
            entry(name, config.verifier_options.get(name))
        self._hello = {
            "options": config.verifier_options,
            "prewarm": names,
            "memory_mb": config.verify_memory_mb,
            "path": [p or os.getcwd() for p in sys.path],
        }
        try:
            json.dumps(self._hello)
        except (TypeError, ValueError) as e:
            raise UserError(f"verifier_options = {config.verifier_options!r} has something that is no plain value ({e}): remove it.") from e
        self.notes: list[str] = []  # what the verifiers say of this machine, such as the sandbox that holds; known once ready
        self._desk = Desk(config.verifier_options)
        self._inbox: deque[Job] = deque()
        self._mean: dict[str, float] = {}  # seconds per item, by verifier
        self._processes: list[Process] = []
        self._failures, self._next_start = 0, 0.0
        self._closing, self._ended = False, "the verifier pool is closed"
        self._up: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._selector = selectors.DefaultSelector()
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
        job = Job(items)
        if not items:
            job.future.set_result([])
            return job.future
        self._inbox.append(job)
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

    @property
    def stats(self) -> PoolStats:
        """Counts since the start."""
        return self._desk.stats

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
        jobs = []
        while self._inbox:
            jobs.append(self._inbox.popleft())
        self._desk.abandon(jobs, self._ended)
        if not self._up.done():
            self._up.set_exception(RuntimeError(self._ended))

    # -- the pool's thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                while self._inbox:
                    self._desk.take(self._inbox.popleft())
                self._keep_staffed()
                self._dispatch()
                for key, _ in self._selector.select(self._patience()):
                    if key.data is None:
                        os.read(self._wake_r, 4096)
                    elif key.data in self._processes:
                        self._hear(key.data, key.fd)
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
        if self._failures < START_FAILURES:
            return
        reason = f"no verifier process comes up: {why}"
        self._next_start = time.monotonic() + min(30.0, 0.5 * 2 ** (self._failures - START_FAILURES))
        if not self._up.done():
            self._up.set_exception(RuntimeError(reason))
        if not any(p.ready for p in self._processes):
            self._desk.give_up(reason)

    def _dispatch(self) -> None:
        """Give waiting items to idle processes. A second try goes first, alone, and only to a process that has done nothing yet."""
        desk = self._desk
        free = self.config.verifier_processes - sum(bool(p.batch) for p in self._processes)
        for p in self._processes:
            if free <= 0 or not (desk.pending or desk.fresh):
                return
            if not p.ready or p.batch:
                continue
            batch = [desk.fresh.popleft()] if desk.fresh and not p.served else self._next_batch(free)
            if batch:
                p.give(batch, [[t.item.verifier, t.item.gold, t.item.response, dict(t.item.meta)] for t in batch])
                self._want_write(p)
                free -= 1

    def _next_batch(self, free: int) -> list[Ticket]:
        """As many waiting items as make about BATCH_SECONDS of work, and no more than this process's share."""
        pending = self._desk.pending
        batch: list[Ticket] = []
        share = min(BATCH_ITEMS, -(-len(pending) // free))
        expected, characters = 0.0, 0
        while pending and len(batch) < share and expected < BATCH_SECONDS and characters < BATCH_CHARACTERS:
            ticket = pending.popleft()
            if ticket.done:
                continue
            batch.append(ticket)
            characters += len(ticket.item.response or "") + len(ticket.item.gold)
            expected += self._mean.get(ticket.item.verifier, BATCH_SECONDS / 8)
        return batch

    def _want_write(self, p: Process) -> None:
        """Listen for room in the pipe only while something waits to be written."""
        registered = p.stdin in self._selector.get_map()
        if p.unsent and not registered:
            self._selector.register(p.stdin, selectors.EVENT_WRITE, p)
        elif registered and not p.unsent:
            self._selector.unregister(p.stdin)

    def _hear(self, p: Process, fd: int) -> None:
        if fd == p.stdin:
            p.flush()
            self._want_write(p)
        elif fd == p.stderr:
            if not p.listen():
                self._selector.unregister(fd)
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
            self.notes = [str(n)[:500] for n in message[1]]
            self._failures = 0
            if not self._up.done():
                self._up.set_result(None)
            return
        for index, status, reward, detail, seconds in message[1]:
            ticket = p.batch[index]
            if status == "raised":
                self._desk.failed(ticket, detail, seconds)
                continue
            mean = self._mean.get(ticket.item.verifier, seconds)
            self._mean[ticket.item.verifier] = mean + 0.05 * (seconds - mean)
            self._desk.finish(ticket, Verdict(status, reward, detail, seconds))
        if message[0] == "some":
            return
        batch, p.batch = p.batch, []
        if not p.recalled:
            self._desk.requeue(batch)
        if message[0] == "last" or message[2] > RETIRE_SHARE * 1024 * self.config.verify_memory_mb:
            self._remove(p)

    def _lost(self, p: Process) -> None:
        """It died and nobody asked it to: the item it was at is tried again, the others have not been touched."""
        index = p.progress()[0]
        batch, recalled, ready = p.batch, p.recalled, p.ready
        how = self._remove(p)
        self.stats.died += 1
        if not ready:
            self._start_failed(p.last_words or how)
        left = [t for t in batch if not t.done]
        if 0 <= index < len(batch) or (left and index == LOADING):
            self._desk.failed(batch[index] if index >= 0 else left[0], f"the verifier process {how}")
        elif left:
            self._desk.never_begun(left[0], f"the verifier process {how}")
        if not recalled:
            self._desk.requeue(batch)

    def _remove(self, p: Process) -> str:
        """Kill, reap, forget; how it had ended, in words."""
        self._processes.remove(p)
        for fd in (p.stdin, p.stdout, p.stderr):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        return p.kill()

    def _patience(self) -> float:
        """Seconds until something may have to be done though nobody says anything."""
        now = time.monotonic()
        limit = 60.0 if not self._failures and all(p.ready for p in self._processes) else 0.5
        for p in self._processes:
            if p.batch:
                index, since = p.progress()
                alone = p.recalled or len(p.batch) == 1
                due = since + (self.config.verify_timeout if alone else min(SLOW, self.config.verify_timeout))
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
        if index < 0:  # it has not begun, or is importing a verifier
            if now - max(since, p.sent) > (START_LIMIT if index == LOADING else STALL_LIMIT):
                self._lost(p)
            return
        if now - since > SLOW and not p.recalled and index + 1 < len(p.batch):
            p.recall(index + 1)
            self._desk.requeue(p.batch[index + 1 :])
        if now - since <= self.config.verify_timeout:
            return
        self._receive(p)  # it may have finished just now
        if p not in self._processes or not p.batch or p.progress()[0] != index or p.batch[index].done:
            return
        batch, recalled = p.batch, p.recalled
        self._remove(p)
        self.stats.killed += 1
        self._desk.finish(batch[index], Verdict("timeout", 0.0, f"past its deadline of {self.config.verify_timeout:g} s", now - since))
        self._desk.requeue(batch[:index] if recalled else batch)
