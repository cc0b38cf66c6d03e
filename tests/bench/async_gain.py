"""What `max_staleness = 1` gains over 0: the same work, the engine on one core and the learner on the other, in pairs of runs.

The bound is what the stage times of the synchronous runs allow: a batch then takes as long as the longer of the engine's part (generating
and loading weights) and the learner's (training and publishing).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median

from tests.bench.rows import Row, compare
from tests.bench.runs import Run
from tests.bench.warmed import ADDITION, warmed

PAIRS, STEPS, LEFT_OUT = 3, 18, 4
TIMES: tuple[str, ...] = ("time/between_reports", "time/engines_busy", "time/train_total", "time/wait_generate")
TIMES += ("sync/seconds_publish", "sync/seconds_paused")
# A learning rate at which lengths stay as they are, so that the work does.
WORK = ["--warmup_steps", "0", "--lr", "1e-9", "--steps", str(STEPS), "--eval_prompts", "0", "--variant", "grpo", "--kl_coef", "0"]


def one(staleness: int) -> dict[str, float]:
    """Medians over the steps of one run, in seconds."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        run = Run([*ADDITION, "--model", str(warmed(ADDITION)), *WORK, "--max_staleness", str(staleness)], Path(folder, "run"))
        run.until("training")
        run.pin({"ray::Rollout": {cores[0]}, "EngineCore": {cores[0]}, "ray::LearnerRank": {cores[-1]}})
        run.end()
        rows = run.rows()[LEFT_OUT:]
    return {name: median(row[name] for row in rows if name in row) for name in TIMES}


def run() -> list[Row]:
    """The gain, its bound, and how long the learner waits at both."""
    zero, ahead = list[dict[str, float]](), list[dict[str, float]]()
    for pair in range(PAIRS):
        for staleness in (0, 1) if pair % 2 == 0 else (1, 0):
            (zero, ahead)[staleness].append(one(staleness))
    step = "time/between_reports"
    gains = [a[step] / b[step] for a, b in zip(zero, ahead, strict=True)]
    stage = {key: median(row[key] for row in zero) for key in zero[0]}
    engine = stage["time/engines_busy"] + stage["sync/seconds_paused"]
    learner = stage["time/train_total"] + stage["sync/seconds_publish"]
    bound = stage[step] / max(engine, learner)
    shares = [median(row["time/wait_generate"] / row[step] for row in rows) for rows in (zero, ahead)]
    least = max(0.0, 1 - learner / max(engine, learner))
    stages = f"a step at 0 takes {stage[step]:.2f} s: engine {engine:.2f} s, learner {learner:.2f} s"
    waits = f"the learner waits for answers {shares[0]:.0%} of the time at 0, {shares[1]:.0%} at 1, by the stage times at least {least:.0%}"
    return [
        compare("async_gain", "times", gains, limit=bound, least_share=0.9, note=f"time per step at 0 over that at 1; {stages}"),
        compare("async_gain/waiting", "share", shares[1], shares[0], limit=least, higher_is_better=False, note=waits),
    ]
