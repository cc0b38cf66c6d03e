"""The loop: one for synchronous and asynchronous training, which differ by `max_staleness` alone.

| what            | waits for                          | unblocked by                                            |
|-----------------|------------------------------------|---------------------------------------------------------|
| `dispatch`      | room under the admission rule      | a batch committed, a group dropped, a version loaded    |
| `rejoin`        | an engine that was made again      | its start, and the present weights                      |
| `fill`          | B kept groups, in dispatch order   | a group scored, or the refill limit                     |
| `fetch`         | the batch's tokens in the ranks    | tokens lost with a node being generated again (`fill`)  |
| `learn`         | every learner rank                 | the batch                                               |
| `publish`       | the previous transfer              | all engines having acknowledged it                      |
| `evaluate`      | the transfer of this version       | every held-out answer scored                            |
| `checkpoint`    | the learner's shards on disk       |                                                         |

Groups follow their own way meanwhile (`cluster.generation`): engine, verifier, buffer. Everything here runs on one thread.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import asdict
from typing import Any

from cluster.config import RunConfig
from cluster.evaluate import EvalStats, Evaluator
from cluster.generation import Generation
from cluster.health import Health, RunFailed, on_ranks, put_away
from cluster.loop_records import PromptTotals, StepReport, StepTimes
from cluster.services import Services
from cluster.timeline import Timeline
from cluster.watchdog import Watchdog
from cluster.weights import TransferStats, WeightSync, together
from learner.abandon import Abandoned
from learner.buffer import SamplingBuffer
from learner.buffer_records import CutBatch
from learner.ledger import BatchTokens
from learner.records import Fetched, StepStats, TrainGroup
from rollout.prompts import PromptStream
from rollout.weights import WeightManifest

WAITS = "waits for groups"
STAGES_EVERY = 1.0  # seconds between two looks at what each stage does
STOP_GRACE = 5.0  # seconds that a step may still take once a stop was asked for


class StepGivenUp(RuntimeError):
    """A stop was asked for, and the learner could neither end its step nor leave it unchanged in time: it must not be saved."""


class Loop:
    """Drives the services until all batches of the run are committed, the prompts end, or a stop is asked for."""

    def __init__(
        self,
        config: RunConfig,
        services: Services,
        stream: PromptStream,
        buffer: SamplingBuffer,
        sync: WeightSync,
        health: Health,
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
        self.health = health
        evaluator.revive = self.revive
        self.timeline = Timeline()
        self.generation = Generation(config, services, stream, buffer, sync, health, self.timeline)
        if config.rollout.weight_update == "drained":
            sync.drained = self.generation.drained
        if config.rollout.max_staleness:  # the loop may be training, and no group under way whose end would send the next
            sync.ready = self.generation.dispatch
        self.doing, self._since = "starts", time.monotonic()
        self.watchdog = Watchdog(config.cluster.watchdog_seconds, health.note)
        self.evaluation_due = False
        self._epoch = 0
        self._evaluated = 0  # the step that was evaluated last
        self._changed = health.changed
        self._stop = asyncio.Event()
        self._reviving = asyncio.Lock()
        self._loading: asyncio.Task[TransferStats] | None = None
        self._arrived: list[TransferStats] = []  # transfers that are in every engine and that no step has reported yet
        self._spent: dict[str, float] = {"checkpoint": 0.0}

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stop.is_set()

    @property
    def step(self) -> int:
        """Batches committed, which is the version of the learner's policy."""
        return self.buffer.batches

    def stop(self) -> None:
        """Ask for an end: the batch at work is finished or given up, nothing more is begun."""
        self.generation.stopping = True
        self._stop.set()
        self._changed.set()

    async def run(self) -> None:
        """Until the end. Raises RunFailed or RefillError when it cannot go on."""
        watch = asyncio.ensure_future(self._watch())
        self.timeline.cut()  # what came before is not the loop's
        try:
            if self.evaluation_due:
                await self.evaluate_now()
            while self.step < self.config.batches and not self.stopping:
                started = time.monotonic()
                self.generation.load.take_idle()
                batch = await self._timed("wait", self.fill())
                if batch is None:
                    await self._prompts_ended()
                    break
                train = await self._timed("train", self.learn(batch))
                if train is None:
                    break
                await self._timed("publish", self.publish())
                self._spent["engines_idle"] = self.generation.load.take_idle()
                evaluation = await self._timed("evaluate", self.evaluate())
                summary = self.buffer.step_summary()
                self.stream.note(summary.results)
                times, use, totals = self._times(started), self.timeline.cut(), self._prompt_totals()
                transfers, self._arrived = together(self._arrived), []
                books = copy.deepcopy(self.buffer.ledger)
                self.generation.dispatch()  # engines work while the step is written down
                self.report(StepReport(self.step, batch, summary, train, transfers, evaluation, times, totals, use, books))
                await self._timed("checkpoint", self.save())  # last, so that it holds all that was said of the step
        finally:
            self.health.close()
            await self.generation.close()
            ends = [watch, *([self._loading] if self._loading is not None else [])]
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    # -- the verbs of a step ----------------------------------------------------------------------------------------

    async def fill(self) -> CutBatch | None:
        """The next batch, or None when there is none any more. Raises RefillError under `on_refill_limit = raise`."""
        self._begin(WAITS)
        while not self.stopping:
            self._changed.clear()  # before anything is looked at, so that no change is missed
            await self.rejoin()
            self.generation.dispatch()
            if self.generation.error is not None:
                raise self.generation.error
            if self.health.failure is not None:
                raise self.health.failure
            if over := self.buffer.over_failure_budget():
                raise RunFailed(over)
            if self.buffer.batch_ready():
                batch = self.buffer.cut()
                self.generation.cancel(batch.surplus)
                if await self.fetch(batch):
                    return batch
                continue
            if self.buffer.finished:
                return None
            await self._next_change()
        return None

    async def fetch(self, batch: CutBatch) -> bool:
        """The batch into the learner ranks; False when some are lost: these groups are generated again at their places."""
        size = self.config.rollout.group_size
        groups = (*map(TrainGroup.of, batch.summaries), *(TrainGroup.filler(-1 - i, size) for i in range(batch.fillers)))
        refs = dict(zip(batch.uids, batch.payloads, strict=True))
        found: list[Fetched] = await on_ranks(self.services, "fetch", batch.index, groups, batch.summaries[0].names, refs)
        self.timeline.worked("learner", max(f.seconds for f in found))
        lost = sorted({uid for f in found for uid in f.lost})
        for uid in lost:
            self.buffer.payload_lost(uid)
        if lost:
            self.health.note(f"the data of {len(lost)} kept groups are lost with their node (the first is {lost[0]}): generated again")
        return not lost

    async def rejoin(self) -> None:
        """Engines that were made again get the present weights, between two transfers and while no rank trains."""
        started = self.health.started & self.health.absent
        if started:
            await self._loaded()
            await self.sync.transfer(self.step, only=sorted(started))

    async def revive(self) -> None:
        """Returns when there is an engine with the present weights."""
        async with self._reviving:
            while not self.health.alive():
                if self.health.failure is not None:
                    raise self.health.failure
                await self.rejoin()
                await asyncio.sleep(0.2)

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

    async def turn(self) -> None:
        """Where engine and learner share a device, engines sleep from here to the load of the next weights."""
        if self.config.rollout.colocate:
            self._begin("waits for engines to sleep")
            await self.sync.sleep()

    async def learn(self, batch: CutBatch) -> StepStats | None:
        """The fetched batch through every learner rank and into the books; None when it was given up for a stop, and comes again later."""
        await self.turn()
        self._begin("trains")
        stats = await self._ended_or_given_up(on_ranks(self.services, "train"))
        if stats is None:
            return None
        self.timeline.worked("learner", stats.seconds.get("total", 0.0))
        failed = set(stats.failed)
        total = sum(s.tokens for s in batch.summaries if s.uid not in failed)
        masked = {reason: stats.masked_tokens.get(reason, 0) for reason in ("overlong", "error", "mismatch")}
        self._epoch = max(self.generation.prompts[uid].epoch for uid in batch.uids) + 1
        self.buffer.commit(batch, BatchTokens(trained=total - sum(masked.values()), **masked), failed=failed)
        self.generation.forget()
        if stats.nonfinite_in_a_row >= self.config.optim.max_nonfinite_steps:
            raise RunFailed(
                f"{stats.nonfinite_in_a_row} optimiser steps in a row had a loss or gradient that is not finite "
                f"(max_nonfinite_steps = {self.config.optim.max_nonfinite_steps}): lower lr, or grad_clip"
            )
        return stats

    async def _ended_or_given_up(self, work: Coroutine[Any, Any, list[StepStats]]) -> StepStats | None:
        """The step's statistics. After a stop it may end within `STOP_GRACE`, or leave the learner unchanged (None), else StepGivenUp."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                for rank in self.services.ranks:
                    rank.abandon.remote()
                await asyncio.wait((task,), timeout=STOP_GRACE)
            if not task.done():
                for rank in self.services.ranks:
                    put_away(rank)
                raise StepGivenUp(f"step {self.step + 1} had not ended {STOP_GRACE:g} s after the stop, and is given up")
            return task.result()[0]
        except Abandoned:
            return None
        finally:
            stop.cancel()
            task.cancel()

    async def publish(self) -> None:
        """The new version on its way. Engines load it while the loop goes on, but for the last version and without staleness."""
        self._begin("publishes weights")
        await self._loaded()
        started = time.monotonic()
        with self.timeline.during("transfer"):
            published = await self.sync.publish(self.step)
        self._loading = asyncio.ensure_future(self._load(published, time.monotonic() - started))
        if self.config.rollout.max_staleness == 0 or self.step == self.config.batches:
            await self._loaded()

    async def _load(self, published: WeightManifest | TransferStats, seconds_publish: float) -> TransferStats:
        with self.timeline.during("transfer"):
            return await self.sync.load(published, seconds_publish)

    async def _loaded(self) -> None:
        """The transfer that was on its way has arrived in every engine."""
        if self._loading is not None:
            loading, self._loading = self._loading, None
            self._arrived.append(await loading)

    async def evaluate(self) -> EvalStats | None:
        """Held-out accuracy of this version, when it is due."""
        every = self.config.eval.eval_every
        last = self.step >= self.config.batches
        if not self.evaluator.prompts or not (last or (every and self.step % every == 0)):
            return None
        return await self.evaluate_now()

    async def _prompts_ended(self) -> None:
        """No batch came: if that is not for a stop, this version is the last, and is evaluated."""
        if self.stopping:
            return
        self.health.note(f"every prompt is retired or too long: the run ends after {self.step} of {self.config.batches} batches")
        if self.evaluator.prompts and self._evaluated != self.step:
            await self.evaluate_now()

    async def evaluate_now(self) -> EvalStats | None:
        """Held-out accuracy of this version; after a stop in the middle it is due again when the run goes on."""
        self._begin("evaluates")
        self.evaluation_due = True
        await self._loaded()
        with self.timeline.during("engines"):
            stats = await self._unless_stopped(self.evaluator.run())
        if stats is not None:
            self.evaluation_due = False
            self._evaluated = self.step
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
            self._begin("writes a checkpoint")
            with self.timeline.during("learner"):
                await self.checkpoint()

    def _begin(self, doing: str) -> None:
        self.doing, self._since = doing, time.monotonic()

    # -- what it says -----------------------------------------------------------------------------------------------

    async def _timed(self, name: str, work: Any) -> Any:
        started = time.monotonic()
        try:
            return await work
        finally:
            self._spent[name] = time.monotonic() - started

    def _prompt_totals(self) -> PromptTotals:
        sources = self.stream.stats()
        return PromptTotals(self._epoch, sum(s.retired for s in sources), sum(s.overlong for s in sources))

    def _times(self, started: float) -> StepTimes:
        return StepTimes(**self._spent, total=time.monotonic() - started)

    def _look(self) -> None:
        """Show the watchdog what is waited for."""
        waiting, step = self.buffer.waiting_for(), self.step + 1
        if self.doing == WAITS and waiting.stage != "nothing":
            what: Hashable = (waiting.stage, waiting.uid, waiting.attempt)
            self.watchdog.look(what, f"step {step} waits: {waiting}", waiting.seconds)
            return
        seconds, versions = time.monotonic() - self._since, ", ".join(map(str, self.sync.versions))
        self.watchdog.look((self.doing, step), f"the loop {self.doing}, for {seconds:.1f} s; engines have versions {versions}", seconds)

    async def _watch(self) -> None:
        """Tells what each stage does and waits for."""
        while True:
            self._look()
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
