"""`winnow export` and `winnow eval` on a run's checkpoint, with the real engine.

Does not cover: models from a hub, and accuracy by itself (the short training learns nothing).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_export_of_any_step_in_any_dtype(command: Any, run_dir: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    done = command("export", str(run_dir), "--step", "3", "--dtype", "bfloat16", "--out", str(tmp_path / "half"))
    assert done.end() == 0, done.text
    assert done.lines[-1] == str(tmp_path / "half")
    half, whole = load_file(tmp_path / "half" / "model.safetensors"), load_file(run_dir / "exports" / "step-000003" / "model.safetensors")
    assert half.keys() == whole.keys()
    for name, value in whole.items():
        assert half[name].dtype == torch.bfloat16 and torch.equal(half[name], value.to(torch.bfloat16))


def test_export_of_a_step_that_is_not_there_is_one_sentence(command: Any, run_dir: Path) -> None:
    done = command("export", str(run_dir), "--step", "1")
    assert done.end() == 2 and "choose one of 2, 3" in done.lines[-1]


def test_eval_of_a_run_is_that_of_its_newest_checkpoint(command: Any, run_dir: Path) -> None:
    done = command("eval", str(run_dir), "--engines", "1", "--verifier_actors", "1")
    assert done.end() == 0, done.text
    found = json.loads(done.lines[-1])
    last = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()][-1]
    assert found["step"] == 3 and found["prompts"] == 16
    assert {k: found[k] for k in ("greedy", "resp_len", "truncated")} == {k: last[k] for k in ("greedy", "resp_len", "truncated")}
    assert done.left_behind() == []
