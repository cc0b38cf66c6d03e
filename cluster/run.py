"""One life of a run, from its config to its summary: prepare, start the actors, warm up, train, evaluate, export, and take all down."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Any

import ray

from cluster import checkpoint, load, placement
from cluster.config import RunConfig
from cluster.contract import check_logprobs
from cluster.display import Display
from cluster.evaluate import EvalStats, Evaluator
from cluster.health import Health, LifeLost, Restarts, RunFailed, engine_is_gone, on_ranks
from cluster.loop import Loop, StepGivenUp
from cluster.prepare import Prepared, prepare, transfer_backend, warmup_examples
from cluster.record import Recorder
from cluster.runfolder import RunFolder, write_json
from cluster.services import Maker, Services, as_coroutine, verifier_names
from cluster.weights import WeightError, WeightSync
from learner.buffer import SamplingBuffer
from learner.buffer_records import RefillError
from rollout.errors import UserError

PLACE_SECONDS = 5.0  # between two tries to place the actors of a later life
FAILED, INTERRUPTED = 1, 130  # exit codes: the run could not go on; SIGINT or SIGTERM


class Session:
    """One life of a run, from start to end or stop."""

    def __init__(self, cfg: RunConfig, folder: RunFolder, seconds_setup: float) -> None:
        self.cfg = cfg
        self.folder = folder
        self.run_dir = folder.path
        self.summary: dict[str, Any] = {}
        self.display = Display.open(cfg.log.display)
        self.record = Recorder(cfg, folder.path, self.display, seconds_setup)
        self.services: Services | None = None
        self.places: placement.Places | None = None
        self.loop: Loop | None = None
        self.work: asyncio.Task[None] | None = None
        self.tokenizer_folder = ""
        self.joining: asyncio.Future[None] | None = None
        self.engines_ready: asyncio.Future[None] | None = None
        self.stop_signal = ""
        self.newest: int | None = None  # step of the newest checkpoint that this process has loaded or written
        self.lives = 0  # ended by the loss of a learner rank
        self.restarts = Restarts(cfg.cluster.max_restarts)

    # -- life -------------------------------------------------------------------------------------------------------

    async def main(self) -> int:
        """Everything, and everything down again whatever happens; the exit code."""
        self.catch_signals()
        code = 0
        try:
            await self.live()
        except asyncio.CancelledError:
            code = INTERRUPTED
        except StepGivenUp as error:
            begins = "from its beginning, for there is no checkpoint yet"
            if self.newest is not None:
                begins = f"from the checkpoint of step {self.newest}"
            self.display.note(f"{error}: the run can go on {begins}, and what was trained since is trained again")
        except (RunFailed, RefillError, WeightError, LifeLost) as error:
            self.display.note(str(error))
            code = FAILED
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, UserError):  # found where the model lies, by the actor that loads it
                raise UserError(str(cause)) from None
            self.display.note(self.post_mortem(error))
            code = FAILED
        finally:
            await self.down()
        if self.stop_signal:
            self.display.note(f"stopped by {self.stop_signal}; go on with --resume --run_dir {self.run_dir}")
            code = INTERRUPTED
        self.display.close()
        return code

    async def live(self) -> None:
        """Train; after the loss of a learner rank, or of an actor before the loop, again from the last checkpoint and its books."""
        resume = bool(self.cfg.resume)
        while True:
            self.work = asyncio.ensure_future(self.train(resume))
            try:
                return await self.work
            except (LifeLost, ray.exceptions.RayError) as error:
                if self.stop_signal or not (isinstance(error, LifeLost) or engine_is_gone(error)):
                    raise
                self.lives += 1
                self.restarts.add("learner")
                why = str(error).strip().splitlines()[0]
                if over := self.restarts.over():
                    raise RunFailed(f"{why}; {over}; go on with --resume --run_dir {self.run_dir}") from error
                self.display.note(f"{why}: life {self.lives + 1} of the run begins at the last checkpoint, {self.restarts}")
            self.loop = None
            await self.end_life()
            if self.stop_signal:
                return
            resume = True

    def catch_signals(self) -> None:
        """SIGINT and SIGTERM are ours. Joining Ray puts its own handlers in place, so this is called after it again."""
        events = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            events.add_signal_handler(number, self.on_signal, number)

    def post_mortem(self, error: BaseException) -> str:
        """What to say when an actor died or raised; the whole of it goes to error.txt."""
        (self.run_dir / "error.txt").write_text(str(error), encoding="utf-8")
        last = str(error).strip().splitlines()[-1]
        return f"the run ends: {last} (all of it is in {self.run_dir / 'error.txt'}); go on with --resume --run_dir {self.run_dir}"

    def on_signal(self, number: int) -> None:
        """First: end in order. Second: end now."""
        again, self.stop_signal = bool(self.stop_signal), signal.Signals(number).name
        if again or self.loop is None:  # nothing is trained yet, so there is nothing to keep
            assert self.work is not None
            self.work.cancel()
            return
        self.display.note(f"{self.stop_signal}: ends or gives up the batch at work and writes a checkpoint; once more ends at once")
        self.loop.stop()

    async def end_life(self) -> None:
        """End the actors and the sinks, and give the places back."""
        if self.engines_ready is not None:
            self.engines_ready.cancel()
            await asyncio.gather(self.engines_ready, return_exceptions=True)
        self.engines_ready = None
        if self.services is not None:
            await self.services.stop()
        self.services = None
        self.record.close()
        if ray.is_initialized():
            placement.give_back(self.places)
        self.places = None

    async def down(self) -> None:
        """End everything, Ray too."""
        if self.joining is not None:
            await asyncio.gather(self.joining, return_exceptions=True)
        await self.end_life()
        placement.leave()

    # -- the phases -------------------------------------------------------------------------------------------------

    async def train(self, resume: bool) -> None:
        """The whole of it, phase after phase."""
        cfg = self.cfg
        below = None if self.newest is None else self.newest + 1  # a later one was passed over
        saved = checkpoint.newest_good(self.run_dir, self.display.note, below) if resume else None
        if not resume:
            self.describe()
        self.display.phase("preparing the model and the prompts")
        prepared = await asyncio.to_thread(prepare, cfg, self.run_dir)
        self.tokenizer_folder = prepared.tokenizer_folder
        for note in prepared.notes:
            self.display.note(note)
        if saved is None:
            self.record.open(-1 if resume else None)
        else:
            prepared.stream.load(saved.controller["stream"])  # another seed, other data: refused before anything starts or is cut off
        self.display.phase("starting the actors")
        services = await self.start(prepared)
        if saved is not None:
            saved = await checkpoint.load(services, saved, self.run_dir, self.display.note)
            self.newest = saved.step
            self.record.open(saved.step)  # not before: it cuts off what was logged after that step
            self.record.begin_live()
            self.display.note(f"resumes at step {saved.step} from {saved.folder}")
        else:
            await self.warm_up(prepared, services)
        assert self.engines_ready is not None
        await self.engines_ready
        self.display.phase("first weights into the engines")
        rejoins = transfer_backend(cfg) == "shm"
        health = Health(services, self.restarts, cfg.cluster.start_timeout, self.display.note, rejoins=rejoins)
        sync = WeightSync(services, health, transfer_backend(cfg), cfg.rollout.engines * max(1, int(cfg.rollout.engine_gpus)))
        sync.attempt = self.lives + (saved.controller["attempt"] + 1 if saved is not None else 0)
        await sync.transfer(saved.step if saved else 0)
        self.record.probe = await check_logprobs(cfg, prepared, services, self.display.note)
        await self.drive(prepared, services, sync, health, saved)

    async def start(self, prepared: Prepared) -> Services:
        """Join Ray and create the actors; learner ranks are ready on return, engines go on starting (`engines_ready`)."""
        cfg = self.cfg
        if self.joining is None:
            self.joining = asyncio.ensure_future(asyncio.to_thread(placement.join, cfg))
        try:
            await asyncio.shield(self.joining)  # Ray can be left only once it is joined
        except RuntimeError as error:
            raise RunFailed(f"{error}; make room on this machine, and give the command again with --resume auto") from error
        self.catch_signals()
        self.record.begin_live()
        self.places = await self.reserve()
        services = self.services = Maker(cfg, prepared.settings, prepared.facts, self.places, verifier_names(cfg)).all()
        self.engines_ready = asyncio.ensure_future(self.start_engines(services))
        await services.each(services.verifiers, "ready")
        for note in (await services.each(services.verifiers[:1], "notes"))[0]:
            self.display.note(note)
        address, port = await as_coroutine(services.ranks[0].address.remote())
        await self.within("learner ranks", on_ranks(services, "start", address, port))
        self.record.seconds["start_learner"] = self.record.elapsed()
        return services

    async def reserve(self) -> placement.Places:
        """Places for the actors; a later life, which may have lost a node, waits for room on the others or on one that joins."""
        limit = self.cfg.cluster.start_timeout
        deadline = time.monotonic() + limit
        while True:
            try:
                return await asyncio.to_thread(placement.reserve, self.cfg, note=self.display.note, given_up=lambda: bool(self.stop_signal))
            except UserError as error:
                if not self.lives:
                    raise
                if time.monotonic() > deadline:  # nothing that the user gave: the cluster has shrunk
                    raise RunFailed(f"{error} (waited start_timeout = {limit:g} s); resume with --run_dir {self.run_dir}") from None
                self.display.note(f"waits for a node: {error}")
            await asyncio.sleep(PLACE_SECONDS)

    async def start_engines(self, services: Services) -> None:
        """Engines load while the learner warms up."""
        started = await self.within("engines", services.each(services.engines, "start"))
        for index, (engine, pids) in enumerate(zip(started, await services.each(services.engines, "pids"), strict=True)):
            if engine["host"] == socket.gethostname():
                services.pids[index] = pids
        self.record.seconds["start_engines"] = self.record.elapsed()
        self.display.note(f"engines are ready after {self.record.elapsed():.0f} s")

    async def within(self, what: str, work: Awaitable[Any]) -> Any:
        """The work, or RunFailed when it takes longer than `start_timeout`."""
        try:
            return await asyncio.wait_for(work, self.cfg.cluster.start_timeout)
        except TimeoutError:
            limit = self.cfg.cluster.start_timeout
            raise RunFailed(f"{what} were not up within start_timeout = {limit:g} s: see Ray's logs, or raise it") from None

    async def warm_up(self, prepared: Prepared, services: Services) -> None:
        """The supervised phase, unless it is off or its result is there already."""
        steps = self.cfg.warmup.warmup_steps
        started = time.monotonic()
        if not steps or (prepared.warm_folder / "config.json").is_file():
            return
        self.display.phase(f"supervised warm-up, {steps} steps")
        examples = ray.put(await asyncio.to_thread(warmup_examples, self.cfg, prepared, self.run_dir))
        calls = asyncio.ensure_future(on_ranks(services, "warm_up", examples, self.cfg.warmup.warmup_lr))
        try:
            while not (await asyncio.wait([calls], timeout=2.0))[0]:
                step = await as_coroutine(services.ranks[0].progress.remote())
                if step is not None:
                    self.display.progress("warm-up", step.step + 1, steps)
        finally:
            calls.cancel()  # after a stop nobody asks for what comes of it, or of the ranks' end
        done = (await calls)[0]
        self.display.progress("warm-up", steps, steps)
        await on_ranks(services, "export", str(prepared.warm_folder), "float32", prepared.tokenizer_folder)
        self.record.seconds["warmup"] = time.monotonic() - started
        self.display.note(f"warm-up took {self.record.seconds['warmup']:.0f} s; its last loss is {done[-1].loss:.3f} nats a token")

    async def drive(self, prepared: Prepared, services: Services, sync: WeightSync, health: Health, saved: checkpoint.Saved | None) -> None:
        """Evaluate, loop, evaluate, export, summarise."""
        cfg, objective = self.cfg, prepared.settings.objective
        buffer = SamplingBuffer(
            cfg.buffer,
            group_size=cfg.rollout.group_size,
            filter_groups=objective.filter_groups,
            spread_tol=objective.spread_tol,
            max_staleness=cfg.rollout.max_staleness,
            attempts=cfg.rollout.attempts,
            drop_errors=cfg.verify.on_verifier_error == "drop",
            clock=time.monotonic,
            spread_per_reward=objective.reward_norm == "gdpo",
            last_batch=cfg.batches,
        )
        evaluator = Evaluator(cfg, services, health, await asyncio.to_thread(prepared.stream.heldout, cfg.eval.eval_prompts))
        loop = Loop(
            cfg,
            services,
            prepared.stream,
            buffer,
            sync,
            health,
            evaluator,
            report=lambda report: self.record.step(report, sync.attempt),
            evaluated=self.evaluated,
            checkpoint=self.save,
            stages=self.display.stages,
        )
        if saved is not None:
            self.restore(saved, loop)
        elif evaluator.prompts:
            self.display.phase("evaluating before training")
            await self.evaluated(0, await evaluator.run())
        if cfg.resume:
            self.describe()
        self.record.seconds["start"] = self.record.elapsed() - self.record.seconds.get("warmup", 0.0)
        self.loop = loop
        self.display.phase("training")
        started = time.monotonic()
        try:
            await loop.run()
        except (RunFailed, RefillError):
            try:
                await self.save()
            except RunFailed as second:
                self.display.note(str(second))
            raise
        finally:
            self.record.seconds["rl"] += time.monotonic() - started
        await self.save()
        if self.stop_signal:
            return
        export = self.run_dir / "exports" / f"step-{loop.step:06d}"
        await on_ranks(services, "export", str(export), cfg.log.export_dtype, prepared.tokenizer_folder)
        self.summary = self.record.summary(loop.step, export)
        self.folder.write_summary(self.summary)

    # -- state ------------------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """One checkpoint: the learner's shards and the books of the same moment. RunFailed where the disk is full or protected."""
        try:
            await self.write_checkpoint()
        except OSError as error:
            if isinstance(error, ray.exceptions.RayError) or error.strerror is None:
                raise
            where = self.run_dir / "checkpoints"
            raise RunFailed(f"no checkpoint can be written to {where} ({error.strerror}): make room, or get the right to write") from error

    async def write_checkpoint(self) -> None:
        """As `save` does, with the disk's own errors."""
        loop, services = self.loop, self.services
        assert loop is not None and services is not None
        step = loop.step
        place = checkpoint.begin(self.run_dir, step)
        await on_ranks(services, "save", str(place))
        refs = loop.buffer.payloads()  # of the same moment as the books, and fetched after them
        controller = {
            "attempt": loop.sync.attempt,
            "buffer": loop.buffer.state(),
            "stream": loop.stream.state(),
            "evaluation_due": loop.evaluation_due,
            "prompts": [checkpoint.prompt_json(p) for _, p in sorted(loop.generation.prompts.items())],
            "record": self.record.state(),
        }
        groups = await asyncio.to_thread(checkpoint.fetch, refs)
        await asyncio.to_thread(checkpoint.finish, self.run_dir, step, controller, groups, self.cfg.log.keep_checkpoints)
        self.newest = step

    def describe(self) -> None:
        """config.toml and versions.json: of a fresh run at once, of a resumed one when nothing can refuse it any more."""
        # To resume is a wish of this life, not of the run.
        self.folder.write_config(load.to_toml(self.cfg.model_copy(update={"resume": False})))
        self.folder.write_versions()

    def restore(self, saved: checkpoint.Saved, loop: Loop) -> None:
        """The books as they were when the checkpoint was written."""
        state = saved.controller
        loop.stream.load(state["stream"])
        loop.generation.prompts = {p["uid"]: checkpoint.prompt_from_json(p) for p in state["prompts"]}
        loop.buffer.load(state["buffer"], {uid: ray.put(group) for uid, group in saved.groups.items()})
        loop.evaluation_due = state["evaluation_due"]
        self.record.load(state["record"])

    async def evaluated(self, step: int, stats: EvalStats) -> None:
        """Note an evaluation, and keep an export of the best step when that is asked for."""
        if not self.record.evaluation(step, stats) or not self.cfg.eval.keep_best:
            return
        assert self.services is not None
        folder = self.run_dir / "exports" / "best"
        await on_ranks(self.services, "export", str(folder), self.cfg.log.export_dtype, self.tokenizer_folder)
        write_json(folder / "best.json", {"step": step, **asdict(stats)})
