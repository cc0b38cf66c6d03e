"""`make demo`: the built-in recipe from set-up to export, and what came of it.

    python -m cluster.demo [--seed N] [--run_dir PATH] [--random_rewards] [any flag of the recipe]

A tiny model learns two habits from examples (guessing, and working a sum out), and reinforcement learning finds that working
it out pays. `--random_rewards` is the control: the same run with coin flips for rewards, scored by the true verifier in
evaluation. Seconds that the set-up took are read from WINNOW_SETUP_SECONDS. The last line is the run folder's path.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.errors import UserError

RECIPE = "arithmetic"
CONTROL = ["--reward_weights", '{"random": 1}']
ABOUT = "usage: python -m cluster.demo [--seed N] [--run_dir PATH] [--random_rewards] [any flag of winnow train]"


def flags(argv: Sequence[str]) -> list[str]:
    """The recipe's flags: `--random_rewards` becomes the control's, all others stay."""
    given = [a for a in argv if a not in ("--random_rewards", "--random-rewards")]
    return given + CONTROL if len(given) < len(argv) else given


def report(summary: Mapping[str, Any], seconds: float) -> str:
    """Where the time went, and the accuracies. `seconds` is the wall-clock time of everything but the set-up."""
    setup, warmup, rl = (float(summary[f"seconds_{part}"]) for part in ("setup", "warmup", "rl"))
    rest = max(seconds - warmup - rl, 0.0)
    parts = (("set-up", setup), ("warm-up", warmup), ("RL", rl), ("the rest", rest), ("all", setup + seconds))
    lines = ["", "where the time went"]
    lines += [f"  {label:<9}{spent:7.1f} s" for label, spent in parts]
    lines += [
        f"held-out greedy accuracy: {summary['accuracy_before']:.3f} before RL, {summary['accuracy_after']:.3f} after {summary['steps']} steps",
        f"export: {summary['export']}",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code (2 for something that the user gave)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if "-h" in args or "--help" in args:
        print(ABOUT)
        return 0
    started = time.monotonic()
    try:
        from cluster.load import load

        cfg = load(RECIPE, flags(args))
        from cluster.run import train

        result = train(cfg)
    except UserError as error:
        print(f"winnow: {error}", file=sys.stderr)
        return 2
    print(report(result.summary, time.monotonic() - started))
    print(result.run_dir)
    return 0


def setup_seconds() -> float:
    """What WINNOW_SETUP_SECONDS says; 0 where nothing was set up."""
    try:
        return float(os.environ.get("WINNOW_SETUP_SECONDS", "0") or 0)
    except ValueError:
        return 0.0


if __name__ == "__main__":
    sys.exit(main())
