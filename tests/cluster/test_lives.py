"""Exact resume: a run that is killed with -9 in every one of its stages, and goes on each time, is bit by bit the run that never was.

The run is the whole of it on the deterministic engine, in one process (`lives`). Right answers are longer than wrong ones, and the engines'
speeds are drawn anew in every life, as is their number.
Equal are weights, optimiser, metrics (times and staleness apart), samples, held-out accuracies and, at the end, the ledger. What is so
at one moment alone (groups in flight, or kept for the batch after) depends on speeds when `max_staleness` is not 0: it is compared at the
end.

Does not cover: actors that die one by one, and the real engine (tests/e2e); curriculum, retiring and overprovision, whose choices depend on
what has come back.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.lives import AFTER, STAGES

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
STEPS = 16
TIMED = ("time/", "sync/", "tokens/per_second", "run/resident_gb", "staleness/")
MOMENTARY = ("buffer/kept", "buffer/in_flight", "buffer/refill_left", "ledger/")
Lives = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """Runs one life: flags, the (stage, step) to be killed at, the (step, seconds) to be slow and stopped in, the seed of its speeds."""
    data = tmp_path_factory.mktemp("data") / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+{3 * n}=", "answer": str(4 * n)}) + "\n" for n in range(10, 30)))
    common = [
        "arithmetic", "--sources", json.dumps([{"path": str(data), "verifier": "numeric"}]), "--warmup_steps", "0", "--batch_size", "4",
        "--group_size", "2", "--minibatches", "2", "--micro_tokens", "32", "--tiny_layers", "1", "--tiny_hidden", "32",
        "--lr_warmup_steps", "3", "--eval_prompts", "4", "--heldout_share", "0.3", "--eval_every", "4", "--engine", "fake",
        "--wandb", "off", "--display", "plain", "--steps", str(STEPS), "--checkpoint_every", "1", "--keep_checkpoints", "3",
    ]  # fmt: skip
    pipe = subprocess.PIPE
    program = subprocess.Popen([sys.executable, "-m", "tests.cluster.lives"], cwd=ROOT, text=True, stdin=pipe, stdout=pipe)
    assert program.stdin is not None and program.stdout is not None

    def live(*flags: str, kill: Any = None, slow: Any = None, stuck: bool = False, seed: int = 0) -> dict[str, Any]:
        life = {"flags": [*common, *flags], "kill": kill, "slow": slow, "stuck": stuck, "seed": seed}
        program.stdin.write(json.dumps(life) + "\n")
        program.stdin.flush()
        found: dict[str, Any] = json.loads(program.stdout.readline())
        return found

    yield live
    program.stdin.close()
    program.wait(30)


def rows(path: Path, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The objects of a JSONL file, without the keys that begin so."""
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(without)} for line in path.read_text().splitlines()]


def books(run_dir: Path) -> dict[str, Any]:
    """The last ledger, without the number of lives."""
    return {k: v for k, v in rows(run_dir / "ledger.jsonl")[-1].items() if k != "life"}


def learner(run_dir: Path, step: int = STEPS) -> dict[str, Any]:
    """The learner's part of a checkpoint: the bytes of weights, optimiser and random state, and its counters.

    torch writes a random number into `.metadata`, which is left out.
    """
    folder = run_dir / "checkpoints" / f"step-{step:06d}" / "learner"
    manifest = json.loads((folder / "learner.json").read_text())
    del manifest["files"][".metadata"]
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.distcp"))} | {"manifest": manifest}


@pytest.fixture(scope="module", params=[0, 1], ids=["synchronous", "max_staleness=1"])
def staleness(request: pytest.FixtureRequest) -> int:
    """`max_staleness`."""
    return int(request.param)


@dataclass(frozen=True)
class Whole:
    """The run that nothing happens to, and the order in which its groups came back."""

    run_dir: Path
    arrived: list[int]


