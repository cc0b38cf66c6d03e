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
import subprocess
import sys
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
    """Runs one life: flags, the stage and step to be killed at, the seed of its speeds."""
    data = tmp_path_factory.mktemp("data") / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+{3 * n}=", "answer": str(4 * n)}) + "\n" for n in range(10, 30)))
    common = [
        "arithmetic", "--sources", json.dumps([{"path": str(data), "verifier": "numeric"}]), "--warmup_steps", "0", "--batch_size", "4",
        "--group_size", "2", "--minibatches", "2", "--tiny_layers", "1", "--tiny_hidden", "32", "--lr_warmup_steps", "3",
        "--eval_prompts", "4", "--heldout_share", "0.3", "--eval_every", "4", "--engine", "fake", "--wandb", "off", "--display", "plain",
        "--steps", str(STEPS), "--checkpoint_every", "1", "--keep_checkpoints", "3",
    ]  # fmt: skip
    pipe = subprocess.PIPE
    program = subprocess.Popen([sys.executable, "-m", "tests.cluster.lives"], cwd=ROOT, text=True, stdin=pipe, stdout=pipe)
    assert program.stdin is not None and program.stdout is not None

    def live(*flags: str, kill: tuple[str, int] | None = None, seed: int = 0) -> dict[str, Any]:
        program.stdin.write(json.dumps({"flags": [*common, *flags], "kill": kill, "seed": seed}) + "\n")
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
    assert any(row["ledger/groups_in_flight"] for row in found) == any(row["ledger/groups_kept"] for row in found) == bool(staleness)
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
