"""`winnow submit` and `winnow jobs` up to the submission: arguments, the run's folder, finding a job, and every refusal.

Does not cover: a real job server (tests/operate/test_submit.py).
"""

from __future__ import annotations

import shlex
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import jobs, launch, load
from cluster.runfolder import RunFolder, has_run, holder
from cluster.submit import _as_words, _own_flags, refuse_held, run_folder
from rollout.errors import UserError


def job(
    job_id: str, status: str = "RUNNING", run_dir: str | None = None, entrypoint: str = "python x.py", start: int = 1
) -> SimpleNamespace:
    metadata = {"job_name": "mine", "run_dir": run_dir} if run_dir else {}
    state = SimpleNamespace(value=status, is_terminal=lambda: status in ("STOPPED", "SUCCEEDED", "FAILED"))
    return SimpleNamespace(submission_id=job_id, status=state, metadata=metadata, entrypoint=entrypoint, start_time=start)


def client(*found: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(list_jobs=lambda: list(found))


def test_own_flags_are_taken_out_wherever_they_stand() -> None:
    assert _own_flags(["arithmetic", "--address", "http://h:1", "--lr", "1"]) == (["arithmetic", "--lr", "1"], "http://h:1", False)
    assert _own_flags(["--detach", "a", "--address=x"]) == (["a"], "x", True)
    with pytest.raises(UserError, match="--address has no value"):
        _own_flags(["a", "--address"])


def test_flags_are_sent_so_that_they_parse_to_the_same() -> None:
    typed = [
        "--lr",
        "1e-4",
        "--stop",
        '["\\n", "a b"]',
        "--resume",
        "--sources",
        '[{"task": "addition"}]',
        "--run_dir",
        "it's here",
        "--seed=3",
    ]
    flags, rest = load.parse_flags(typed)
    words = shlex.split(shlex.join(_as_words({**flags, "variant": None})))
    assert load.parse_flags(words) == ({**flags, "variant": None}, rest)


def test_a_run_is_the_same_where_its_settings_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = run_folder(load.load("arithmetic"))
    assert first.parent == tmp_path / "runs" and first.name.startswith("arithmetic-")
    assert run_folder(load.load("arithmetic", ["--steps", "40", "--wandb", "off", "--ray_address", "h:1"])) == first
    assert run_folder(load.load("arithmetic", ["--steps", "41"])) != first
    assert run_folder(load.load("arithmetic", ["--name", "mine"])).name.startswith("mine-")
    assert run_folder(load.load("arithmetic", ["--run_dir", "here"])) == tmp_path / "here"


def test_a_job_is_found_by_id_name_and_folder_and_live_ones_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path / "runs" / "a")
    by_ray = job("raysubmit_1", entrypoint=f"python -m cluster.launch train x --run_dir={folder}b --steps 3")
    old, live, late = job("a-1", "STOPPED", folder, start=1), job("a-2", "RUNNING", folder, start=2), job("a-3", "FAILED", folder, start=3)
    here = client(old, live, late, by_ray)
    assert [j.submission_id for j in jobs.jobs(here)] == ["a-3", "a-2", "a-1", "raysubmit_1"]
    for what in ("a", "mine", folder, "runs/a"):
        assert jobs.find(here, what) is live
    assert jobs.find(here, "a-1") is old and jobs.find(client(old, late), "mine") is late
    assert jobs.find(here, f"{folder}b") is by_ray and jobs.holder(here, Path(f"{folder}b")) is by_ray
    assert jobs.holder(client(old, late), Path(folder)) is None
    with pytest.raises(UserError, match="no job 'b' by id.*a-3, a-2, a-1"):
        jobs.find(client(old, live, late), "b")


def test_a_folder_that_is_held_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="is held by the job a-2: "):
        refuse_held(client(job("a-2", run_dir=str(folder))), folder)
    assert holder(folder) is None and not has_run(folder) and not folder.exists()
    held = RunFolder.open(folder)
    assert (holder(folder) or "").startswith("pid ") and not has_run(folder)
    with pytest.raises(UserError, match="held by another live run .pid "):
        refuse_held(client(), folder)
    held.write_config("")
    held.close()
    assert holder(folder) is None and has_run(folder)
    refuse_held(client(job("a-2", "STOPPED", str(folder))), folder)


@pytest.fixture
def silent() -> Iterator[str]:
    """Something that listens and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_an_address_that_does_not_answer_is_one_sentence(
    silent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "ANSWER_SECONDS", 2.0)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # not what was asked for
    started = time.monotonic()
    assert launch.main(["jobs", "--address", silent]) == 2
    assert launch.main(["submit", "arithmetic", "--address", "http://127.0.0.1:9"]) == 2
    assert time.monotonic() - started < 30.0
    first, second = capsys.readouterr().err.splitlines()
    assert f"no job server of Ray at {silent} (nothing answered within 2 s)" in first
    assert "no job server of Ray at http://127.0.0.1:9 (nothing listens there)" in second


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["submit"], "takes one recipe, got none"),
        (["submit", "arithmetic", "--lrr", "3"], "unknown flag --lrr"),
        (["submit", "arithmetic", "--lr", "fast"], 'lr = "fast"'),
        (["submit", "arithmetic", "--model", "models"], "models are not sent along"),
        (["jobs", "halt", "x"], "does not know 'halt x'"),
        (["jobs", "stop"], "does not know 'stop'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_asked(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert launch.main([*argv, "--address", "http://127.0.0.1:9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
