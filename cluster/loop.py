"""The loop: one for synchronous and asynchronous training, which differ by `max_staleness` alone.

| what            | waits for                          | unblocked by                                            |
|-----------------|------------------------------------|---------------------------------------------------------|
| `dispatch`      | room under the admission rule      | a batch committed, a group dropped, a version loaded    |
| `fill`          | B kept groups, in dispatch order   | a group scored, or the refill limit                     |
| `learn`         | every learner rank                 | the batch                                               |
| `publish`       | the previous transfer              | all engines having acknowledged it                      |
| `evaluate`      | the transfer of this version       | every held-out answer scored                            |
| `checkpoint`    | the learner's shards on disk       |                                                         |

Groups follow their own way meanwhile (`_follow`): engine, verifier, buffer. Everything here runs on one thread.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any

import ray

from cluster.config import RunConfig
from cluster.evaluate import EvalStats, Evaluator
from cluster.services import Services, as_coroutine
from cluster.weights import TransferStats, WeightSync
from learner.buffer import SamplingBuffer
from learner.buffer_records import CutBatch, StepSummary
from learner.ledger import BatchTokens
from learner.records import StepStats, TrainGroup
from rollout.prompts import PromptStream
from rollout.records import Prompt, Sampling

DEADLINE_SLACK = 30.0  # seconds beyond a group's own deadline, after which its actor is taken to be stuck
STAGES_EVERY = 1.0  # seconds between two looks at what each stage does


class RunFailed(RuntimeError):
    """The run cannot go on; a checkpoint was written where there was something to keep. One sentence with the remedy."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step by what the loop did; `checkpoint` is the one written before the step began."""

    wait: float
    train: float
    publish: float
    evaluate: float
    checkpoint: float
    total: float


@dataclass(frozen=True)
class StepReport:
    """All that is known of one step."""

    step: int
    batch: CutBatch
    summary: StepSummary
    train: StepStats
    transfer: TransferStats | None
    evaluation: EvalStats | None
    times: StepTimes


