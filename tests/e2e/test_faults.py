"""Processes and a node killed with -9 in the middle of a run: it goes on, and its books close; beyond its budget it stops in order.

Does not cover: long runs under many faults on the real engine, whole nodes among them (`make chaos`).
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.nodes import Cluster
from tests.chaos.processes import MARK, by_role, left_behind, marked
from tests.chaos.processes import kill as kill_all
from tests.chaos.training import Training

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


FAKE = [
    "arithmetic", "--engine", "fake", "--sources", '[{"task": "addition", "verifier": "random"}]', "--eval_prompts", "0",
    "--warmup_steps", "0", "--tiny_layers", "2", "--batch_size", "8", "--group_size", "4", "--max_staleness", "1",
    "--engines", "2", "--engine_cpus", "2", "--learner_cpus", "4", "--verifier_actors", "2", "--verifier_cpus", "1",
    "--verifier_processes", "1", "--checkpoint_every", "5", "--steps", "100000", "--display", "plain", "--wandb", "off",
]  # fmt: skip


def nodes(head: int, node: int) -> Iterator[Cluster]:
    """A head and an extra raylet with so many CPUs; everything of them is gone in the end."""
    cluster = Cluster(uuid.uuid4().hex, head, node)
    yield cluster
    cluster.close()
    kill_all(marked(cluster.environment[MARK]))


@pytest.fixture
def two_nodes() -> Iterator[Cluster]:
    """One engine and one verifier lie on the extra node, all else on the head."""
    yield from nodes(7, 3)


@pytest.fixture
def rank_away() -> Iterator[Cluster]:
    """A learner rank lies on the extra node."""
    yield from nodes(6, 8)


@pytest.mark.skipif(not LONG, reason="make soak has it")
def test_a_lost_node_is_waited_for_its_groups_are_generated_again_and_the_budget_holds(tmp_path: Path, two_nodes: Cluster) -> None:
    """With the deterministic engine, which starts in seconds; groups lie in the nodes' object stores, as long answers do."""
    run = Training(tmp_path / "run", [*FAKE, "--ray_address", two_nodes.address, "--max_restarts", "2"], two_nodes.environment, {})
    run.start()
    run.until(r"step 5/")
    away = {role for role, pids in by_role(two_nodes.environment[MARK]).items() if set(pids) & two_nodes.node_pids()}
    assert away >= {"generator", "verifier"} and "learner" not in away
    two_nodes.kill_node()
    run.until(r"(engine|verifier) \d waits for a place: its node is lost")
    run.until(r"step \d+/")  # it goes on without the node
    two_nodes.start_node()
    run.until(r"(engine|verifier) \d is back")
    run.until(r"(engine|verifier) \d is back")
    run.until(r"step \d+/")
    assert [line for _, line in run.lines if "kept groups are lost with their node" in line]
    assert run.problems() == []

    kill_all(by_role(two_nodes.environment[MARK])["verifier"][:1])
    assert run.end() == 1, run.tail()
    assert "more actors were lost than max_restarts = 2 allows (engine 1, verifier 2)" in run.tail()
    reached = lines(run.run_dir / "metrics.jsonl")[-1]["step"]
    assert (run.run_dir / "checkpoints" / f"step-{reached:06d}").is_dir(), "beyond the budget it stops with a checkpoint"
    assert run.problems() == [] and max(r["ledger/groups_failed"] for r in lines(run.run_dir / "metrics.jsonl")) == 0
    assert left_behind(two_nodes.environment[MARK], 10.0, services_only=True) == {}


@pytest.mark.skipif(not LONG, reason="make soak has it")
def test_a_node_with_a_learner_rank_takes_the_run_back_to_its_checkpoint(tmp_path: Path, rank_away: Cluster) -> None:
    run = Training(tmp_path / "run", [*FAKE, "--ray_address", rank_away.address, "--learner_ranks", "2"], rank_away.environment, {})
    run.start()
    run.until(r"step 7/")
    assert set(by_role(rank_away.environment[MARK])["learner"]) & rank_away.node_pids()
    rank_away.kill_node()
    run.until(r"life 2 of the run begins at the last checkpoint")
    run.until(r"waits for a node: the run needs")
    rank_away.start_node()
    run.until(r"resumes at step 5")
    run.until(r"step 12/")
    assert run.stop() == 130 and run.problems() == []
    assert [r["step"] for r in lines(run.run_dir / "metrics.jsonl")] == list(range(1, run.step + 1))
