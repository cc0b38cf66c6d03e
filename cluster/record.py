"""What a run says of itself: metrics, samples, evaluations, the ledger's snapshots, and the summary at its end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import ray

from cluster import metrics
from cluster.advice import Adviser, Facts
from cluster.config import RunConfig, resolved_objective
from cluster.display import Display
from cluster.evaluate import EvalStats
from cluster.grafana import shown
from cluster.ledger import append_snapshot
from cluster.live import Live
from cluster.loop_records import StepReport
from cluster.runfolder import EVALUATIONS
from cluster.samples import batch_weights, length_row, sample_row
from cluster.sinks import ADVICE, LENGTHS, METRICS, Sinks, cut, read_rows
from learner.buffer_records import StepSummary

RESIDENT_SECONDS = 5.0  # between two measurements of all processes' memory, each of which takes milliseconds


class Recorder:
    """Takes what the loop reports. `seconds` holds the time of each phase, `accuracy` held-out greedy accuracy before and after."""

    def __init__(self, cfg: RunConfig, run_dir: Path, display: Display, seconds_setup: float) -> None:
        self.cfg = cfg
        self.run_dir = run_dir
        self.display = display
        self.sinks: Sinks | None = None
        self.began = time.monotonic()
        self.seconds: dict[str, float] = {"setup": seconds_setup, "rl": 0.0}
        self.accuracy: dict[str, float] = {}
        self.best: tuple[float, int] = (-1.0, -1)
        self.last: dict[str, float] = {}
        self.probe: dict[str, float] = {}
        self.adviser: Adviser | None = None
        self.live: Live | None = None
        self._resident = (-RESIDENT_SECONDS, 0)  # when it was measured, and the bytes

    def open(self, resume_step: int | None) -> None:
        """Open the sinks; `resume_step` is the last step whose lines stay (-1: none, that of step 0 neither), None for a fresh run."""
        config = self.cfg.model_dump(mode="json")
        name, note = self.run_dir.name, self.display.note
        self.sinks = Sinks.open(self.run_dir, self.cfg.log, config, resume_step, name=name, note=note)
        if resume_step is not None and (self.run_dir / EVALUATIONS).exists():
            cut(self.run_dir / EVALUATIONS, resume_step)
        self.adviser = Adviser(Facts.of(self.cfg), read_rows(self.run_dir / METRICS))
        self.live = Live(name, note=note)

    def begin_live(self) -> None:
        """Once Ray is joined: what the dashboard counts is 0 from here on."""
        if self.live is not None:
            self.live.begin(shown(self.cfg.rollout.max_staleness))

    def close(self) -> None:
        """Close the sinks."""
        if self.live is not None:
            self.live.close()
        if self.sinks is not None:
            self.sinks.close()

    def elapsed(self) -> float:
        """Seconds since this life of the run began."""
        return time.monotonic() - self.began

    def step(self, report: StepReport, life: int) -> None:
        """One step into every sink."""
        assert self.sinks is not None
        record: dict[str, float] = metrics.step_record(report)
        record |= {"seconds_elapsed": self.elapsed(), "resident_gb": self.resident() / 2**30}
        if report.step == 1:
            record |= self.probe
        self.last = metrics.logged(record)
        self.sinks.log(report.step, self.last)
        self.display.step(report.step, self.cfg.batches, self.last)
        if self.live is not None:
            self.live.set(self.last)
        self.alarm(report.summary)
        append_snapshot(self.run_dir, report.ledger, life=life)
        self.answers(report)
        for advice in self.adviser.step(report.step, self.last) if self.adviser is not None else ():
            self.display.note(str(advice))
            self.sinks.write(ADVICE, report.step, {"rule": advice.rule, "evidence": advice.evidence, "remedy": advice.remedy})

    def resident(self) -> int:
        """Bytes of all processes on this machine, at most `RESIDENT_SECONDS` old."""
        if time.monotonic() - self._resident[0] >= RESIDENT_SECONDS:
            self._resident = (time.monotonic(), resident_bytes())
        return self._resident[1]

    def answers(self, report: StepReport) -> None:
        """Some groups of a step in full, and the lengths of all."""
        assert self.sinks is not None
        batch, cfg = report.batch, self.cfg
        budget = cfg.rollout.max_tokens
        self.sinks.write(LENGTHS, report.step, length_row(batch.summaries, budget))
        weights = batch_weights(batch.summaries, batch.fillers, resolved_objective(cfg), budget, cfg.optim.minibatches)
        for uid, ref in list(zip(batch.uids, batch.payloads, strict=True))[: cfg.log.sample_groups]:
            try:
                scored = ray.get(ref)
            except ray.exceptions.ObjectLostError:  # gone with its node, after it was trained
                continue
            row = sample_row(scored, report.train.advantages[uid].tolist(), weights_G=weights[uid].tolist())
            self.sinks.samples(report.step, [row])

    def alarm(self, summary: StepSummary) -> None:
        """Say at once when too many answers of a step have no reward by a fault of ours."""
        answers = max(summary.scored * self.cfg.rollout.group_size, 1)
        share, limit = summary.verifier_errors / answers, self.cfg.verify.verifier_error_rate
        if share > limit:
            dropped = "their groups are dropped" if self.cfg.verify.on_verifier_error == "drop" else "their groups train without them"
            without = f"{summary.verifier_errors} of {answers} answers have no reward"
            self.display.note(f"alarm: {without}, more than verifier_error_rate = {limit:g}; {dropped}")

    def evaluation(self, step: int, stats: EvalStats) -> bool:
        """Note an evaluation; True when it is of the best step so far."""
        self.accuracy["after" if step else "before"] = stats.greedy
        text = f"step {step}: held-out greedy accuracy {stats.greedy:.3f} on {stats.prompts} prompts"
        if stats.k:
            text += f", avg@{stats.k} {stats.avg_at_k:.3f}, pass@{stats.k} {stats.pass_at_k:.3f}, maj@{stats.k} {stats.maj_at_k:.3f}"
        self.display.note(text)
        if self.live is not None:
            self.live.also(metrics.logged(metrics.eval_record(stats)))
        with open(self.run_dir / EVALUATIONS, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **asdict(stats)}) + "\n")
        if step == 0 or stats.greedy <= self.best[0]:
            return False
        self.best = (stats.greedy, step)
        return True

    def summary(self, step: int, export: Path) -> dict[str, Any]:
        """What summary.json holds."""
        return {
            "accuracy_before": self.accuracy.get("before"),
            "accuracy_after": self.accuracy.get("after"),
            "steps": step,
            "seconds_setup": self.seconds["setup"],
            "seconds_start": self.seconds.get("start", 0.0),
            "seconds_warmup": self.seconds.get("warmup", 0.0),
            "seconds_rl": self.seconds["rl"],
            "export": str(export.resolve()),
            "metrics": self.last,
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"accuracy": self.accuracy, "best": list(self.best), "last": self.last, "seconds": self.seconds}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: time spent on training adds up over the lives of a run."""
        self.accuracy, self.last = dict(state["accuracy"]), dict(state["last"])
        self.best = (state["best"][0], state["best"][1])
        kept = {k: v for k, v in state["seconds"].items() if k in ("warmup", "rl")}
        self.seconds = {**self.seconds, **kept}
        if self.live is not None:
            self.live.set(self.last)


def resident_bytes() -> int:
    """Resident memory of this process and of all that it started on this machine."""
    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total
