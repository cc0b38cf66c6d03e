"""What a step leaves behind by way of the recorder: the lines of every file, advice said once and logged, gauges set.

Does not cover what the numbers mean (tests of the table), nor Ray, which is not started.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import load, record
from cluster.display import Display
from cluster.live import Live
from cluster.loop_records import PromptTotals, StepReport, StepTimes
from cluster.record import Recorder
from cluster.timeline import Use
from learner.buffer_records import CutBatch
from learner.ledger import Ledger
from tests.cluster.test_live import Gauge
from tests.cluster.test_metrics import optimiser_step, step_stats, summary
from tests.cluster.test_samples import scored, summaries


def report(step: int, truncated: float) -> StepReport:
    groups = [scored(2 * step, [2, 6], [1.0, 0.0]), scored(2 * step + 1, [4, 4], [0.0, 1.0])]
    uids = tuple(group.uid for group in groups)
    return StepReport(
        step=step,
        batch=CutBatch(step - 1, uids, tuple(groups), tuple(summaries(*groups)), (0, 0)),
        summary=summary(truncated=truncated, reward=0.5, tokens=16, scored=2),
        train=step_stats((optimiser_step(),), advantages={uid: np.array([1.0, -1.0]) for uid in uids}),
        transfer=None,
        evaluation=None,
        times=StepTimes(1.0, 0.5, 0.1, 0.0, 0.0, 0.25, 2.0),
        prompts=PromptTotals(1, 0, 0),
        use=Use(2.1, 1.0, 0.2, 0.5, 0.1, 0.4),
        ledger=Ledger(),
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def record_steps(run_dir: Path, steps: range, truncated: float, resume: int | None = None) -> str:
    """What the display showed."""
    shown = io.StringIO()
    cfg = load.resolve("arithmetic", {"log.wandb": "off", "log.sample_groups": 1})
    recorder = Recorder(cfg, run_dir, Display.open("plain", stream=shown), 0.0)
    recorder.open(resume)
    recorder.live = Live("r", Gauge)
    for step in steps:
        recorder.step(report(step, truncated), 0)
    recorder.close()
    return shown.getvalue()


@pytest.fixture(autouse=True)
def _payloads_are_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record.ray, "get", lambda group: group)
    Gauge.made = []


def test_a_step_leaves_a_line_in_every_file(tmp_path: Path) -> None:
    record_steps(tmp_path, range(1, 3), 0.0)
    assert [(row["step"], row["answers/truncated"]) for row in lines(tmp_path / "metrics.jsonl")] == [(1, 0.0), (2, 0.0)]
    (first, second) = lines(tmp_path / "samples.jsonl")
    assert (first["step"], first["uid"], second["uid"]) == (1, 2, 4)
    assert [(a["advantage"], a["weight"], a["tokens"]) for a in first["answers"]] == [(1.0, 1 / 16, 2), (-1.0, 1 / 16, 6)]
    assert lines(tmp_path / "lengths.jsonl")[1] == {"step": 2, "width": 1, "right": {"2": 1, "4": 1}, "other": {"4": 1, "6": 1}}
    assert len(lines(tmp_path / "ledger.jsonl")) == 2 and lines(tmp_path / "advice.jsonl") == []
    (gauge,) = (g for g in Gauge.made if g.name == "winnow_reward")
    assert gauge.values == {("r",): 0.5}


def test_advice_is_printed_and_logged_when_it_begins_to_hold_and_a_resumed_run_does_not_repeat_it(tmp_path: Path) -> None:
    shown = record_steps(tmp_path, range(1, 20), 0.5)
    (said,) = [line for line in shown.splitlines() if line.startswith("advice:")]
    assert said.startswith("advice: 50% of the answers are cut off at max_tokens = 24; try --max_tokens 48")
    (logged,) = lines(tmp_path / "advice.jsonl")
    assert (logged["step"], logged["rule"]) == (7, "truncated") and logged["remedy"].startswith("--max_tokens 48")
    assert "advice" not in record_steps(tmp_path, range(11, 30), 0.5, resume=10)
    assert len(lines(tmp_path / "advice.jsonl")) == 1


@pytest.mark.parametrize(("errors", "said"), [(0, ""), (1, "alarm: 1 of 16 answers have no"), (3, "alarm: 3 of 16 answers have no")])
def test_too_many_answers_without_a_reward_raise_an_alarm_at_once(tmp_path: Path, errors: int, said: str) -> None:
    shown = io.StringIO()
    cfg = load.resolve("arithmetic", {"log.wandb": "off", "verify.verifier_error_rate": 0.05})
    Recorder(cfg, tmp_path, Display.open("plain", stream=shown), 0.0).alarm(summary(verifier_errors=errors, scored=2))
    assert said in shown.getvalue() and bool(shown.getvalue()) == bool(said)
