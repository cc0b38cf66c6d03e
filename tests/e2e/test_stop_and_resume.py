"""A run that is told to stop, on the real engine, and goes on; and runs that are cut in two, with the deterministic engine and (when long)
with the real one.

Does not cover: kills in each stage (tests/cluster/test_lives.py).
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import marked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MANY = ["--steps", "100000"]
LONG = bool(os.environ.get("WINNOW_LONG"))  # make soak


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sigterm_writes_a_checkpoint_leaves_no_process_and_resume_goes_on(tmp_path: Path, small: Any) -> None:
    run_dir = tmp_path / "run"
    first = small("--run_dir", str(run_dir), *MANY)
    first.until(r"step 2/")
    assert listening_beyond_loopback(first.mark) == []
    os.killpg(first.process.pid, signal.SIGTERM)  # as a terminal or `timeout` does: to the run and all in its group
    asked = time.monotonic()
    assert first.end() == 130, first.text
    assert time.monotonic() - asked < 15.0
    assert first.left_behind() == []
    reached = max(row["step"] for row in lines(run_dir / "metrics.jsonl"))
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step-{reached:06d}"]

    more = ["--engines", "2", "--learner_ranks", "2", "--verifier_actors", "2"]  # than in the first life
    again = small("--run_dir", str(run_dir), "--resume", "--steps", str(reached + 2), *more)
    assert again.end() == 0, again.text
    assert f"resumes at step {reached}" in again.text
    assert [row["step"] for row in lines(run_dir / "metrics.jsonl")] == list(range(1, reached + 3))
    last = lines(run_dir / "metrics.jsonl")[-1]
    assert last["ledger/groups_trained"] == 4 * (reached + 2) and last["mismatch/max"] < 1e-4
    assert last["ledger/groups_kept"] == last["ledger/groups_in_flight"] == 0


def test_a_relative_run_folder_is_that_of_the_users_working_directory(tmp_path: Path, ray_head: str, small: Any) -> None:
    """Ray's actors have another one."""
    flags = ["--ray_address", ray_head, "--engine", "fake", "--eval_prompts", "0", "--run_dir", "mine"]
    done = small(*flags, "--steps", "1", cwd=tmp_path)
    assert done.end() == 0, done.text
    assert done.lines[-1] == str(tmp_path / "mine")
    assert [row["step"] for row in lines(tmp_path / "mine" / "metrics.jsonl")] == [1]


