"""`make soak`: a long training under a few faults. Memory of every process stays flat, open files do not grow, the ledger closes.

    python -m tests.chaos.soak [--minutes 30] [--seed 0] [--out runs]

Prints, by role, the steepest process after its warm-up, and the run folder last, with `soak.json` and every sample (`memory.csv`) in
it; exit code 1 when something grows, the books do not close or a process is left. Does not cover: GPU memory, and growth slower than
a MiB a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.memory import Growth, Sampler, growth
from tests.chaos.nodes import Cluster
from tests.chaos.processes import end_in_order, kill, left_behind, marked
from tests.chaos.schedule import schedule
from tests.chaos.storm import FLAGS, HEAD_CPUS, NODE_CPUS, POLL, ROLES, Storm
from tests.chaos.training import Training

FAULTS = {"verifier_process": 2, "verifier": 1, "engine_core": 1, "generator": 1, "learner": 1}
INTERRUPTED = 130
# A rate at which answers stay as long as they are: a policy that learns answers longer, and memory that follows its work is no leak.
SLOW = ["--lr", "1e-7", "--lr_schedule", "constant", "--steps", "1000000", "--on_refill_limit", "short", "--checkpoint_every", "20"]


def soak(storm: Storm, sampler: Sampler, minutes: float, seed: int) -> int:
    """Train for so long under evenly spread faults; the exit code of the training, which is stopped at the end."""
    training = storm.training
    training.start()
    while training.step < 1:
        storm.check_time("the first step is awaited")
        time.sleep(POLL)
    started = storm.began = time.monotonic()  # from here on it counts
    sampler.start()
    faults = schedule(seed, 0, FAULTS)
    for i, fault in enumerate(faults):
        while time.monotonic() - started < (i + 1) * minutes * 60 / (len(faults) + 1):
            storm.check_time(f"{fault.kind} is awaited")
            storm.watch()
        storm.strike(fault)
    while time.monotonic() - started < minutes * 60:
        storm.check_time("the end is awaited")
        storm.watch()
    sampler.stop()
    return training.stop(120.0)


def steepest(found: Sequence[Growth]) -> dict[str, Growth]:
    """Of each role the process that grew most."""
    worst: dict[str, Growth] = {}
    for one in found:
        worst.setdefault(one.role, one)
    return dict(sorted(worst.items()))


def report(found: Sequence[Growth]) -> None:
    """A line for each role."""
    for role, one in steepest(found).items():
        mark = "" if all(g.flat for g in found if g.role == role) else "   GROWS"
        text = f"{one.size:7.0f} MiB {one.slope:+7.2f} MiB/min over {one.minutes:4.1f} min, {one.files:+d} files"
        print(f"  {role:<17}{text}{mark}")


def run(minutes: float, seed: int, out: Path) -> dict[str, Any]:
    """The whole of it; what was written to soak.json."""
    mark = uuid.uuid4().hex
    run_dir = out / f"soak-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    cluster = Cluster(mark, HEAD_CPUS, NODE_CPUS)
    sampler, why, orphans = Sampler(mark), "", []
    flags = [*FLAGS, *SLOW, "--seed", str(seed), "--ray_address", cluster.address]
    storm = Storm(cluster, Training(run_dir, flags, cluster.environment, ROLES), mark)
    storm.limit = 60 * minutes + 600
    try:
        code = soak(storm, sampler, minutes, seed)
        if code != INTERRUPTED:
            why = f"the training ended with exit code {code}"
    except RuntimeError as error:
        why = str(error)
        print(storm.training.tail())
        storm.training.kill_if_alive()
    finally:
        orphans = list(left_behind(mark, 10.0, services_only=True).values())
        cluster.close()
        orphans += [c for c in left_behind(mark, 10.0).values() if c not in orphans]
        kill(marked(mark))
    least = max(60.0, minutes * 60 / 10)
    found = growth(sampler.series, warm=min(120.0, minutes * 60 / 6), least=least)
    problems = [p for b in storm.blows for p in b.problems] + storm.training.problems()
    result = {
        "minutes": minutes,
        "steps": storm.training.step,
        "faults": [b.fault.kind for b in storm.blows],
        "ledger_closed": not problems,
        "orphans": len(orphans),
        "growth": [asdict(g) for g in found],
        "flat": all(g.flat for g in found),
        "why_not": why,
        "passed": not why and not problems and not orphans and bool(found) and all(g.flat for g in found),
        "run_dir": str(run_dir.resolve()),
    }
    report(found)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    (run_dir / "memory.csv").write_text("\n".join(sampler.lines()) + "\n")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when nothing grows and the books close."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args(argv)
    end_in_order()
    found = run(args.minutes, args.seed, args.out)
    verdict = "passed" if found["passed"] else f"FAILED {found['why_not']}"
    print(f"{found['steps']} steps in {args.minutes:g} minutes under {len(found['faults'])} faults; flat: {found['flat']};", end=" ")
    print(f"ledger closed: {found['ledger_closed']}; processes left: {found['orphans']}; {verdict}")
    print(found["run_dir"])
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
