"""`winnow sweep` over 1 and 2 generators and staleness 0 and 1 on real engines: interrupted in the middle, it goes on where it was.

On a cluster that is given, with the deterministic engine, several runs go on at once. Does not cover several nodes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.operate.conftest import ROOT, RayHead

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

SPEC = """
recipe = "arithmetic"
[flags]
steps = 30
batch_size = 8
eval_prompts = 32
wandb = "off"
[axes]
engines = [1, 2]
max_staleness = [0, 1]
"""
RUNS = [f"engines={e},max_staleness={k}" for e in (1, 2) for k in (0, 1)]


class Sweep:
    """The command under way, in a session of its own."""

    def __init__(self, folder: Path) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.launch", "sweep", "s.toml", "--sweep_dir", "sweep"],
            cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def until(self, pattern: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return
        raise AssertionError(f"no line matched {pattern!r}:\n{self.text}")

    def end(self, seconds: float = 900.0) -> int:
        out, _ = self.process.communicate(timeout=seconds)
        self.lines += out.splitlines()
        return self.process.returncode

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "s.toml").write_text(SPEC)
    yield tmp_path


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def wait_for_step(run: Path, step: int, sweep: Sweep, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not (run / "metrics.jsonl").is_file() or len(rows(run)) < step:
        assert sweep.process.poll() is None and time.monotonic() < deadline, f"{run} did not reach step {step}"
        time.sleep(0.1)


def test_an_interrupted_sweep_goes_on_where_it_was(folder: Path) -> None:
    sweep, runs = folder / "sweep", folder / "sweep" / "runs"
    started = time.monotonic()
    first = Sweep(folder)
    first.until(rf"^{RUNS[0]}: done")
    wait_for_step(runs / RUNS[1], 1, first)
    os.killpg(first.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    assert first.end() == 130, first.text
    assert f"{RUNS[1]}: stopped at step" in first.text
    reached = rows(runs / RUNS[1])[-1]["step"]
    assert 1 <= reached < 30 and not (runs / RUNS[1] / "summary.json").exists() and not (runs / RUNS[2]).exists()
    kept = (runs / RUNS[0] / "metrics.jsonl").read_bytes()

    again = Sweep(folder)
    assert again.end() == 0, again.text
    assert "1 of 4 runs are done already" in again.text and f"{RUNS[1]}: goes on (run 2 of 4)" in again.text
    assert (runs / RUNS[0] / "metrics.jsonl").read_bytes() == kept
    assert f"resumes at step {reached}" in (sweep / "runs" / f"{RUNS[1]}.log").read_text()
    assert [len(rows(runs / run)) for run in RUNS] == [30, 30, 30, 30]
    assert [path.name.startswith("warmup-") for path in (sweep / "warmup").iterdir()] == [True], "one warm-up, made once"
    assert sum("warm-up took" in (runs / f"{run}.log").read_text() for run in RUNS) == 1

    assert again.lines[-1] == str(sweep / "sweep.html")
    table = (sweep / "table.md").read_text().splitlines()
    assert len(table) == 6 and "generators wait" in table[0]
    page = (sweep / "sweep.html").read_text()
    assert "Strong scaling: more generators, the same batch" in page and "Share of waiting, by stage" in page
    assert time.monotonic() - started < 25 * 60


def test_runs_go_to_a_cluster_that_is_given_several_at_once(ray_head: RayHead, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        'recipe = "arithmetic"\nat_once = 2\n[axes]\nseed = [0, 1, 2]\n'
        '[flags]\nengine = "fake"\nsteps = 2\nwarmup_steps = 0\nbatch_size = 4\ngroup_size = 4\neval_prompts = 8\n'
        'tiny_layers = 1\nwandb = "off"\n'
    )
    line = [sys.executable, "-m", "cluster.launch", "sweep", str(tmp_path / "s.toml"), "--sweep_dir", str(tmp_path / "sweep")]
    done = ray_head.run([*line, "--address", ray_head.jobs], timeout=400)
    assert done.returncode == 0, done.stdout
    said = done.stdout.splitlines()
    order = [said.index(next(text for text in said if text.startswith(f"seed={seed}: starts"))) for seed in (0, 1, 2)]
    ended = min(number for number, text in enumerate(said) if ": done after" in text)
    assert order[0] < order[1] < ended < order[2], done.stdout
    assert [len(rows(tmp_path / "sweep" / "runs" / f"seed={seed}")) for seed in (0, 1, 2)] == [2, 2, 2]
    assert "| runs | tokens/s" in done.stdout and "| 3    |" in done.stdout


def test_nothing_of_a_sweep_is_left_when_it_is_killed(folder: Path) -> None:
    """Hard, in the middle: its Ray and the job end with it; the folder can be gone on with."""
    sweep = Sweep(folder)
    sweep.until(rf"^{RUNS[0]}: starts")
    run = folder / "sweep" / "runs" / RUNS[0]
    deadline = time.monotonic() + 120
    while not (run / "config.toml").is_file() and time.monotonic() < deadline:
        time.sleep(0.2)
    sweep.process.kill()
    sweep.process.wait()
    deadline = time.monotonic() + 60
    while (left := alive(str(folder))) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, left


def alive(text: str) -> list[str]:
    """Command lines of living processes that name `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if text in line and int(path.parent.name) != os.getpid():
            found.append(line)
    return found
