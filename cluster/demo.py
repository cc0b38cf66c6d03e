"""`make demo`: the built-in recipe from set-up to export, and what came of it.

    python -m cluster.demo [--seed N] [--run_dir PATH] [--random_rewards] [any flag of the recipe]

A tiny model learns two habits from examples (guessing, and working a sum out), and reinforcement learning finds that working
it out pays. `--random_rewards` is the control: the same run with coin flips for rewards, scored by the true verifier in
evaluation. Seconds that the set-up took are read from WINNOW_SETUP_SECONDS. The last line is the run folder's path.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.check import raise_first
from cluster.config import RunConfig
from cluster.load import load
from rollout.errors import UserError

RECIPE = "arithmetic"
ABOUT = "usage: python -m cluster.demo [--seed N] [--run_dir PATH] [--random_rewards] [any flag of winnow train]"


def config(argv: Sequence[str]) -> RunConfig:
    """The recipe under the flags; `--random_rewards` makes it the control. Raises UserError for a wrong flag."""
    given = [a for a in argv if a not in ("--random_rewards", "--random-rewards")]
    cfg = load(RECIPE, given)
    if len(given) == len(argv):
        return cfg
    # Training rewards are drawn, and held-out answers are judged by the recipe's own verifier.
    judged = [source.model_dump(exclude_unset=True) for source in cfg.data.sources]
    drawn = [{**source, "verifier": "random"} for source in judged]
    return load(RECIPE, [*given, "--sources", json.dumps(drawn), "--eval_sources", json.dumps(judged)])


def report(summary: Mapping[str, Any], seconds: float) -> str:
    """Where the time went, and the accuracies. `seconds` is the wall-clock time of everything but the set-up."""
    setup, warmup, rl = (float(summary[f"seconds_{part}"] or 0.0) for part in ("setup", "warmup", "rl"))
    rest = max(seconds - warmup - rl, 0.0)
    parts = (("set-up", setup), ("warm-up", warmup), ("RL", rl), ("start, evaluation, export", rest), ("all", setup + seconds))
    before, after = (_share(summary[f"accuracy_{when}"]) for when in ("before", "after"))
    return "\n".join(
        [
            "where the time went:",
            *(f"  {label:<26}{spent:7.1f} s" for label, spent in parts),
            f"held-out greedy accuracy: {before} before RL, {after} after {summary['steps']} steps",
            f"export: {summary['export']}",
        ]
    )


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def setup_seconds() -> float:
    """What WINNOW_SETUP_SECONDS says; 0 where nothing was set up."""
    try:
        return float(os.environ.get("WINNOW_SETUP_SECONDS") or 0)
    except ValueError:
        return 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code (2 for something that the user gave)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if "-h" in args or "--help" in args:
        print(ABOUT)
        return 0
    started = time.monotonic()
    try:
        cfg = config(args)
        raise_first(cfg)
        from cluster.train import run

        result = run(cfg, seconds_setup=setup_seconds())
    except UserError as error:
        print(f"winnow: {error}", file=sys.stderr)
        return 2
    if result.summary:
        print(report(result.summary, time.monotonic() - started))
    print(result.run_dir.resolve())
    return result.code


if __name__ == "__main__":
    sys.exit(main())
