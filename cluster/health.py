"""Actors that die or hang: noticed by whoever waits for them, put away hard, made again, and counted against a budget.

An engine that is made again is `absent` from the weight sync until the loop has given it the present weights, so it is
sent nothing before; a verifier has no state and serves as soon as it is up. An actor whose node is gone waits for a place:
Ray puts it where there is room, or on the next node that joins. Learner ranks are not replaced one by one: their death ends
this life of the run, and the next begins at the last checkpoint (`cluster.run`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import ray

from cluster.services import Services, as_coroutine
from rollout.engine_errors import EngineDeadError, EngineError

HEAR_OUT_SECONDS = 15.0
DEADLINE_SLACK = 30.0  # seconds beyond a deadline of an actor's own, after which the actor is taken to hang
LOOK_SECONDS = 5.0  # between two looks at whether an actor that starts has a place
NODE_SECONDS = 10.0  # after the loss of an actor, in which that of its node is known
GONE = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError)  # an actor, or what it gave, is lost with its process or node


class RunFailed(RuntimeError):
    """The run cannot go on; a checkpoint is written where there is something to keep. One sentence with the remedy."""


class LifeLost(RuntimeError):
    """What was lost cannot be made again by itself (a learner rank, its data): the run goes back to its last checkpoint."""


class Restarts:
    """What was made again in the whole run, over all lives of this process, against `max_restarts`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.counts: Counter[str] = Counter()

    def add(self, kind: str) -> None:
        """One actor, or the learner, is made again."""
        self.counts[kind] += 1

    def __str__(self) -> str:
        return f"restart {self.counts.total()} of {self.limit}"

    def over(self) -> str:
        """A sentence when there were more than the limit, else ""."""
        if self.counts.total() <= self.limit:
            return ""
        lost = ", ".join(f"{name} {n}" for name, n in sorted(self.counts.items()))
        return f"more actors were lost than max_restarts = {self.limit} allows ({lost}): see Ray's logs, or raise it"


