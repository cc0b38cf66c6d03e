"""`make chaos`: a training on two-digit sums, undisturbed and then under a seeded schedule of faults of every kind.

    python -m tests.chaos [--seed 0] [--out runs] [--steps 120] [--kinds engine_core=2,node=1] [--fake]

Real vLLM, Ray and gloo: two engines, two verifiers and two learner ranks over two Ray nodes on this machine. Every fault is a signal
to a process of the run. The last line is the path of the disturbed run's folder, with `chaos.json` in it; the exit code is 1 when the
accuracy lies more than 0.05 below the undisturbed run's, the ledger did not close after some fault, a process was left, or not all
faults came. Does not cover: GPUs, faults of the network, and machines whose disks fail.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.nodes import Cluster
from tests.chaos.processes import end_in_order, kill, left_behind, marked
from tests.chaos.schedule import COUNTS, Fault, schedule
from tests.chaos.storm import FAKE, FLAGS, HEAD_CPUS, NODE_CPUS, POLL, ROLES, Storm
from tests.chaos.training import Training

ALLOWED = 0.05  # accuracy that the faults may cost


def undisturbed(run_dir: Path, flags: Sequence[str], cluster: Cluster) -> Training:
    """The same training without faults, to its end."""
    training = Training(run_dir, flags, cluster.environment, {})
    training.start()
    while training.code is None:
        time.sleep(POLL)
    training.stop()
    if training.code:
        print(training.tail())
        raise SystemExit(f"the undisturbed run ended with exit code {training.code}")
    return training


def accuracy(run_dir: Path) -> float:
    """Held-out greedy accuracy after the last step."""
    return float(json.loads((run_dir / "summary.json").read_text())["accuracy_after"])


def verdict(
    storm: Storm, expected: int, reference: float | None, reached: float | None, orphans: Sequence[str], why: str
) -> dict[str, Any]:
    """What chaos.json holds."""
    kinds = Counter(b.fault.kind for b in storm.blows)
    problems = [p for b in storm.blows for p in b.problems] + storm.training.problems()
    return {
        "faults": dict(sorted(kinds.items())),
        "accuracy": reached,
        "accuracy_undisturbed": reference,
        "ledger_closed": not problems,
        "orphans": len(orphans),
        "recovery_seconds": {
            kind: sum(times) / len(times)
            for kind in sorted(kinds)
            if (times := [b.recovery for b in storm.blows if b.fault.kind == kind and b.recovery >= 0])
        },
        "passed": not why
        and not problems
        and not orphans
        and len(storm.blows) == expected
        and (reached or 0.0) >= (reference or 0.0) - ALLOWED,
        "why_not": why,
        "problems": problems,
        "left_behind": list(orphans),
        "seconds": time.monotonic() - storm.began,
        "schedule": [
            {"kind": b.fault.kind, "second": b.at - storm.began, "step": b.step, "victim": b.victim, "recovery": b.recovery}
            for b in storm.blows
        ],
    }


def report(found: dict[str, Any]) -> None:
    """The table, in words."""
    print(f"{sum(found['faults'].values())} faults; mean seconds from each kind to the first step with all back that it took away:")
    for kind, seconds in found["recovery_seconds"].items():
        print(f"  {kind:<17}{found['faults'][kind]:3d} times {seconds:7.1f} s")
    reached, calm = ("not measured" if found[k] is None else f"{found[k]:.3f}" for k in ("accuracy", "accuracy_undisturbed"))
    print(f"held-out accuracy {reached}, undisturbed {calm}")
    print(f"the ledger closed after every fault: {found['ledger_closed']}; processes left: {found['orphans']}")
    print("passed" if found["passed"] else f"FAILED {found['why_not']} {'; '.join([*found['problems'], *found['left_behind']])}")


def run(seed: int, out: Path, flags: Sequence[str], faults: Sequence[Fault], roles: Mapping[str, int], compare: bool) -> dict[str, Any]:
    """Both runs on one cluster (the undisturbed one if `compare`); returns what was written to chaos.json."""
    mark = uuid.uuid4().hex
    stamp = time.strftime("%Y%m%d-%H%M%S")
    calm, stormy = out / f"chaos-{seed}-{stamp}-undisturbed", out / f"chaos-{seed}-{stamp}"
    cluster = Cluster(mark, HEAD_CPUS, NODE_CPUS)
    flags = [*flags, "--ray_address", cluster.address, "--warmup_dir", str(out / f"chaos-{seed}-{stamp}-warmup")]
    reference, reached, why, orphans = None, None, "", []
    try:
        if compare:
            print(f"undisturbed run in {calm}", flush=True)
            undisturbed(calm, flags, cluster)
            reference = accuracy(calm)
            print(f"undisturbed: held-out accuracy {reference:.3f}", flush=True)
        print(f"{len(faults)} faults in {stormy}", flush=True)
        storm = Storm(cluster, Training(stormy, flags, cluster.environment, roles), mark)
        try:
            storm.run(faults)
            reached = accuracy(stormy)
        except RuntimeError as error:
            why = str(error)
            print(storm.training.tail())
            storm.training.kill_if_alive()
        orphans = list(left_behind(mark, 10.0, services_only=True).values())
    finally:
        cluster.close()
        orphans += [c for c in left_behind(mark, 10.0).values() if c not in orphans]
        kill(marked(mark))
    found = {"seed": seed, **verdict(storm, len(faults), reference, reached, orphans, why), "run_dir": str(stormy.resolve())}
    stormy.mkdir(parents=True, exist_ok=True)
    (stormy / "chaos.json").write_text(json.dumps(found, indent=1) + "\n")
    (stormy / "chaos.log").write_text("".join(f"{at - storm.began:8.1f} {line}\n" for at, line in storm.training.lines))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when every condition holds; the run folder's path is the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--fake", action="store_true", help="the deterministic engine, coin flips for rewards, no comparison")
    parser.add_argument("--kinds", default="", help="another number of faults by kind, e.g. node=1,controller=2; default: all kinds")
    end_in_order()
    args, more = parser.parse_known_args(argv)
    counts = {k: int(n) for k, n in (pair.split("=") for pair in args.kinds.split(","))} if args.kinds else dict(COUNTS)
    roles = dict(ROLES)
    if args.fake:
        more = [*FAKE, *more]
        counts.pop("engine_core", None)  # the deterministic engine has none
        del roles["engine_core"]
    flags = [*FLAGS, "--checkpoint_every", "5", "--steps", str(args.steps), "--seed", str(args.seed), *more]
    found = run(args.seed, args.out, flags, schedule(args.seed, args.steps, counts), roles, compare=not args.fake)
    report(found)
    print(found["run_dir"])
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
