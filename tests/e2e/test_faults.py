"""Processes killed with -9 in the middle of a run on the real engine: it goes on, and its books close.

Does not cover: a whole node, and long runs under many faults.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LONG = bool(os.environ.get("WINNOW_LONG"))  # make soak


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def victims(command: Any, name: str) -> list[psutil.Process]:
    """Processes of a run by a part of their command."""
    found = []
    for process in psutil.Process(command.process.pid).children(recursive=True):
        try:
            if name in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill(command: Any, name: str) -> int:
    """SIGKILL to all of them; how many there were."""
    found = victims(command, name)
    for process in found:
        os.kill(process.pid, signal.SIGKILL)
    return len(found)


def test_a_run_survives_the_loss_of_each_of_its_services(tmp_path: Path, small: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Verifier processes, the verifier actor, the engine's core, (when long) the rollout actor and one of two learner ranks, in turn."""
    run_dir = tmp_path / "run"
    steps = 40 if LONG else 24
    flags = ["--steps", str(steps), "--checkpoint_every", "2", "--batch_size", "8", "--verifier_processes", "2", "--learner_ranks", "2"]
    run = small("--run_dir", str(run_dir), *flags)
    run.until(r"step 3/")
    assert kill(run, "verifier.worker") >= 2
    run.until(r"step 6/")
    assert kill(run, "ray::VerifierActor") == 1
    run.until(r"verifier 0 is lost")
    run.until(r"step \d+/")
    assert kill(run, "VLLM::EngineCore") >= 1
    run.until(r"engine 0 is lost")
    run.until(r"engine 0 is back")
    run.until(r"step \d+/")
    if LONG:
        assert kill(run, "ray::Rollout") == 1
        run.until(r"engine 0 is lost")
        run.until(r"engine 0 is back")
        run.until(r"step \d+/")
    os.kill(victims(run, "ray::LearnerRank")[0].pid, signal.SIGKILL)
    run.until(r"a learner rank is lost")
    run.until(r"resumes at step \d+")
    assert run.end(400) == 0, run.text
    assert run.left_behind() == []

    rows = lines(run_dir / "metrics.jsonl")
    assert [r["step"] for r in rows] == list(range(1, steps + 1))
    last = rows[-1]
    assert last["ledger/groups_trained"] == 8 * steps and last["ledger/groups_failed"] == 0
    assert last["ledger/groups_kept"] == last["ledger/groups_in_flight"] == 0
    assert max(r["mismatch/max"] for r in rows) < 1e-4, "an engine generated with other weights than the learner's"
    from cluster.ledger import main

    assert main([str(run_dir)]) == 0


def test_an_owner_that_is_killed_takes_its_engine_with_it(tmp_path: Path, small: Any) -> None:
    """The whole driver, with -9: Ray's workers and vLLM's processes are gone soon after."""
    run = small("--run_dir", str(tmp_path / "run"), "--steps", "100000")
    run.until(r"step 1/")
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(10)
    deadline = time.monotonic() + 30
    while (left := run.left_behind(1.0)) and time.monotonic() < deadline:
        pass
    assert [line for line in left if "VLLM" in line or "verifier.worker" in line or "ray::" in line] == []
