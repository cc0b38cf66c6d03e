"""The reaper: what carries the mark is killed and the folder removed when the owner is gone, however it went, and nothing else is.

Does not cover: processes of other users, and an engine (tests/e2e/test_faults.py kills the owner of a real one).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from rollout import reaper

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]


def gone(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it ended within so many seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_marked_processes_and_the_folder_end_with_their_owner_and_others_stay(end: signal.Signals, tmp_path: Path) -> None:
    mark = f"WINNOW_TEST_OWNER={uuid.uuid4().hex}"
    name, value = mark.split("=")
    owner = subprocess.Popen(SLEEP)
    child = subprocess.Popen(SLEEP, env={**os.environ, name: value}, start_new_session=True)
    other = subprocess.Popen(SLEEP, env={**os.environ, name: value + "x"})
    folder = tmp_path / "sockets"
    folder.mkdir()
    (folder / "left").touch()
    watcher = reaper.start(owner.pid, mark, str(folder))
    try:
        time.sleep(0.3)
        assert child.poll() is None and folder.exists(), "the owner lives, and so must its child"
        owner.send_signal(end)
        owner.wait()
        assert gone(child, 5.0) and child.returncode == -signal.SIGKILL
        assert other.poll() is None
        assert gone(watcher, 15.0) and not folder.exists() and tmp_path.exists()
    finally:
        for process in (owner, child, other, watcher):
            process.kill()
            process.wait()


def test_an_owner_that_is_gone_already_is_no_reason_to_wait(tmp_path: Path) -> None:
    mark = f"WINNOW_TEST_OWNER={uuid.uuid4().hex}"
    name, value = mark.split("=")
    owner = subprocess.Popen([sys.executable, "-c", ""])
    owner.wait()
    child = subprocess.Popen(SLEEP, env={**os.environ, name: value})
    watcher = reaper.start(owner.pid, mark, str(tmp_path / "none"))
    try:
        assert gone(child, 5.0)
    finally:
        for process in (child, watcher):
            process.kill()
            process.wait()
