"""Seconds of training from the same warmed-up weights to 0.90 held-out accuracy, against TRL: short answers, and long uneven ones.

Model, prompts and their order, group size, batch, learning rate and objective are the same, and no group is filtered; each side has its own
system on both cores. Ours generates while it trains, two steps behind at most (`max_staleness = 2`), and answers under way keep their keys
and values when weights change; TRL is on-policy. Evaluation and start-up are left out of the time, and start-up is printed. Three seeds.
Where generation goes on during an evaluation, leaving its seconds out would be a gift: so ours runs twice, once with evaluations to see how
many steps it takes, and once for so many steps without any, which is timed.

The limit is what vLLM alone takes to generate as many tokens as ours did: nothing can be faster on this engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cluster.config import RunConfig
from cluster.load import load
from rollout import chat
from rollout.prompts import PromptStream
from tests.bench.engine_alone import engine_alone
from tests.bench.rows import Row, compare
from tests.bench.warmed import ADDITION, warmed

SEEDS, ACCURACY = (0, 1, 2), 0.90
ALONE = 5  # batches that the engine alone is measured with
# What TRL's GRPO with `beta = 0` and `loss_type = dapo` computes.
SAME = ["--variant", "grpo", "--kl_coef", "0", "--filter_groups", "false", "--loss_agg", "token-mean", "--std_ddof", "1"]
SAME += ["--std_eps", "1e-4"]
SAME += ["--lr", "1e-4", "--lr_warmup_steps", "10", "--lr_schedule", "constant", "--warmup_steps", "0"]
SYSTEM = ["--max_staleness", "2", "--kv_on_update", "keep", "--sample_groups", "0", "--wandb", "off", "--display", "none"]


@dataclass(frozen=True)
class Reached:
    """A training that came to the accuracy: its steps, the seconds of training and those before it, and (ours) the tokens generated."""

    steps: int
    seconds: float
    start: float
    last: float
    tokens: int = 0


def job_of(cfg: RunConfig, model: str, seed: int) -> dict[str, Any]:
    """What TRL is given: the same prompts in the same order."""
    tokenizer = chat.load_tokenizer(model)
    with tempfile.TemporaryDirectory() as folder:
        stream = PromptStream(cfg.data, tokenizer, seed, Path(folder))
        heldout = [(p.text, p.answer) for p in stream.heldout(cfg.eval.eval_prompts)]
        prompts = [(p.text, p.answer) for _ in range(cfg.steps * cfg.buffer.batch_size) if (p := stream.next()) is not None]
    return {
        "model": model, "seed": seed, "prompts": prompts, "heldout": heldout, "accuracy": ACCURACY, "threads": len(os.sched_getaffinity(0)),
        "batch_size": cfg.buffer.batch_size, "group_size": cfg.rollout.group_size, "max_tokens": cfg.rollout.max_tokens,
        "lr": cfg.optim.lr, "lr_warmup_steps": cfg.optim.lr_warmup_steps, "steps": cfg.steps, "eval_every": cfg.eval.eval_every,
    }  # fmt: skip


def reached(rows: list[Reached]) -> Reached | None:
    """The first of the evaluations so far that is there."""
    return next((row for row in rows if row.last >= ACCURACY), None)


def trl(job: dict[str, Any], folder: Path) -> Reached | None:
    """TRL, in a process of its own; None where it does not come to the accuracy."""
    (folder / "job.json").write_text(json.dumps(job))
    env = {**os.environ, "OMP_NUM_THREADS": str(job["threads"])}
    subprocess.run([sys.executable, "-m", "tests.bench.trl_run", str(folder / "job.json"), str(folder / "trl.jsonl")], env=env, check=True)
    lines = [json.loads(line) for line in (folder / "trl.jsonl").read_text().splitlines()]
    return reached([Reached(x["step"], x["seconds"], lines[0]["start"], x["accuracy"]) for x in lines])


def ours(flags: list[str], folder: Path) -> Reached | None:
    """`winnow train`, twice: until it is there, and for as many steps against the clock."""
    seen = reached(train(flags, folder / "seen", to_the_end=False))
    if seen is None:
        return None
    return train([*flags, "--steps", str(seen.steps), "--eval_every", "0"], folder / "timed", to_the_end=True)[-1]


def train(flags: list[str], run_dir: Path, to_the_end: bool) -> list[Reached]:
    """The evaluations of a `winnow train`, which ends by itself or when it is there. Raises RuntimeError when it fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cluster.launch", "train", *flags, "--run_dir", str(run_dir)]
    process = subprocess.Popen(command, env=env, stdout=sys.stderr, start_new_session=True)
    while process.poll() is None:
        time.sleep(0.5)
        if not to_the_end and reached(evaluations(run_dir)):
            os.kill(process.pid, signal.SIGINT)
            process.wait(120)
            return evaluations(run_dir)
    if process.returncode:
        raise RuntimeError(f"winnow train ended with exit code {process.returncode}")
    return evaluations(run_dir)