def listening_beyond_loopback(mark: str) -> list[str]:
    """Sockets on which a run's processes, Ray's and the engines' too, listen for other machines."""
    processes = [psutil.Process(pid) for pid in marked(mark)]
    listening = [(p.name(), c.laddr) for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert len(listening) > 5, "they were not found"
    return [f"{name} {at.ip}:{at.port}" for name, at in listening if not re.match(r"(::ffff:)?127\.|::1$", at.ip)]


@pytest.fixture(scope="module")
def cut_in_two(tmp_path_factory: pytest.TempPathFactory, ray_head: str, small: Any) -> tuple[Path, Path]:
    """Five steps at once, and the same in two lives, with the deterministic engine."""
    folder = tmp_path_factory.mktemp("fake")
    common = ["--engine", "fake", "--sources", '[{"task": "addition"}]', "--ray_address", ray_head, "--seed", "3"]
    # The schedule is over --steps, so both lives are told of all five; the first is ended by a signal after its second step.
    whole = small(*common, "--run_dir", str(folder / "whole"), "--steps", "5")
    assert whole.end() == 0, whole.text
    half = small(*common, "--run_dir", str(folder / "halves"), "--steps", "5", "--checkpoint_every", "1", "--keep_checkpoints", "9")
    half.until(r"step 2/")
    half.kill()  # hard, wherever it is in step 3 or 4
    half.end()
    rest = small(*common, "--run_dir", str(folder / "halves"), "--steps", "5", "--checkpoint_every", "1", "--resume")
    assert rest.end() == 0, rest.text
    return folder / "whole", folder / "halves"


@pytest.mark.skipif(not LONG, reason="make soak; tests/cluster/test_lives.py has it without processes")
def test_two_lives_train_what_one_life_trains(cut_in_two: tuple[Path, Path]) -> None:
    """Bitwise equal weights, metrics (times apart) and ledger."""
    whole, halves = cut_in_two
    for name in ("model.safetensors", "config.json"):
        assert (whole / "exports" / "step-000005" / name).read_bytes() == (halves / "exports" / "step-000005" / name).read_bytes()

    def untimed(row: dict[str, Any]) -> dict[str, Any]:
        gone = ("time/", "sync/", "mismatch/probe", "tokens/per_second", "run/resident_gb", "buffer/in_flight", "ledger/groups_in_flight")
        return {k: v for k, v in row.items() if not k.startswith(gone)}

    one, two = lines(whole / "metrics.jsonl"), lines(halves / "metrics.jsonl")
    assert [r["step"] for r in two] == [1, 2, 3, 4, 5]
    assert [untimed(r) for r in one] == [untimed(r) for r in two]
    assert lines(whole / "samples.jsonl") == lines(halves / "samples.jsonl")


@pytest.mark.skipif(not LONG, reason="make soak; tests/cluster/test_lives.py has it without processes")
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(cut_in_two: tuple[Path, Path], ray_head: str) -> None:
    _, halves = cut_in_two
    broken = halves / "checkpoints" / "step-000005" / "controller.json"
    broken.write_bytes(broken.read_bytes()[:-40])
    from cluster import checkpoint

    said: list[str] = []
    saved = checkpoint.newest_good(halves, said.append)
    assert saved is not None and saved.step == 4
    assert len(said) == 1 and str(broken) in said[0]


LONG_STEP = [
    "--engine", "fake", "--tiny_hidden", "512", "--tiny_layers", "4", "--batch_size", "96", "--group_size", "16", "--micro_tokens", "128",
    "--eval_prompts", "0", "--watchdog_seconds", "2",
]  # fmt: skip


@pytest.mark.skipif(not LONG, reason="make soak; tests/cluster/test_lives.py has it without processes")
def test_a_stop_in_a_long_step_is_over_in_seconds_and_loses_no_step(tmp_path: Path, ray_head: str, small: Any) -> None:
    """A step of a minute and more, with two ranks: both leave it at the same micro-batch."""
    run_dir = tmp_path / "run"
    flags = ["--run_dir", str(run_dir), "--ray_address", ray_head, "--learner_ranks", "2", *LONG_STEP]
    run = small(*flags, *MANY)
    run.until("watchdog: .* the loop trains, for")
    os.killpg(run.process.pid, signal.SIGTERM)
    asked = time.monotonic()
    assert run.end() == 130, run.text
    assert time.monotonic() - asked < 15.0
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step-000000"]


@pytest.mark.skipif(not LONG, reason="make soak")
def test_on_the_real_engine_a_resumed_run_is_as_near_as_another_whole_one(tmp_path: Path, ray_head: str, small: Any) -> None:
    """Prints how far the weights after six steps are from those of the same run, uninterrupted and cut in two."""
    from safetensors.numpy import load_file

    common = ["--ray_address", ray_head, "--seed", "3", "--steps", "6", "--lr", "1e-3"]
    runs = {name: tmp_path / name for name in ("whole", "again", "halves")}
    for name in ("whole", "again"):
        done = small(*common, "--run_dir", str(runs[name]))
        assert done.end() == 0, done.text
    half = small(*common, "--run_dir", str(runs["halves"]), "--checkpoint_every", "1")
    half.until(r"step 3/")
    half.kill()
    half.end()
    rest = small(*common, "--run_dir", str(runs["halves"]), "--checkpoint_every", "1", "--resume")
    assert rest.end() == 0, rest.text
    weights = {name: load_file(path / "exports" / "step-000006" / "model.safetensors") for name, path in runs.items()}
    for name in ("again", "halves"):
        off = max(float(abs(weights[name][key] - value).max()) for key, value in weights["whole"].items())
        ours, theirs = (lines(runs[n] / "samples.jsonl") for n in (name, "whole"))
        same = sum(a["answers"][i]["ids"] == b["answers"][i]["ids"] for a, b in zip(ours, theirs, strict=True) for i in range(4))
        rewards = [a["reward"] == b["reward"] for a, b in zip(*(lines(runs[n] / "metrics.jsonl") for n in (name, "whole")), strict=True)]
        print(f"{name}: weights differ by {off:.1e} at most, {same} of {4 * len(ours)} sampled answers are the same, rewards {rewards}")
        assert off < 1e-3