@pytest.fixture(scope="module")
def whole(staleness: int, lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """One life, 2 engines."""
    run_dir = tmp_path_factory.mktemp("lives") / "whole"
    done = lives("--run_dir", str(run_dir), "--max_staleness", str(staleness), "--engines", "2")
    assert done["code"] == 0, done["text"]
    return Whole(run_dir, done["arrived"])


def compared(staleness: int) -> tuple[str, ...]:
    """Beginnings of the metrics that are not compared step by step."""
    return TIMED + (MOMENTARY if staleness else ())


@pytest.fixture(scope="module")
def killed(staleness: int, whole: Whole, lives: Lives) -> Path:
    """The same, killed in every stage: in step 2 the first time, then a step later each time, and at last stopped by SIGTERM.

    An epoch has some 14 prompts, so that it ends in the middle of every other step.
    """
    run_dir = whole.run_dir.with_name("killed")
    expected = rows(whole.run_dir / "metrics.jsonl", compared(staleness))
    flags = ["--run_dir", str(run_dir), "--max_staleness", str(staleness)]
    for step, stage in enumerate((*STAGES, "stop"), 1):
        resume = ["--resume"] if step > 1 else []
        kill = (stage, step + (stage in (*AFTER, "stop")))
        done = lives(*flags, "--engines", str(2 + step % 2), *resume, kill=kill, seed=step)
        assert done["code"] == (130 if stage == "stop" else -9), f"{stage}:\n{done['text']}"
        found = rows(run_dir / "metrics.jsonl", compared(staleness))
        assert len(found) >= step - 1 and found == expected[: len(found)], f"before the kill in {stage}"
    done = lives(*flags, "--engines", "2", "--resume", seed=99)
    assert done["code"] == 0, done["text"]
    return run_dir


def assert_equal(one: Path, other: Path, staleness: int) -> None:
    """Weights, optimiser, metrics, samples, accuracies and the ledger at the end."""
    assert learner(one) == learner(other) and len(learner(one)) == 2
    export = f"exports/step-{STEPS:06d}/model.safetensors"
    assert (one / export).read_bytes() == (other / export).read_bytes()
    assert rows(one / "metrics.jsonl", compared(staleness)) == rows(other / "metrics.jsonl", compared(staleness))
    for name in ("samples.jsonl", "lengths.jsonl", "evaluations.jsonl"):
        assert rows(one / name, ("versions",)) == rows(other / name, ("versions",)), name
    assert books(one) == books(other)


def test_the_run_is_what_it_should_be(whole: Whole, staleness: int) -> None:
    """So that the comparisons below compare something: all steps, refill, epochs, staleness, books that close."""
    found = rows(whole.run_dir / "metrics.jsonl")
    assert len(found) == STEPS and found[-1]["ledger/groups_uninformative"] > STEPS
    assert max(row["staleness/max"] for row in found) == staleness
    sizes = [row["sync/bytes"] for row in found if "sync/bytes" in row]
    assert sum(sizes) == STEPS * min(sizes), "every transfer is told of, once"
    assert any(row["ledger/groups_in_flight"] or row["ledger/groups_kept"] for row in found) == bool(staleness)
    assert books(whole.run_dir)["groups"]["trained"] == 4 * STEPS and books(whole.run_dir)["live"] == []
    assert books(whole.run_dir)["dispatched"] > 3 * 14


def test_a_run_killed_in_every_stage_is_the_run_that_never_was(whole: Whole, killed: Path, staleness: int) -> None:
    assert_equal(whole.run_dir, killed, staleness)


def test_other_speeds_of_the_engines_change_nothing(whole: Whole, lives: Lives, staleness: int) -> None:
    run_dir = whole.run_dir.with_name("other-speeds")
    done = lives("--run_dir", str(run_dir), "--max_staleness", str(staleness), "--engines", "3", seed=7)
    assert done["code"] == 0, done["text"]
    assert done["arrived"] != whole.arrived != sorted(whole.arrived), "groups did come back in other orders"
    assert_equal(whole.run_dir, run_dir, staleness)


def test_a_critic_is_part_of_the_run(lives: Lives, tmp_path: Path) -> None:
    """Killed while the policy is frozen, and again while both learn: value model, its optimiser and its place in pre-training come back."""
    flags = ["--variant", "vapo", "--value_pretrain", "3", "--steps", "4", "--max_staleness", "0"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = lives("--run_dir", str(whole), *flags)
    assert done["code"] == 0, done["text"]
    for resume, kill in enumerate([("training", 2), ("saving the learner", 5), None]):
        done = lives("--run_dir", str(killed), *flags, *["--resume"][: bool(resume)], kill=kill, seed=resume)
        assert done["code"] == (-9 if kill else 0), done["text"]
    assert learner(whole, 7) == learner(killed, 7) and any("value" in k for k in map(str, learner(whole, 7)["manifest"].items()))
    found = rows(whole / "metrics.jsonl", TIMED)
    assert found == rows(killed / "metrics.jsonl", TIMED) and [row["critic/frozen"] for row in found] == [1.0] * 3 + [0.0] * 4
    assert books(whole) == books(killed)


def test_a_stop_in_a_long_step_gives_it_up_and_loses_nothing(whole: Whole, lives: Lives, staleness: int) -> None:
    """Its groups are kept, the checkpoint is of the step before, though none was due, and the next life trains them."""
    run_dir = whole.run_dir.with_name("given-up")
    flags = ["--run_dir", str(run_dir), "--max_staleness", str(staleness), "--engines", "2", "--checkpoint_every", "0"]
    done = lives(*flags, slow=(5, 1.0))
    assert done["code"] == 130, done["text"]
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step-000005"] and len(rows(run_dir / "metrics.jsonl")) == 5
    again = lives(*flags, "--resume")
    assert again["code"] == 0, again["text"]
    assert_equal(whole.run_dir, run_dir, staleness)


@pytest.mark.parametrize("staleness", [1], indirect=True)
def test_a_stop_in_a_step_that_cannot_be_given_up_goes_back_to_the_last_checkpoint(whole: Whole, lives: Lives, staleness: int) -> None:
    """One micro-batch takes minutes: the run is down in seconds all the same, and says what is trained again."""
    run_dir = whole.run_dir.with_name("abandoned")
    flags = ["--run_dir", str(run_dir), "--max_staleness", str(staleness), "--engines", "2", "--checkpoint_every", "2"]
    began = time.monotonic()
    done = lives(*flags, slow=(5, 100.0))
    assert done["code"] == 130 and time.monotonic() - began < 20.0, done["text"]
    assert "step 6 had not ended 5 s after the stop, and is given up: the run can go on from the checkpoint of step 4" in done["text"]
    again = lives(*flags, "--resume")
    assert again["code"] == 0, again["text"]
    assert_equal(whole.run_dir, run_dir, staleness)


@pytest.mark.parametrize("staleness", [0], indirect=True)
def test_damage_is_one_sentence_and_the_checkpoint_before_is_used(whole: Whole, lives: Lives, staleness: int) -> None:
    run_dir = whole.run_dir.with_name("broken")
    shutil.copytree(whole.run_dir, run_dir)
    flags = ["--run_dir", str(run_dir), "--max_staleness", str(staleness), "--engines", "2", "--resume"]
    shard = next((run_dir / "checkpoints" / f"step-{STEPS:06d}" / "learner").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])  # half-written
    done = lives(*flags)
    assert done["code"] == 0 and f"resumes at step {STEPS - 1}" in done["text"]
    (said,) = [line for line in done["text"].splitlines() if "damaged" in line]
    assert str(shard) in said and "trying the one before" in said
    assert_equal(whole.run_dir, run_dir, staleness)
    foreign = {"manifest.json": '{"format": "another program\'s"}', "groups.npz": "", "controller.json": "[]"}
    for folder, (name, text) in zip(sorted((run_dir / "checkpoints").iterdir()), foreign.items(), strict=True):
        (folder / name).write_text(text)
    done = lives(*flags)
    assert done["code"] == 2 and "Traceback" not in done["text"]
    assert "manifest.json" in done["text"].splitlines()[-1] and "start a new run" in done["text"].splitlines()[-1]


@pytest.mark.parametrize("staleness", [0], indirect=True)
def test_a_checkpoint_of_another_model_is_named_and_the_one_before_is_used(whole: Whole, lives: Lives, staleness: int) -> None:
    """Only the ranks can tell. The last checkpoint of a run that has none but such is an error of one sentence."""
    run_dir, other = whole.run_dir.with_name("mixed"), whole.run_dir.with_name("other")
    shutil.copytree(whole.run_dir, run_dir)
    assert lives("--run_dir", str(other), "--tiny_hidden", "64")["code"] == 0
    newest, flags = run_dir / "checkpoints" / f"step-{STEPS:06d}", ["--run_dir", str(run_dir), "--engines", "2", "--resume"]
    shutil.rmtree(newest)
    shutil.copytree(other / "checkpoints" / newest.name, newest)
    done = lives(*flags)
    assert done["code"] == 0 and f"resumes at step {STEPS - 1}" in done["text"], done["text"]
    (said,) = [line for line in done["text"].splitlines() if "another model" in line]
    assert str(newest) in said and "trying the one before" in said
    assert_equal(whole.run_dir, run_dir, staleness)
    shutil.rmtree(run_dir / "checkpoints")
    shutil.copytree(other / "checkpoints", run_dir / "checkpoints")
    done = lives(*flags)
    assert done["code"] == 2 and "Traceback" not in done["text"]
    assert "another model" in done["text"].splitlines()[-1]


@pytest.mark.parametrize("staleness", [0], indirect=True)
@pytest.mark.parametrize(("flag", "value"), [("seed", "5"), ("tiny_hidden", "64"), ("variant", "vapo")])
def test_a_resume_that_is_refused_leaves_the_run_as_it_was(
    whole: Whole, lives: Lives, staleness: int, tmp_path: Path, flag: str, value: str
) -> None:
    """Its config, its books and every log beyond its newest checkpoint, also where each of its checkpoints was tried."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole.run_dir, run_dir)
    shutil.rmtree(sorted((run_dir / "checkpoints").iterdir())[-1])
    before = {p.name: p.read_bytes() for p in run_dir.iterdir() if p.suffix in (".toml", ".jsonl")}
    done = lives("--run_dir", str(run_dir), "--resume", f"--{flag}", value)
    assert done["code"] == 2 and "Traceback" not in done["text"], done["text"]
    assert {name: (run_dir / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("staleness", [0], indirect=True)
def test_flags_that_no_checkpoint_fits_are_told_of_even_where_the_last_is_damaged(
    whole: Whole, lives: Lives, staleness: int, tmp_path: Path
) -> None:
    """Not that the run must be started anew."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole.run_dir, run_dir)
    for folder in sorted((run_dir / "checkpoints").iterdir())[:-1]:
        (folder / "groups.npz").unlink()
    done = lives("--run_dir", str(run_dir), "--resume", "--variant", "vapo")
    last = done["text"].splitlines()[-1]
    assert done["code"] == 2 and f"step-{STEPS:06d}" in last and "resume with the baseline of the run that wrote it" in last


@pytest.mark.parametrize("staleness", [0], indirect=True)
def test_a_run_ends_cleanly_when_every_prompt_is_retired_also_in_two_lives(whole: Whole, lives: Lives, staleness: int) -> None:
    """With a curriculum on top. Synchronously both are exact as well: they go by the groups of each step, in dispatch order."""
    flags = ["--retire_after", "1", "--curriculum", "true", "--engines", "2", "--on_refill_limit", "short"]
    one, two = whole.run_dir.with_name("retired"), whole.run_dir.with_name("retired-in-two-lives")
    done = lives(*flags, "--run_dir", str(one))
    assert done["code"] == 0 and "every prompt is retired" in done["text"], done["text"]
    found = rows(one / "metrics.jsonl")
    prompts = len({row["row"] for row in rows(whole.run_dir / "samples.jsonl")})
    assert len(found) < STEPS and 0 < found[-2]["run/prompts_retired"] <= found[-1]["run/prompts_retired"] <= prompts
    assert books(one)["live"] == [] and rows(one / "evaluations.jsonl")[-1]["step"] == len(found)
    assert lives(*flags, "--run_dir", str(two), kill=("filling", 2))["code"] == -9
    assert lives(*flags, "--run_dir", str(two), "--resume")["code"] == 0
    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        assert rows(one / name, TIMED) == rows(two / name, TIMED), name
    assert books(one) == books(two)


@pytest.mark.parametrize("staleness", [1], indirect=True)
def test_drained_updates_mix_no_versions_and_train_the_same_groups(whole: Whole, lives: Lives, staleness: int) -> None:
    run_dir = whole.run_dir.with_name("drained")
    done = lives("--run_dir", str(run_dir), "--max_staleness", "1", "--engines", "2", "--weight_update", "drained", seed=3)
    assert done["code"] == 0, done["text"]
    assert_equal(whole.run_dir, run_dir, staleness)
    assert max(row.get("sync/seconds_drained", 0.0) for row in rows(run_dir / "metrics.jsonl")) > 0
    assert all(row["versions"][0] == row["versions"][1] for row in rows(run_dir / "samples.jsonl"))


@pytest.mark.parametrize("staleness", [1], indirect=True)
def test_what_is_stuck_ends_as_a_named_failure_while_the_rest_goes_on(whole: Whole, lives: Lives, staleness: int) -> None:
    """A group that is never answered, one that kills every engine, one that is never judged, and an engine that hangs."""
    run_dir = whole.run_dir.with_name("stuck")
    deadlines = ["--group_timeout", "1", "--verify_timeout", "0.5", "--attempts", "2", "--watchdog_seconds", "0.5"]
    began = time.monotonic()
    done = lives("--run_dir", str(run_dir), "--max_staleness", "1", "--engines", "3", "--verifier_actors", "2", *deadlines, stuck=True)
    assert done["code"] == 0 and time.monotonic() - began < 60, done["text"]
    found = books(run_dir)
    assert {k: n for k, n in found["groups"].items() if "failed" in k} == {"failed(generation)": 2, "failed(verification)": 1}, done["text"]
    assert found["groups"]["trained"] == 4 * STEPS and found["live"] == []
    reasons = found["attempts_failed"]
    assert reasons["deadline"] >= 4 and reasons["EngineDeadError"] == 2, reasons
    said = [line for line in done["text"].splitlines() if line.startswith("watchdog: ")]
    for what in (r"group 6 \(attempt \d of 2\) is generated by engine \d", r"group 12 \(attempt \d of 2\) is verified by verifier \d"):
        assert any(re.search(what, line) for line in said), said
    assert all(re.match(r"watchdog: since \d\d:\d\d:\d\d step \d+ waits: group \d+ ", line) for line in said if "waits: group" in line)
