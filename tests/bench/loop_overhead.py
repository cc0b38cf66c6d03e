"""The built-in recipe's RL phase by what works: the share of its wall-clock time in which no engine, verifier, learner or transfer does.

From the run's own metrics (docs/metrics.md, time/…): durations are the actors' own, so messages between them count as nobody's work.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.bench.rows import Row, compare
from tests.bench.runs import Run, total
from tests.bench.warmed import ADDITION, warmed


def run() -> list[Row]:
    """Shares of the wall-clock time, evaluation apart."""
    flags = [*ADDITION, "--model", str(warmed(ADDITION)), "--warmup_steps", "0", "--steps", "30"]
    with tempfile.TemporaryDirectory() as folder:
        done = Run(flags, Path(folder, "run"))
        done.end()
        rows = done.rows()
    whole = total(rows, lambda r: r["time/between_reports"] - r["time/eval"])
    share = {k: total(rows, f"time/{k}") / whole for k in ("idle", "transfer_busy", "learner_busy")}
    engines = total(rows, lambda r: r["time/engines_busy"] - r["time/eval"]) / whole
    each = f"engines {engines:.1%}, learner {share['learner_busy']:.1%}, transfer {share['transfer_busy']:.1%}"
    note = f"{len(rows)} steps of {whole / len(rows):.2f} s: {each}"
    return [
        compare("loop_overhead", "share", share["idle"], most=0.03, note=note),
        compare("loop_overhead/transfer", "share", share["transfer_busy"], note="weights on their way, of the same time"),
    ]