class Health:
    """Which engines and verifiers can be used, and how one is replaced. `changed` is set whenever there is something new to use."""

    def __init__(
        self, services: Services, restarts: Restarts, start_timeout: float, note: Callable[[str], None], *, rejoins: bool = True
    ) -> None:
        """`rejoins`: whether an engine alone can join the weight transfer again (over shm)."""
        self.services = services
        self.rejoins = rejoins
        self.restarts = restarts
        self.start_timeout = start_timeout
        self.changed = asyncio.Event()
        self.note = note
        self.absent: set[int] = set()  # engines without the present weights
        self.started: set[int] = set()  # those of them that wait for nothing else
        self.absent_verifiers: set[int] = set()
        self.failure: BaseException | None = None  # what the loop must end with
        self._turn = itertools.count()
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def alive(self) -> list[int]:
        """Engines that can be given work."""
        return [i for i in range(len(self.services.engines)) if i not in self.absent]

    async def verifier(self) -> int:
        """The index of a verifier that can be given work, each in turn; waits for one when there is none."""
        while True:
            there = [i for i in range(len(self.services.verifiers)) if i not in self.absent_verifiers]
            if there:
                return there[next(self._turn) % len(there)]
            if self.failure is not None:
                raise self.failure
            await asyncio.sleep(0.1)

    def engine_lost(self, index: int, actor: Any, why: str, *, again: bool = False) -> None:
        """The engine is replaced; said by several who waited for it, it is done once. `again`: as part of a loss that is counted."""
        if self._closed or self.services.engines[index] is not actor or index in self.absent and not self.rejoins:
            return
        if not again:
            self._count("engine", index, why)
        self.absent.add(index)
        self.started.discard(index)
        self.services.pids.pop(index, None)
        put_away(actor)
        if not self.rejoins:
            self.failure = self.failure or LifeLost(f"engine {index} is lost ({why}), and its transfer group with it")
        if self.failure is None:
            self.services.engines[index] = self.services.maker.engine(index)
            self._follow(self._engine_back(index, self.services.engines[index]))
        self.changed.set()

    def verifier_lost(self, actor: Any, why: str, *, again: bool = False) -> None:
        """The verifier is replaced, once. `again`: as part of a loss that is counted."""
        if self._closed or actor not in self.services.verifiers:
            return
        index = self.services.verifiers.index(actor)
        if not again:
            self._count("verifier", index, why)
        self.absent_verifiers.add(index)
        put_away(actor)
        if self.failure is None:
            self.services.verifiers[index] = self.services.maker.verifier(index)
            self._follow(self._verifier_back(index, self.services.verifiers[index]))
        self.changed.set()

    def _follow(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._followed)

    def _followed(self, task: asyncio.Task[None]) -> None:
        """A fault of ours on the way ends the loop, which would wait for this actor for ever."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = self.failure or error
            self.changed.set()

    async def _engine_back(self, index: int, actor: Any) -> None:
        why, again = await self._up("engine", index, actor.start.remote())
        if why:
            self.engine_lost(index, actor, why, again=again)
            return
        self.started.add(index)
        self.changed.set()

    async def _verifier_back(self, index: int, actor: Any) -> None:
        why, again = await self._up("verifier", index, actor.ready.remote())
        if why:
            self.verifier_lost(actor, why, again=again)
            return
        self.absent_verifiers.discard(index)
        self.note(f"verifier {index} is back")
        self.changed.set()

    async def _up(self, kind: str, index: int, call: Any) -> tuple[str, bool]:
        """Why an actor did not start, "" when it has; and whether that is because its node went, whose loss is counted already.

        Time without a place is no time of its start, and is said: an actor without one is waited for while another of its kind
        works, else for `start_timeout`. An actor may be missed before its node is, and is then made again on the lost node.
        """
        task = asyncio.ensure_future(as_coroutine(call))
        spent = {True: 0.0, False: 0.0}  # seconds with a place, and without
        node = await self._node(kind, index)
        try:
            while not (await asyncio.wait([task], timeout=LOOK_SECONDS))[0]:
                now = await self._node(kind, index)
                node = now or node
                if not now and not spent[False]:
                    self.note(f"{kind} {index} waits for a place: its node is lost and no other has room; it starts on a node that joins")
                spent[bool(now)] += LOOK_SECONDS
                if spent[True] >= self.start_timeout:
                    return f"it did not start within start_timeout = {self.start_timeout:g} s", False
                others = self.alive() if kind == "engine" else len(self.services.verifiers) - len(self.absent_verifiers)
                if spent[False] >= self.start_timeout and not others:
                    why = f"no node has had room for {kind} {index} for start_timeout = {self.start_timeout:g} s and no other is left"
                    self.failure = self.failure or RunFailed(f"{why}: add a node, and go on with --resume")
                    return why, False
            task.result()
        except ray.exceptions.RayError as error:
            return f"it did not start ({type(error).__name__})", await self._left(kind, index, node)
        finally:
            task.cancel()
        return "", False

    async def _node(self, kind: str, index: int) -> str:
        return await asyncio.to_thread(self.services.maker.places.node, kind, index)

    async def _left(self, kind: str, index: int, node: str) -> bool:
        """Whether the place of an actor has left `node` ("": it had none), which is lost then; that is known a while after the actor is."""
        deadline = time.monotonic() + NODE_SECONDS
        while node:
            if await self._node(kind, index) != node:
                return True
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        return False

    def joined(self, index: int, actor: Any) -> None:
        """The engine has the present weights."""
        if self.services.engines[index] is not actor or index not in self.absent:
            return
        self.absent.discard(index)
        self.started.discard(index)
        self.note(f"engine {index} is back")
        self.changed.set()

    def _count(self, kind: str, index: int, why: str) -> None:
        self.restarts.add(kind)
        self.note(f"{kind} {index} is lost ({why}) and made again, {self.restarts}")
        if over := self.restarts.over():
            self.failure = self.failure or RunFailed(over)

    def close(self) -> None:
        """Wait for no actor any more, and replace none."""
        self._closed = True
        for task in self._tasks:
            task.cancel()


def put_away(actor: Any) -> None:
    """Kill an actor that may be dead, or hang."""
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor)


def engine_is_gone(error: BaseException) -> bool:
    """Whether an error of a call says that the engine, and not this request, is at fault: its result may be lost with its node."""
    if isinstance(error, GONE):
        return True
    return isinstance(getattr(error, "cause", None), EngineDeadError)


def reason_of(error: BaseException) -> str:
    """A short name for what went wrong with an attempt."""
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "cause", None), TimeoutError):
        return "deadline"
    if isinstance(error, ray.exceptions.RayActorError):
        return "actor_died"
    if isinstance(error, ray.exceptions.ObjectLostError):
        return "data_lost"
    cause = getattr(error, "cause", None) or error
    return cause.kind if isinstance(cause, EngineError) else type(cause).__name__


async def on_ranks(services: Services, method: str, *args: Any) -> list[Any]:
    """A collective call on all learner ranks. Raises LifeLost when a rank or its data is gone.

    The ranks that live see a broken connection, often before the death of the other is known: so they are heard out first.
    """
    calls = [asyncio.ensure_future(as_coroutine(getattr(rank, method).remote(*args))) for rank in services.ranks]
    try:
        done, rest = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if rest:
            done |= (await asyncio.wait(rest, timeout=HEAR_OUT_SECONDS))[0]
        errors = [e for call in calls if call in done and (e := call.exception()) is not None]
        for error in errors:
            if isinstance(error, GONE) or isinstance(getattr(error, "cause", None), ray.exceptions.ObjectLostError):
                raise LifeLost(f"a learner rank is lost in {method} ({reason_of(error)})") from error
        if errors:
            raise errors[0]
        return [call.result() for call in calls]
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
