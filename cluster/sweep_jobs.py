"""The runs of a sweep as Ray jobs: what is started when, followed to its end, and stopped in order.

The job server is behind the four verbs of `Jobs`, so that the schedule can be tested without Ray.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from cluster.config import RunConfig
from cluster.runfolder import LOCK, SUMMARY
from cluster.sinks import METRICS

State = Literal["running", "succeeded", "failed"]
EVERY = 1.0
"""Seconds between two looks at the jobs."""
TOLD_EVERY = 20.0
"""Seconds between two lines on a run that goes on."""


class Jobs(Protocol):
    """A job server. Jobs are named by the path of their run folder."""

    def running(self) -> Sequence[Path]:
        """Run folders of jobs that an earlier life of the sweep has started and that still run."""

    def submit(self, run_dir: Path, recipe: str, flags: Sequence[str]) -> None:
        """Start `winnow train RECIPE [flags]`, which goes on from what the run folder holds, if that is anything."""

    def state(self, run_dir: Path) -> State:
        """How the job stands."""

    def stop(self, run_dir: Path) -> None:
        """Ask it to stop, which writes a checkpoint; returns at once."""

    def log(self, run_dir: Path) -> str:
        """All that it printed."""


@dataclass(frozen=True)
class Task:
    """One run to be made. `warmup` is the folder of its warm-up's result, None without one; `flags` are those of `winnow train`."""

    name: str
    run_dir: Path
    recipe: str
    flags: tuple[str, ...]
    cpus: float
    gpus: float
    warmup: Path | None
    steps: int

    @property
    def done(self) -> bool:
        """Whether the run has been trained to its end: its summary is written last."""
        return (self.run_dir / SUMMARY).is_file()

    @property
    def begun(self) -> bool:
        """Whether an earlier life of the sweep has left something of it."""
        return self.run_dir.is_dir() and any(path.name != LOCK for path in self.run_dir.iterdir())


@dataclass(frozen=True)
class Room:
    """What the cluster has, and how many runs may go on at once at most."""

    cpus: float
    gpus: float
    at_once: int


def needs(cfg: RunConfig) -> tuple[float, float]:
    """(CPUs, GPUs) of a run. An actor on CPUs counts with its threads, which are busy: two runs on one core would time each other."""
    roll, model, verify = cfg.rollout, cfg.model, cfg.verify
    engine = roll.engine_cpus if roll.engine_gpus else max(roll.engine_cpus, roll.engine_threads)
    rank = model.learner_cpus if model.learner_gpus else max(model.learner_cpus, model.learner_threads)
    cpus = roll.engines * engine + model.learner_ranks * rank + verify.verifier_actors * verify.verifier_cpus
    return cpus, roll.engines * roll.engine_gpus + model.learner_ranks * model.learner_gpus


class Schedule:
    """Starts what there is room for, in the spec's order, until every run is done or has failed.

    Runs that share a warm-up wait for the first of them to have made it. A run too large for what there is starts when nothing else runs.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        jobs: Jobs,
        room: Room,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._jobs, self._room, self._say, self._clock, self._sleep = jobs, room, say, clock, sleep
        self._all = list(tasks)
        self._waiting = [task for task in tasks if not task.done]
        self._running: dict[Path, Task] = {}
        self._began: dict[Path, float] = {}
        self._told: dict[Path, float] = {}
        self.failed: dict[str, str] = {}
        self.stopping = False

    def run(self) -> None:
        """To the end; after `stopping` is set, until every job that runs has ended."""
        kept = len(self._all) - len(self._waiting)
        if kept:
            self._say(f"{kept} of {len(self._all)} runs are done already")
        self._adopt()
        asked = False
        while self._running or (self._waiting and not self.stopping):
            if self.stopping and not asked:
                asked = True
                self._say(f"stops what runs ({', '.join(task.name for task in self._running.values())}) once it has written a checkpoint")
                for run_dir in self._running:
                    self._jobs.stop(run_dir)
            if not self.stopping:
                self._start_more()
            self._look()
            if self._running or (self._waiting and not self.stopping):
                self._sleep(EVERY)

    def _adopt(self) -> None:
        """Jobs that outlived an earlier life of the sweep are followed, not started again."""
        there = set(self._jobs.running())
        for task in [task for task in self._waiting if task.run_dir in there]:
            self._say(f"{task.name}: runs already")
            self._follow(task)

    def _follow(self, task: Task) -> None:
        self._waiting.remove(task)
        self._running[task.run_dir] = task
        self._began[task.run_dir] = self._told[task.run_dir] = self._clock()

    def _start_more(self) -> None:
        for task in list(self._waiting):
            if len(self._running) >= self._room.at_once or not self._fits(task):
                return  # in order: a large run is not overtaken for ever
            if self._warms_up(task):
                continue
            how = "goes on" if task.begun else "starts"
            self._follow(task)
            self._jobs.submit(task.run_dir, task.recipe, task.flags)
            self._say(f"{task.name}: {how} (run {len(self._all) - len(self._waiting)} of {len(self._all)})")

    def _fits(self, task: Task) -> bool:
        if not self._running:
            return True
        cpus = task.cpus + sum(t.cpus for t in self._running.values())
        gpus = task.gpus + sum(t.gpus for t in self._running.values())
        return cpus <= self._room.cpus + 1e-6 and gpus <= self._room.gpus + 1e-6

    def _warms_up(self, task: Task) -> bool:
        """Whether another run is about to make the warm-up that this one wants."""
        wanted = task.warmup
        return wanted is not None and not (wanted / "config.json").is_file() and any(t.warmup == wanted for t in self._running.values())

    def _look(self) -> None:
        for run_dir, task in list(self._running.items()):
            state = self._jobs.state(run_dir)
            if state == "running":
                self._tell(task)
                continue
            del self._running[run_dir]
            log = self._jobs.log(run_dir)
            if task.done:
                self._say(f"{task.name}: done after {self._clock() - self._began[run_dir]:.0f} s")
            elif self.stopping:
                self._say(f"{task.name}: stopped at step {last_step(run_dir)}")
            else:
                self.failed[task.name] = why = last_words(log)
                self._say(f"{task.name}: failed: {why}")

    def _tell(self, task: Task) -> None:
        if self._clock() - self._told[task.run_dir] < TOLD_EVERY:
            return
        self._told[task.run_dir] = self._clock()
        row = last_row(task.run_dir)
        said = f"step {row['step']}/{task.steps}, reward {row.get('reward', float('nan')):.3f}" if row else "prepares"
        self._say(f"{task.name}: {said}")


def last_row(run_dir: Path) -> Mapping[str, float]:
    """The newest step of a run's metrics; nothing before the first."""
    try:
        lines = (run_dir / METRICS).read_bytes().splitlines()
    except OSError:
        return {}
    for line in reversed(lines[-2:]):  # the last may be half-written
        try:
            found: Mapping[str, float] = json.loads(line)
            return found
        except ValueError:
            continue
    return {}


def last_step(run_dir: Path) -> int:
    """The newest step of a run; 0 before the first."""
    return int(last_row(run_dir).get("step", 0))


def last_words(log: str) -> str:
    """The line of a failed run's output that says most: its own sentence, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith(("winnow: ", "the run ends: "))]
    return (own or lines or ["it printed nothing"])[-1]
