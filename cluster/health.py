"""Actors that die or hang: noticed by whoever waits for them, put away hard, made again, and counted against a budget.

An engine that is made again is `absent` from the weight sync until the loop has given it the present weights, so it is
sent nothing before. Verifiers have no state and serve at once. Learner ranks are not replaced one by one: their death
ends this life of the run, and the next begins at the last checkpoint (`cluster.run`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray

from cluster.services import Services, as_coroutine

HEAR_OUT_SECONDS = 15.0
DEADLINE_SLACK = 30.0  # seconds beyond a deadline of an actor's own, after which the actor is taken to hang
DEAD_ENGINE = ("EngineDeadError", "EngineGenerateError")
"""What vLLM raises, in an actor that lives, when its own core is gone."""


class RunFailed(RuntimeError):
    """The run cannot go on; a checkpoint is written where there is something to keep. One sentence with the remedy."""


class LifeLost(RuntimeError):
    """What was lost cannot be made again by itself (a learner rank, its data): the run goes back to its last checkpoint."""


class Health:
    """Which engines can be used, and how an actor is replaced. `changed` is set whenever there is something new to use."""

    def __init__(self, services: Services, budget: int, start_timeout: float, note: Callable[[str], None], *, rejoins: bool = True) -> None:
        """`budget` counts restarts. `rejoins`: whether an engine alone can join the weight transfer again (over shm)."""
        self.services = services
        self.rejoins = rejoins
        self.budget = budget
        self.start_timeout = start_timeout
        self.changed = asyncio.Event()
        self.note = note
        self.absent: set[int] = set()  # engines without the present weights
        self.started: set[int] = set()  # those of them that wait for nothing else
        self.restarts: Counter[str] = Counter()
        self.failure: RunFailed | LifeLost | None = None  # what the loop must end with
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def alive(self) -> list[int]:
        """Engines that can be given work."""
        return [i for i in range(len(self.services.engines)) if i not in self.absent]

    def engine_lost(self, index: int, actor: Any, why: str) -> None:
        """The engine is replaced; said by several who waited for it, it is done once."""
        if self._closed or self.services.engines[index] is not actor or index in self.absent and not self.rejoins:
            return
        self._count("engine", index, why)
        self.absent.add(index)
        self.started.discard(index)
        self.services.pids.pop(index, None)
        put_away(actor)
        if not self.rejoins:
            self.failure = self.failure or LifeLost(f"engine {index} is lost ({why}), and its transfer group with it")
        if self.failure is None:
            self.services.engines[index] = self.services.maker.engine(index)
            task = asyncio.ensure_future(self._start(index, self.services.engines[index]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self.changed.set()

    async def _start(self, index: int, actor: Any) -> None:
        try:
            await asyncio.wait_for(as_coroutine(actor.start.remote()), self.start_timeout)
        except (ray.exceptions.RayError, TimeoutError) as error:
            self.engine_lost(index, actor, f"it did not start ({type(error).__name__})")
            return
        self.started.add(index)
        self.changed.set()

    def verifier_lost(self, actor: Any, why: str) -> None:
        """The verifier is replaced, once."""
        if self._closed or actor not in self.services.verifiers:
            return
        index = self.services.verifiers.index(actor)
        self._count("verifier", index, why)
        put_away(actor)
        self.services.verifiers[index] = self.services.maker.verifier(index)
        self.changed.set()

    def joined(self, index: int, actor: Any) -> None:
        """The engine has the present weights."""
        if self.services.engines[index] is not actor or index not in self.absent:
            return
        self.absent.discard(index)
        self.started.discard(index)
        self.note(f"engine {index} is back")
        self.changed.set()

    def _count(self, kind: str, index: int, why: str) -> None:
        self.restarts[kind] += 1
        self.note(f"{kind} {index} is lost ({why}) and made again, restart {sum(self.restarts.values())} of {self.budget}")
        if sum(self.restarts.values()) > self.budget:
            lost = ", ".join(f"{name} {n}" for name, n in sorted(self.restarts.items()))
            limit = f"max_restarts = {self.budget}"
            self.failure = RunFailed(f"more actors were lost than {limit} allows ({lost}): see Ray's logs, or raise it")

    def close(self) -> None:
        """Wait for no engine any more, and replace none."""
        self._closed = True
        for task in self._tasks:
            task.cancel()


def put_away(actor: Any) -> None:
    """Kill an actor that may be dead, or hang."""
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor)


def engine_is_gone(error: BaseException) -> bool:
    """Whether an error of a call says that the engine, and not this request, is at fault."""
    if isinstance(error, ray.exceptions.RayActorError):
        return True
    return type(getattr(error, "cause", None)).__name__ in DEAD_ENGINE


def reason_of(error: BaseException) -> str:
    """A short name for what went wrong with an attempt."""
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "cause", None), TimeoutError):
        return "deadline"
    if isinstance(error, ray.exceptions.RayActorError):
        return "actor_died"
    return type(getattr(error, "cause", None) or error).__name__


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
            if isinstance(error, ray.exceptions.RayActorError) or isinstance(getattr(error, "cause", None), ray.exceptions.ObjectLostError):
                raise LifeLost(f"a learner rank is lost in {method} ({reason_of(error)})") from error
        if errors:
            raise errors[0]
        return [call.result() for call in calls]
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
