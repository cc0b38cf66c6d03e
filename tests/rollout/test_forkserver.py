"""The process that cores are forked from: a fork has the environment of who asked, libgomp is loaded first once, and nothing is left.

Run with nothing imported in advance. Does not cover: vLLM's core itself (tests/e2e/test_engine.py looks whose child it is, and every
end-to-end test runs on one).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rollout import forkserver

# A program of its own, since a process has one such server.
PROGRAM = """
import json, multiprocessing.forkserver, os, sys
from rollout import forkserver

def tell(path):
    with open(path, "w") as file:
        json.dump({"name": os.environ.get("WINNOW_TEST_NAME"), "gone": os.environ.get("WINNOW_TEST_GONE"), "parent": os.getppid()}, file)

if __name__ == "__main__":
    os.environ["WINNOW_TEST_NAME"], os.environ["WINNOW_TEST_GONE"] = "before", "there"
    multiprocessing.set_forkserver_preload = lambda names: None  # nothing is imported
    forkserver.start()
    forkserver.start()
    forkserver.stop()  # another engine's core is its child
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    os.environ["WINNOW_TEST_NAME"] = "after"
    del os.environ["WINNOW_TEST_GONE"]
    process = forkserver.Context().Process(target=tell, args=(sys.argv[1],))
    process.start()
    process.join()
    forkserver.stop()
    try:
        os.kill(server, 0)
    except ProcessLookupError:
        print(process.exitcode, server, flush=True)
"""


def test_a_fork_has_the_environment_of_who_asks_and_the_server_ends(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(Path(forkserver.__file__).parents[1])}
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "told.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    exit_code, server = done.stdout.split()
    assert exit_code == "0"
    assert (tmp_path / "told.json").read_text() == f'{{"name": "after", "gone": null, "parent": {server}}}'


def test_libgomp_is_named_once_and_what_the_user_loads_first_stays() -> None:
    alone = forkserver.with_gomp("")
    assert Path(alone).is_file() and "libgomp" in alone
    assert forkserver.with_gomp("/lib/first.so") == f"/lib/first.so:{alone}"
    assert forkserver.with_gomp(alone) == alone