def evaluations(run_dir: Path) -> list[Reached]:
    """What each evaluation so far found."""
    file, seconds, found, start = run_dir / "metrics.jsonl", 0.0, list[Reached](), 0.0
    lines = file.read_text().splitlines() if file.exists() else []
    for row in map(json.loads, lines):
        start = start or row["time/elapsed"] - row["time/between_reports"]
        seconds += row["time/between_reports"] - row["time/eval"]
        if "eval/greedy" in row:
            found.append(Reached(row["step"], seconds, start, row["eval/greedy"], row["ledger/tokens_received"]))
    return found


def engine_rate(flags: list[str]) -> float:
    """Tokens/s of the engine alone on such batches, from the weights that training begins with; the first batch is left out."""
    with engine_alone(flags, ALONE) as alone:
        size = len(alone.prompts) // ALONE
        done = [alone.direct(alone.prompts[i * size : (i + 1) * size]) for i in range(ALONE)][1:]
    return sum(tokens for tokens, _ in done) / sum(seconds for _, seconds in done)


def race(name: str, flags: list[str], bar: float) -> list[Row]:
    """Both sides on every seed, taking turns at being first."""
    model = str(warmed(flags))
    mine, theirs = list[Reached](), list[Reached]()
    for seed in SEEDS:
        own = [*flags[:1], *flags[1:], *SAME, *SYSTEM, "--model", model, "--seed", str(seed)]
        cfg = load(own[0], own[1:])
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            for side in ("ours", "trl") if seed % 2 == 0 else ("trl", "ours"):
                done = ours(own, folder) if side == "ours" else trl(job_of(cfg, model, seed), folder)
                assert done is not None, f"{side} does not come to {ACCURACY} with seed {seed} in {cfg.steps} steps"
                print(f"{name} seed {seed} {side}: {done}", file=sys.stderr, flush=True)
                (mine if side == "ours" else theirs).append(done)

    def of(rows: list[Reached]) -> str:
        each = ", ".join(f"{r.steps} steps of {r.seconds / r.steps:.2f} s to {r.last:.3f}" for r in rows)
        return f"{each}; start {min(r.start for r in rows):.0f} s"

    rate = engine_rate(own)
    limit = median(r.tokens / rate for r in mine)
    note = f"ours {of(mine)}; TRL {of(theirs)}; {cfg.buffer.batch_size} × {cfg.rollout.group_size} answers a step, none filtered"
    note += f"; limit: the tokens of ours at the {rate:,.0f} tokens/s of vLLM alone"
    times = [r.seconds for r in mine], [r.seconds for r in theirs]
    return [compare(name, "s", *times, limit=limit, higher_is_better=False, least_ratio=bar, note=note)]


def run() -> list[Row]:
    """Two-digit addition."""
    return race("time_to_accuracy", [*ADDITION, "--steps", "60", "--eval_every", "1", "--eval_prompts", "256"], 1.5)