class Loop:
    """Drives the services until all batches of the run are committed, the prompts end, or a stop is asked for."""

    def __init__(
        self,
        config: RunConfig,
        services: Services,
        stream: PromptStream,
        buffer: SamplingBuffer,
        sync: WeightSync,
        evaluator: Evaluator,
        *,
        report: Callable[[StepReport], None],
        evaluated: Callable[[int, EvalStats], Awaitable[None]],
        checkpoint: Callable[[], Awaitable[None]],
        stages: Callable[[dict[str, str]], None],
    ) -> None:
        self.config = config
        self.services = services
        self.stream = stream
        self.buffer = buffer
        self.sync = sync
        self.evaluator = evaluator
        self.report = report
        self.evaluated = evaluated
        self.checkpoint = checkpoint
        self.stages = stages
        self.prompts: dict[int, Prompt] = {}  # of every group that is not committed, for another attempt
        self.load = [0] * len(services.engines)  # groups at each engine
        self.sampling = Sampling(config.rollout.group_size, config.rollout.max_tokens, config.rollout.temperature, config.seed)
        self.stopping = False
        self.doing = "starts"
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._verifiers = itertools.cycle(services.verifiers)
        self._loading: asyncio.Task[TransferStats] | None = None
        self._spent: dict[str, float] = {"checkpoint": 0.0}
        self._error: BaseException | None = None

    @property
    def step(self) -> int:
        """Batches committed, which is the version of the learner's policy."""
        return self.buffer.batches

    def stop(self) -> None:
        """Ask for an end: the batch at work is finished, nothing more is begun."""
        self.stopping = True
        self._stop.set()
        self._changed.set()

    async def run(self) -> None:
        """Until the end. Raises RunFailed or RefillError when it cannot go on."""
        watch = asyncio.ensure_future(self._watch())
        try:
            while self.step < self.config.batches and not self.stopping:
                started = time.monotonic()
                batch = await self._timed("wait", self.fill())
                if batch is None:
                    break
                train = await self._timed("train", self.learn(batch))
                transfer = await self._timed("publish", self.publish())
                evaluation = await self._timed("evaluate", self.evaluate())
                self.report(StepReport(self.step, batch, self.buffer.step_summary(), train, transfer, evaluation, self._times(started)))
                await self._timed("checkpoint", self.save())  # last, so that it holds all that was said of the step
        finally:
            watch.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(watch, *self._tasks, return_exceptions=True)

    # -- generation -------------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Send as many groups as the admission rule allows, to the engine that has the fewest; those to be sent again come first."""
        again = self.buffer.requeued()
        while not self.stopping:
            uid = again[0] if again else None
            index = self._engine_for(uid)
            if index is None:
                return
            prompt = self.stream.next() if uid is None else self.prompts[uid]
            if prompt is None:
                self.buffer.exhaust()
                return
            again = again[1:]
            self.prompts[prompt.uid] = prompt
            attempt = self.buffer.dispatch(prompt.uid, index, self.sync.versions[index])
            self.load[index] += 1
            task = asyncio.ensure_future(self._follow(prompt, attempt, index))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _engine_for(self, uid: int | None) -> int | None:
        """The engine with the fewest groups among those whose version the admission rule allows."""
        for index in sorted(range(len(self.load)), key=lambda i: self.load[i]):
            if self.buffer.may_dispatch(self.sync.versions[index], uid):
                return index
        return None

    async def _follow(self, prompt: Prompt, attempt: int, index: int) -> None:
        """One group on its way: generated, verified, booked."""
        lost = 0
        try:
            receipt_ref, group_ref = self.services.engines[index].generate.options(num_returns=2).remote(prompt, attempt, self.sampling)
            receipt = await asyncio.wait_for(as_coroutine(receipt_ref), self.config.rollout.group_timeout + DEADLINE_SLACK)
            lost = receipt.tokens
            self.load[index] -= 1
            index = -1
            self.buffer.generated(prompt.uid, attempt)
            summary_ref, scored_ref = next(self._verifiers).score.options(num_returns=2).remote(group_ref)
            limit = self.config.verify.verify_timeout * (self.config.rollout.group_size + 1) + DEADLINE_SLACK
            summary = await asyncio.wait_for(as_coroutine(summary_ref), limit)
            self.buffer.scored(prompt.uid, attempt, summary, scored_ref)
        except (ray.exceptions.RayError, TimeoutError) as error:
            self.buffer.attempt_failed(prompt.uid, attempt, reason_of(error), lost)
        except Exception as error:  # our own fault: the loop ends with it, rather than waiting for this group for ever
            self._error = error
        finally:
            if index >= 0:
                self.load[index] -= 1
            self._forget(prompt.uid)
            self._changed.set()
        if self._error is None:
            self.dispatch()

    def _forget(self, uid: int) -> None:
        """Drop the prompt of a group that has ended."""
        if self.buffer.ledger.state(uid) is None:
            self.prompts.pop(uid, None)

    # -- the verbs of a step ----------------------------------------------------------------------------------------

    async def fill(self) -> CutBatch | None:
        """The next batch, or None when there is none any more. Raises RefillError under `on_refill_limit = raise`."""
        self.doing = "waits for groups"
        while not self.stopping:
            self.dispatch()
            if self._error is not None:
                raise self._error
            if budget := self.buffer.over_failure_budget():
                raise RunFailed(budget)
            if self.buffer.batch_ready():
                batch = self.buffer.cut()
                for uid, attempt, engine in batch.surplus:
                    self.services.engines[engine].cancel.remote(uid, attempt)
                return batch
            if self.buffer.finished:
                return None
            self._changed.clear()
            await self._next_change()
        return None

    async def _next_change(self) -> None:
        """A group came back, a stop was asked for, or the transfer ended (well, or with an error to raise)."""
        waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(self._changed.wait())}
        if self._loading is not None:
            waits.add(self._loading)
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits - {self._loading}:
            wait.cancel()
        if self._loading in done:
            await self._loaded()

    async def learn(self, batch: CutBatch) -> StepStats:
        """The batch through every learner rank, then into the books."""
        self.doing = "trains"
        size = self.config.rollout.group_size
        groups = (*(TrainGroup.of(s) for s in batch.summaries), *(TrainGroup.filler(-1 - i, size) for i in range(batch.fillers)))
        names = batch.summaries[0].names
        refs = dict(zip(batch.uids, batch.payloads, strict=True))
        calls = [rank.train.remote(batch.index, groups, names, refs) for rank in self.services.ranks]
        results = await asyncio.gather(*(as_coroutine(call) for call in calls))
        stats: StepStats = results[0]
        failed = set(stats.failed)
        total = sum(s.tokens for s in batch.summaries if s.uid not in failed)
        masked = {reason: stats.masked_tokens.get(reason, 0) for reason in ("overlong", "error", "mismatch")}
        self.buffer.commit(batch, BatchTokens(trained=total - sum(masked.values()), **masked), failed=failed)
        for uid in tuple(self.prompts):
            self._forget(uid)
        if stats.nonfinite_in_a_row >= self.config.optim.max_nonfinite_steps:
            raise RunFailed(
                f"{stats.nonfinite_in_a_row} optimiser steps in a row had a loss or gradient that is not finite "
                f"(max_nonfinite_steps = {self.config.optim.max_nonfinite_steps}): lower lr, or grad_clip"
            )
        return stats

    async def publish(self) -> TransferStats | None:
        """The new version on its way. Engines load it while the loop goes on; what they have loaded before is returned."""
        self.doing = "publishes weights"
        before = await self._loaded()
        started = time.monotonic()
        published = await self.sync.publish(self.step)
        self._loading = asyncio.ensure_future(self.sync.load(published, time.monotonic() - started))
        if self.config.rollout.max_staleness == 0 or self.step == self.config.batches:
            return await self._loaded()
        return before

    async def _loaded(self) -> TransferStats | None:
        """The transfer that was on its way has arrived in every engine."""
        if self._loading is None:
            return None
        loading, self._loading = self._loading, None
        return await loading

    async def evaluate(self) -> EvalStats | None:
        """Held-out accuracy of this version, when it is due."""
        every = self.config.eval.eval_every
        last = self.step >= self.config.batches
        if not self.evaluator.prompts or not (last or (every and self.step % every == 0)):
            return None
        self.doing = "evaluates"
        await self._loaded()
        stats = await self._unless_stopped(self.evaluator.run())
        if stats is not None:
            await self.evaluated(self.step, stats)
        return stats

    async def _unless_stopped(self, work: Coroutine[Any, Any, EvalStats]) -> EvalStats | None:
        """The work's result, or None when a stop was asked for before it was done."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            return task.result()
        task.cancel()
        return None

    async def save(self) -> None:
        """A checkpoint, when it is due."""
        every = self.config.log.checkpoint_every
        if every and self.step % every == 0 and self.step < self.config.batches:
            self.doing = "writes a checkpoint"
            await self.checkpoint()

    # -- what it says -----------------------------------------------------------------------------------------------

    async def _timed(self, name: str, work: Any) -> Any:
        started = time.monotonic()
        try:
            return await work
        finally:
            self._spent[name] = time.monotonic() - started

    def _times(self, started: float) -> StepTimes:
        return StepTimes(**self._spent, total=time.monotonic() - started)

    async def _watch(self) -> None:
        """Tells what each stage does and waits for."""
        while True:
            held = [asdict(w) for w in self.buffer.held()]
            count = {stage: sum(w["stage"] == stage for w in held) for stage in ("queued", "generating", "verifying")}
            self.stages(
                {
                    "engines": f"{count['generating']} groups generating, versions {', '.join(map(str, self.sync.versions))}",
                    "verifiers": f"{count['verifying']} groups verifying",
                    "buffer": str(self.buffer.waiting_for()),
                    "learner": self.doing,
                }
            )
            await asyncio.sleep(STAGES_EVERY)


def reason_of(error: BaseException) -> str:
    """A short name for what went wrong with an attempt."""
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "cause", None), TimeoutError):
        return "deadline"
    if isinstance(error, ray.exceptions.ActorError):
        return "actor_died"
    cause = getattr(error, "cause", None)
    return type(cause or error).__name__
