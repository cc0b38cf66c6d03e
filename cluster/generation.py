"""Groups on their way: sent under the admission rule, generated, verified, booked; each follows its own way.

An engine that is lost costs its groups one attempt each, and they are sent again at their places. A verifier that is
lost costs nothing: the answers are still there and go to another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import ray

from cluster.config import RunConfig
from cluster.health import DEADLINE_SLACK, Health, engine_is_gone, reason_of
from cluster.services import Services, as_coroutine
from cluster.timeline import Timeline
from cluster.weights import WeightSync
from learner.buffer import SamplingBuffer
from rollout.actor import Receipt
from rollout.prompts import PromptStream
from rollout.records import Prompt, Sampling
from verifier.records import GroupSummary


class EngineLoad:
    """Groups at each engine, and the time in which an engine had none."""

    def __init__(self, engines: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.groups = [0] * engines
        self._clock = clock
        self._since = clock()
        self._idle = 0.0

    def add(self, index: int, groups: int) -> None:
        """So many groups more, or less, at engine `index`."""
        self._book()
        self.groups[index] += groups

    def take_idle(self) -> float:
        """Seconds without a group since the last call, mean over the engines."""
        self._book()
        idle, self._idle = self._idle, 0.0
        return idle

    def _book(self) -> None:
        now = self._clock()
        self._idle += (now - self._since) * self.groups.count(0) / len(self.groups)
        self._since = now


class Sent(NamedTuple):
    """A group at an engine: the actor that was asked, which may have been replaced since, and references to receipt and group."""

    engine: Any
    receipt: Any
    group: Any


class Generation:
    """Everything in flight. `changed` is set when a group has come back; `error` is a fault of ours that ends the loop."""

    def __init__(
        self,
        config: RunConfig,
        services: Services,
        stream: PromptStream,
        buffer: SamplingBuffer,
        sync: WeightSync,
        health: Health,
        timeline: Timeline,
    ) -> None:
        self.config = config
        self.services = services
        self.stream = stream
        self.buffer = buffer
        self.sync = sync
        self.health = health
        self.timeline = timeline
        self.changed = health.changed
        self.prompts: dict[int, Prompt] = {}  # of every group that has not ended, for another attempt
        self.sampling = Sampling(config.rollout.group_size, config.rollout.max_tokens, config.rollout.temperature, config.seed)
        self.error: BaseException | None = None
        self.stopping = False
        self.load = EngineLoad(len(services.engines))
        self._last_chances: dict[int, int] = {}  # groups in their last attempt: uid -> engine
        self._draining: set[int] = set()  # engines that are given no group until they have new weights
        self._left = asyncio.Event()  # a group has left its engine
        self._tasks: set[asyncio.Task[None]] = set()

    def dispatch(self) -> None:
        """Send as many groups as the admission rule allows; those to be sent again come first."""
        for uid in () if self.stopping else self.buffer.requeued():
            index = self._engine_for(uid)
            if index is not None:
                self._send(self.prompts[uid], index)
        while not self.stopping:
            index = self._engine_for(None)
            if index is None:
                return
            prompt = self.stream.next()
            if prompt is None:
                self.buffer.exhaust()
                return
            self._send(prompt, index)

    def _send(self, prompt: Prompt, index: int) -> None:
        self.prompts[prompt.uid] = prompt
        if self.buffer.last_chance(prompt.uid):
            self._last_chances[prompt.uid] = index
        attempt = self.buffer.dispatch(prompt.uid, index, self.sync.versions[index])
        self.load.add(index, 1)
        self.timeline.begin("engines", (prompt.uid, attempt))
        # Sent here, so that the engine has begun with the first group while the last of a batch is still drawn.
        engine = self.services.engines[index]
        sent = Sent(engine, *engine.generate.options(num_returns=2).remote(prompt, attempt, self.sampling))
        task = asyncio.ensure_future(self._follow(prompt, attempt, index, sent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _engine_for(self, uid: int | None) -> int | None:
        """The engine with the fewest groups among those that live and whose version the admission rule allows.

        No two groups have their last attempt on one engine at a time: a prompt that crashes every engine ends no other group.
        """
        taken = set(self._last_chances.values()) if uid is not None and self.buffer.last_chance(uid) else set()
        for index in sorted(set(self.health.alive()) - self._draining - taken, key=lambda i: self.load.groups[i]):
            if self.buffer.may_dispatch(self.sync.versions[index], uid):
                return index
        return None

    async def _follow(self, prompt: Prompt, attempt: int, index: int, sent: Sent) -> None:
        """One group on its way."""
        tokens = 0
        try:
            receipt = await self._receipt(prompt.uid, attempt, index, sent)
            tokens = receipt.tokens
            self.buffer.generated(prompt.uid, attempt)
            summary, scored = await self._verify(sent.group, prompt.uid, attempt)
            self.timeline.worked("verifiers", summary.seconds_verify)
            self.buffer.scored(prompt.uid, attempt, summary, scored)
        except (ray.exceptions.RayError, TimeoutError) as error:
            self.buffer.attempt_failed(prompt.uid, attempt, reason_of(error), tokens)
        except Exception as error:  # our own fault: the loop ends with it, rather than waiting for this group for ever
            self.error = error
        finally:
            self.forget()
            self.changed.set()
        if self.error is None:
            self.dispatch()

    async def _receipt(self, uid: int, attempt: int, index: int, sent: Sent) -> Receipt:
        """The receipt, once the group is there. An engine that is gone, or does not keep its own deadline, is replaced."""
        limit = self.config.rollout.group_timeout + DEADLINE_SLACK
        seconds = None
        try:
            receipt: Receipt = await asyncio.wait_for(as_coroutine(sent.receipt), limit)
            seconds = receipt.seconds
            return receipt
        except ray.exceptions.RayError as error:  # first: an actor's own TimeoutError is one of these and a TimeoutError
            if engine_is_gone(error):
                self.health.engine_lost(index, sent.engine, reason_of(error))
            raise
        except TimeoutError:
            self.health.engine_lost(index, sent.engine, f"no answer within {limit:g} s")
            raise
        finally:
            self.timeline.end("engines", (uid, attempt), seconds)
            self.load.add(index, -1)
            self._last_chances.pop(uid, None)
            self._left.set()

    @asynccontextmanager
    async def drained(self, index: int) -> AsyncIterator[float]:
        """The engine is idle inside, and is sent nothing; gives the seconds that its groups took to end, each within its deadline."""
        started = time.monotonic()
        self._draining.add(index)
        try:
            while self.load.groups[index]:
                self._left.clear()
                await self._left.wait()
            yield time.monotonic() - started
        finally:
            self._draining.discard(index)
            self.changed.set()

    async def _verify(self, group: Any, uid: int, attempt: int) -> tuple[GroupSummary, Any]:
        """The summary, and a reference to the scored group; another verifier is asked when one is lost."""
        limit = self.config.verify.verify_timeout * (self.config.rollout.group_size + 1) + DEADLINE_SLACK
        for chance in range(self.config.rollout.attempts):
            last = chance == self.config.rollout.attempts - 1
            index = await self.health.verifier()
            actor = self.services.verifiers[index]
            self.buffer.at_verifier(uid, attempt, index)
            summary, scored = actor.score.options(num_returns=2).remote(group)
            try:
                return await asyncio.wait_for(as_coroutine(summary), limit), scored
            except ray.exceptions.RayActorError as error:
                self.health.verifier_lost(actor, reason_of(error))
                if last:
                    raise
            except ray.exceptions.RayError:
                raise
            except TimeoutError:
                self.health.verifier_lost(actor, f"no verdict within {limit:g} s")
                if last:
                    raise
        raise AssertionError("attempts is positive")

    def forget(self) -> None:
        """Drop the prompts of groups that have ended."""
        for uid in tuple(self.prompts):
            if self.buffer.ledger.state(uid) is None:
                del self.prompts[uid]

    def cancel(self, surplus: tuple[tuple[int, int, int], ...]) -> None:
        """End groups that will never train, where they still run: (uid, attempt, engine)."""
        for uid, attempt, engine in surplus:
            self.services.engines[engine].cancel.remote(uid, attempt)

    async def close(self) -> None:
        """Follow no group any more, and send none."""
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
