"""`winnow sweep` from its command line to its results, but for the jobs: what is refused before anything starts, and what is written.

Does not cover the runs as Ray jobs (tests/operate/test_sweep.py).
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from cluster import load
from cluster.launch import main
from cluster.sweep_spec import read_spec
from tests.cluster.making_runs import make_run

SPEC = """
recipe = "arithmetic"
[flags]
steps = 12
[axes]
engines = [1, 2]
seed = [0, 1]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a spec, s.toml; no cluster is named by the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "s.toml").write_text(SPEC)
    return tmp_path


def trained(sweep: Path, steps: int = 12) -> None:
    """Every run of the spec as if it had been made."""
    for planned in read_spec("s.toml").runs:
        make_run(sweep / "runs" / planned.name, steps, seed=planned.config.seed)
        (sweep / "runs" / planned.name / "config.toml").write_text(load.to_toml(planned.config))


def test_a_sweep_whose_runs_are_all_done_writes_its_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = folder / "runs" / "sweep-s"
    trained(sweep)
    assert main(["sweep", "s.toml"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"4 runs over engines, seed in {sweep}" and out.splitlines()[-1] == str(sweep / "sweep.html")
    assert "| engines | runs | tokens/s" in out and "weak scaling is not in this grid" in out
    assert (sweep / "table.md").read_text() in out and (sweep / "spec.toml").read_text() == SPEC
    assert len((sweep / "runs.csv").read_text().splitlines()) == 5
    page = (sweep / "sweep.html").read_text()
    headings = ("Tokens a second", "Strong scaling", "Share of waiting, by stage", "Reward", "What to watch", "4 runs over engines")
    for heading in headings:
        assert f"<h2>{heading}" in page, heading
    assert page.count('id="plot') == len(json.loads(page.split('id="data">')[1].split("</script>")[0])["figures"])


def test_a_dry_run_lists_the_runs_and_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "s.toml", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"engines={e},seed={s}" for e in (1, 2) for s in (0, 1)]
    assert os.listdir(folder) == ["s.toml"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("engines = [1, 0]", "run engines=0: rollout.engines = 0"),
        ("enginse = [1]", "unknown flag axes.enginse"),
        ("engine_gpus = [0, 3]", "run engine_gpus=3: the run needs 3 GPUs"),
    ],
)
def test_what_is_wrong_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    (folder / "s.toml").write_text(f'recipe = "arithmetic"\n[axes]\n{text}')
    assert main(["sweep", "s.toml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1 and said in captured.err
    assert os.listdir(folder) == ["s.toml"]


def test_a_folder_whose_runs_had_other_settings_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(folder / "runs" / "sweep-s")
    (folder / "s.toml").write_text(SPEC.replace("steps = 12", "steps = 12\nlr = 7e-5"))
    assert main(["sweep", "s.toml"]) == 2
    assert "was made with optim.lr = 0.0001 and the spec now says 7e-05: give another --sweep_dir" in capsys.readouterr().err
    (folder / "s.toml").write_text(SPEC.replace("seed = [0, 1]", "seed = [0]"))
    assert main(["sweep", "s.toml"]) == 0, "fewer runs are a part of the same grid"


def test_one_sweep_at_a_time_holds_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x").mkdir()
    with open(folder / "x" / "sweep.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["sweep", "s.toml", "--sweep_dir", "x"]) == 2
    assert "held by another live sweep" in capsys.readouterr().err
    assert main(["sweep", "s.toml", "--sweep_dir", "s.toml/x"]) == 2
    assert "cannot be written" in capsys.readouterr().err
