"""Runs submitted to a real Ray head with dashboard and job server, as a user submits them.

Does not cover: several nodes, and a head that is reached over a network.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.operate.conftest import BIN, ROOT, RayHead

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SHORT = [
    "--batch_size", "4", "--group_size", "4", "--tiny_layers", "2", "--warmup_steps", "0", "--eval_prompts", "16", "--wandb", "off",
    "--sources", '[{"task": "addition", "verifier": "random"}]',
]  # fmt: skip
WINNOW = (str(BIN / "python"), "-m", "cluster.launch")
TRAIN = (*WINNOW, "train", "arithmetic", "--wandb", "off")


def test_ray_job_submit_trains_to_the_end(ray_head: RayHead, tmp_path: Path) -> None:
    """With Ray's own command; rewards by coin flip, so that untrained answers are informative."""
    run_dir = tmp_path / "run"
    train = ["python", "-m", "cluster.launch", "train", "arithmetic", *SHORT, "--steps", "2", "--run_dir", str(run_dir)]
    done = ray_head.run([str(BIN / "ray"), "job", "submit", "--address", ray_head.jobs, "--working-dir", ".", "--", *train], cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert re.search(r"step 2/2 .*reward", done.stdout), done.stdout
    assert (run_dir / "summary.json").is_file()


def test_winnow_submit_is_stopped_half_way_and_goes_on_when_submitted_again(ray_head: RayHead, tmp_path: Path) -> None:
    """The same line twice: the second follows the run from the checkpoint of the stop to its end."""
    run_dir = tmp_path / "mine"
    line = [*WINNOW, "submit", "arithmetic", *SHORT, "--run_dir", str(run_dir), "--address", ray_head.jobs]
    started = ray_head.run([*line, "--steps", "100000", "--detach"])
    assert started.returncode == 0 and f"run folder {run_dir}" in started.stdout, started.stdout
    metrics = run_dir / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)

    held = ray_head.run([*line, "--steps", "100000"])
    assert held.returncode == 2 and held.stdout.count("\n") == 1 and "is held by the job mine-" in held.stdout, held.stdout

    # What the job holds may be free later; so it is waited for, in words.
    busy = ray_head.run([*TRAIN, "--engine_cpus", "7.5", "--placement_timeout", "2", "--ray_address", ray_head.address])
    assert busy.returncode == 2 and "waits for a place" in busy.stdout, busy.stdout
    assert "other jobs hold what it needs; 0 of 0 GPUs and 7.4 of 8 CPUs are free" in busy.stdout.splitlines()[-1]

    stopped = ray_head.run([*WINNOW, "jobs", "stop", str(run_dir), "--address", ray_head.jobs])
    assert stopped.returncode == 0 and "stopped by SIGTERM" in stopped.stdout, stopped.stdout
    reached = len(metrics.read_text().splitlines())
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step-{reached:06d}"]

    again = ray_head.run([*line, "--steps", str(reached + 2)])
    assert again.returncode == 0, again.stdout
    assert f"resumes at step {reached}" in again.stdout and f"step {reached + 2}/{reached + 2}" in again.stdout, again.stdout
    assert [json.loads(row)["step"] for row in metrics.read_text().splitlines()] == list(range(1, reached + 3))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--engines", "40"],
            "the run needs 10.35 CPUs (rollout.engines = 40 with engine_cpus = 0.25, model.learner_ranks = 1 with",
        ),
        (["--engine_gpus", "1"], "the run needs 1 GPUs (rollout.engines = 1 with engine_gpus = 1) and the cluster has 0 on 1 node"),
    ],
)
def test_a_placement_that_can_never_be_is_one_sentence_within_seconds(
    ray_head: RayHead, tmp_path: Path, flags: list[str], said: str
) -> None:
    started = time.monotonic()
    done = ray_head.run([*TRAIN, *flags, "--run_dir", str(tmp_path / "run"), "--ray_address", ray_head.address])
    assert time.monotonic() - started < 10.0
    assert done.returncode == 2 and done.stdout.count("\n") == 1 and said in done.stdout, done.stdout
    assert not (tmp_path / "run").exists()


def test_a_placement_that_may_come_with_new_nodes_says_what_it_waits_for(ray_head: RayHead, tmp_path: Path) -> None:
    flags = ["--engines", "40", "--autoscaling", "true", "--placement_timeout", "2", "--run_dir", str(tmp_path / "run")]
    done = ray_head.run([*TRAIN, *flags, "--ray_address", ray_head.address])
    assert done.returncode == 2 and "waits for a place, at most placement_timeout = 2 s: the run needs 10.35 CPUs" in done.stdout, (
        done.stdout
    )
    assert "so nodes have to be added" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("port", ["9", "the dashboard's"])
def test_a_cluster_that_does_not_answer_is_one_sentence(ray_head: RayHead, port: str) -> None:
    address = "127.0.0.1:9" if port == "9" else ray_head.jobs.removeprefix("http://")
    done = ray_head.run([*TRAIN, "--ray_address", address])
    assert (
        done.returncode == 2
        and done.stdout.count("\n") == 1
        and f"cluster.ray_address = '{address}' leads to no Ray cluster" in done.stdout
    )


def wait_for(true: Callable[[], bool], seconds: float = 240.0) -> None:
    """Until something holds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.3)
