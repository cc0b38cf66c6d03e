"""Faults done to a training: a signal to a process, then the wait for normal work, then a look at the books."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.nodes import Cluster
from tests.chaos.processes import by_role, kill
from tests.chaos.schedule import Fault
from tests.chaos.training import Training

RECOVERY_SECONDS = 300.0  # after which a fault counts as not survived
RUN_SECONDS = 40 * 60.0
POLL = 0.2

# CPUs that Ray counts; they put one engine and one verifier on the extra node, and all else on the head.
HEAD_CPUS, NODE_CPUS = 11, 3
PROCESSES = 2  # verifier processes that may work at once; a pool has one more
FLAGS = [
    "arithmetic", "--engines", "2", "--engine_cpus", "2", "--learner_ranks", "2", "--learner_cpus", "4", "--verifier_actors", "2",
    "--verifier_cpus", "1", "--verifier_processes", str(PROCESSES), "--batch_size", "16", "--max_staleness", "1",
    "--kv_cache_gb", "0.25", "--max_restarts", "100", "--display", "plain", "--wandb", "off",
    "--autoscaling", "true",  # a controller that is started again while a node is away waits for it
]  # fmt: skip
# The deterministic engine and coin flips for rewards: the faults without the learning, for a machine that has no minutes to spare.
FAKE = [
    "--engine", "fake", "--sources", '[{"task": "addition", "verifier": "random"}]',
    "--eval_sources", '[{"task": "addition", "verifier": "numeric"}]', "--eval_prompts", "16", "--warmup_steps", "0", "--tiny_layers", "2",
]  # fmt: skip
ROLES = {"engine_core": 2, "generator": 2, "verifier": 2, "verifier_process": 2 * (PROCESSES + 1), "learner": 2}


# What a fault of a kind takes away, by role; of the kinds that are not here, everything.
TAKES = {
    "verifier_process": ("verifier_process",),
    "verifier": ("verifier", "verifier_process"),
    "engine_core": ("engine_core", "generator"),
    "generator": ("engine_core", "generator"),
}


@dataclass
class Blow:
    """A fault that came: when, at which step, whom it hit, and the seconds until the run worked normally again.

    That is until the first step which is completed after all that the fault took away was back. `whole` is when it was.
    """

    fault: Fault
    at: float
    step: int
    victim: str
    whole: float = 0.0
    recovery: float = -1.0
    problems: list[str] = field(default_factory=list)


class Storm:
    """A disturbed run: the cluster, the training, and what has been done to them."""

    def __init__(self, cluster: Cluster, training: Training, mark: str) -> None:
        self.cluster, self.training, self.mark = cluster, training, mark
        self.began = time.monotonic()
        self.limit = RUN_SECONDS
        self.blows: list[Blow] = []
        self.calm_since = 0.0  # when the last fault was recovered from

    def run(self, faults: Sequence[Fault]) -> None:
        """All faults, and the end of the training. Raises RuntimeError when the run does not survive them."""
        self.training.start()
        for fault in faults:
            while not self.due(fault):
                self.check_time(f"{fault.kind} is awaited")
                self.watch()
            self.strike(fault)
        while self.training.code is None:
            self.check_time("the training goes on")
            self.watch()
        self.training.end()
        if self.training.code:
            raise RuntimeError(f"the training ended with exit code {self.training.code}")

    def due(self, fault: Fault) -> bool:
        """At its step; before that, `delay` seconds after the run works normally again. The first fault waits for its step."""
        calm = bool(self.blows) and not self.open() and time.monotonic() - self.calm_since >= fault.delay
        return self.training.step >= fault.step or calm

    def open(self) -> list[Blow]:
        """Faults that the run has not recovered from."""
        return [b for b in self.blows if b.recovery < 0]

    def check_time(self, what: str) -> None:
        """Raises RuntimeError when the training has ended too early, or badly, or takes too long."""
        if self.training.code is not None and (self.training.code or "awaited" in what):
            raise RuntimeError(f"the training ended with exit code {self.training.code} while {what}")
        if time.monotonic() - self.began > self.limit:
            raise RuntimeError(f"{self.limit:.0f} s have passed and {what}")
        for blow in self.open():
            if time.monotonic() - blow.at > RECOVERY_SECONDS:
                raise RuntimeError(f"{RECOVERY_SECONDS:.0f} s after {blow.fault.kind} the run does not work normally: {self.missing()}")

    def watch(self) -> None:
        """One look at what is back, and a short rest. After a recovery the books are checked."""
        time.sleep(POLL)
        if (code := self.cluster.node_ended()) is not None:  # as a cluster's operator does
            words = self.cluster.last_words()
            self.say(f"  node {self.cluster.nodes} has ended by itself (exit code {code}) and is started again: {words}")
            self.cluster.start_node()
        here = by_role(self.mark) if self.open() else {}
        for blow in self.open():
            if blow.whole and self.training.stepped > blow.whole:
                self.calm_since = time.monotonic()
                blow.recovery = self.training.stepped - blow.at
                blow.problems = self.training.problems()
                books = "; ".join(blow.problems) or "the ledger closes"
                self.say(f"  {blow.fault.kind}: normal work after {blow.recovery:.1f} s, at step {self.training.step}; {books}")
            elif not self.training.staffed(here, TAKES.get(blow.fault.kind)):
                blow.whole = 0.0
            elif not blow.whole:
                blow.whole = time.monotonic()

    # -- faults -----------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        """Do it. What is started again after a pause (a node, the controller) is, within."""
        at, step = time.monotonic(), self.training.step
        if fault.kind == "node":
            gone = self.cluster.kill_node()
            victim = f"node {self.cluster.nodes} with {len(gone)} processes"
            time.sleep(fault.pause)
            self.cluster.start_node()
        elif fault.kind in ("controller", "checkpoint"):
            self.training.kill()
            victim = "the controller"
            if fault.kind == "checkpoint":
                victim += f" and {self.cut_checkpoint(fault)}"
            time.sleep(fault.pause)
            self.training.start(resume=True)
        else:
            victim = self.kill_one(fault)
        self.blows.append(Blow(fault, at, step, victim))
        self.say(f"fault {len(self.blows)}: {fault.kind} at step {step}: {victim}")

    def kill_one(self, fault: Fault) -> str:
        """SIGKILL to one process of a role; of a verifier's processes, to every one."""
        while not (found := by_role(self.mark)[fault.kind]):
            self.check_time(f"a process is awaited for {fault.kind}")
            self.watch()
        chosen = found if fault.kind == "verifier_process" else [found[int(fault.choice * len(found))]]
        kill(chosen)
        return "process " + ", ".join(map(str, chosen))

    def cut_checkpoint(self, fault: Fault) -> str:
        """Cut a file of the newest checkpoint short, as a full disk would."""
        folders = sorted((self.training.run_dir / "checkpoints").glob("step-*"))
        if len(folders) < 2:
            return "no checkpoint, since there are fewer than two"
        files = sorted(p for p in folders[-1].rglob("*") if p.is_file() and p.stat().st_size > 100)
        file = files[int(fault.choice * len(files))]
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        return f"half of {file.relative_to(self.training.run_dir)}"

    def missing(self) -> str:
        """Which services are not there."""
        here = {role: len(pids) for role, pids in by_role(self.mark).items()}
        return f"lost: {sorted(self.training.missing)}, processes {here}, expected {self.training.roles}"

    def say(self, text: str) -> None:
        """A line with the seconds since the start."""
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", flush=True)
