"""A whole training on the real engine with two generators, two verifier workers and two learner ranks.

Does not cover: GPUs, several nodes, faults in the middle of a run, and whether the model learns (that is `make demo`).
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cluster import launch
from tests.e2e.conftest import SECRETS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_last_line_is_the_run_folder(trained: Any, run_dir: Path) -> None:
    assert trained.lines[-1] == str(run_dir)


def test_no_process_is_left(trained: Any) -> None:
    assert trained.left_behind() == []


def test_engine_and_learner_agree_before_the_first_step_and_the_run_says_by_how_much(trained: Any) -> None:
    (said,) = [line for line in trained.lines if "log-probabilities of engine and learner differ by" in line]
    assert float(said.split(" by ")[1].split()[0]) < 1e-5


def test_summary(summary: dict[str, Any]) -> None:
    assert summary["steps"] == 3
    assert 0.0 <= summary["accuracy_before"] <= 1.0 and 0.0 <= summary["accuracy_after"] <= 1.0
    assert summary["seconds_rl"] > 0 and summary["seconds_warmup"] == 0.0
    assert Path(summary["export"]).is_absolute() and (Path(summary["export"]) / "model.safetensors").is_file()
    assert {"reward", "informative", "resp_len", "clipfrac"} <= set(summary["metrics"])


def test_metrics_of_every_step(run_dir: Path) -> None:
    rows = lines(run_dir / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3]
    for row in rows:
        assert row["train/groups"] == 4 and row["train/optimiser_steps"] == 2
        assert row["staleness/max"] == 0 and row["mismatch/max"] < 1e-4
        assert row["train/grad_norm"] > 0 and row["verifier/errors"] == 0
        trained, dropped = row["ledger/groups_trained"], row["ledger/groups_uninformative"]
        in_hand = row["ledger/groups_kept"] + row["ledger/groups_in_flight"]
        others = row["ledger/groups_failed"] + row["ledger/groups_surplus"]
        assert row["ledger/groups_dispatched"] == trained + dropped + others + in_hand
        assert trained == 4 * row["step"]
    assert [("eval/greedy" in r) for r in rows] == [False, True, True]
    assert 0 <= rows[2]["eval/avg_at_k"] <= rows[2]["eval/pass_at_k"] <= 1


def test_the_ledger_closes(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cluster.ledger import main

    assert main([str(run_dir)]) == 0
    assert "12" in capsys.readouterr().out  # 3 steps of 4 groups


def test_samples_tell_prompt_answers_verdicts_and_advantages(run_dir: Path) -> None:
    rows = lines(run_dir / "samples.jsonl")
    assert {r["step"] for r in rows} == {1, 2, 3}
    for row in rows:
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(row["gold"]) == int(a) + int(b)
        rewards = [answer["reward"] for answer in row["answers"]]
        advantages = [answer["advantage"] for answer in row["answers"]]
        assert len(rewards) == 4 and max(rewards) > min(rewards)
        assert abs(sum(advantages)) < 1e-9
        order = sorted(range(4), key=lambda i: rewards[i])
        assert [advantages[i] for i in order] == sorted(advantages)


def test_held_out_prompts_are_never_trained_on(run_dir: Path) -> None:
    from cluster.load import load
    from rollout.chat import load_tokenizer
    from rollout.prompts import PromptStream

    cfg = load(str(run_dir))
    stream = PromptStream(cfg.data, load_tokenizer(str(run_dir / "tokenizer")), cfg.seed)
    held = {p.text for p in stream.heldout(cfg.eval.eval_prompts)}
    assert len(held) == 16 and held.isdisjoint(r["prompt"] for r in lines(run_dir / "samples.jsonl"))


def test_checkpoints_are_kept_by_count_and_the_config_is_written_out(run_dir: Path) -> None:
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    written = tomllib.loads((run_dir / "config.toml").read_text())
    assert written["rollout"]["engines"] == 2 and written["steps"] == 3
    assert json.loads((run_dir / "versions.json").read_text())["packages"]["torch"]


def test_wandb_has_an_offline_run(run_dir: Path) -> None:
    assert list((run_dir / "wandb").glob("offline-run-*/*.wandb"))


def test_no_secret_is_in_the_run_folder_the_log_or_the_report(trained: Any, run_dir: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    assert launch.main(["report", str(run_dir), "--out", str(report)]) == 0
    files = [report, *(path for path in run_dir.rglob("*") if path.is_file())]
    assert len(files) > 20 and any("wandb" in path.parts for path in files)
    for secret in SECRETS.values():
        assert secret not in trained.text
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_the_best_step_is_kept(run_dir: Path) -> None:
    found = json.loads((run_dir / "exports" / "best" / "best.json").read_text())
    evaluations = [r for r in lines(run_dir / "evaluations.jsonl") if r["step"] > 0]
    assert found["greedy"] == max(r["greedy"] for r in evaluations)
    assert (run_dir / "exports" / "best" / "model.safetensors").is_file()
