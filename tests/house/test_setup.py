"""The set-up script, run for real with an interpreter that only notes what it is asked to do.

So what pip does with the lock files, and how long it takes, is not seen here; a fresh clone's first `make test` is that test.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.house.source import ROOT

INTERPRETER = """#!/bin/sh
case "$*" in
    *version_info*) echo "$FAKE_VERSION"; exit ;;
    *-m\\ venv*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
esac
echo "$*${PYTHONDONTWRITEBYTECODE:+ without byte code}" >> "$TRACE"
if [ -n "$PAUSE" ]; then sleep "$PAUSE"; echo woke >> "$TRACE"; fi
if [ -n "$FAIL" ]; then case "$*" in $FAIL) echo "told to fail" >&2; exit 1 ;; esac; fi
exit 0
"""


class Place:
    """A project folder with the real script, tiny lock files and the fake interpreter."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin = folder / "project", folder / "bin"
        self.bin.mkdir()
        (self.root / ".ci" / "lock").mkdir(parents=True)
        shutil.copy(ROOT / ".ci" / "setup.py", self.root / ".ci" / "setup.py")
        (self.root / "pyproject.toml").write_text("[project]\n")
        for part in ("base", "cpu", "gpu", "dev", "gym", "bench"):
            self.lock(part, "torch==1+cpu\n" if part == "cpu" else f"{part}-package==1\n")
        self.script("python3.12", INTERPRETER)
        self.trace = folder / "trace"
        self.trace.touch()

    def lock(self, part: str, text: str) -> None:
        (self.root / ".ci" / "lock" / f"{part}.txt").write_text("# about\n" + text)

    def script(self, name: str, text: str) -> Path:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)
        return self.bin / name

    def start(self, *extras: str, **env: str) -> subprocess.Popen[str]:
        given = {"PATH": f"{self.bin}:/usr/bin:/bin", "TRACE": str(self.trace), "FAKE_VERSION": "3.12", "EXTRA": "cpu"}
        command = [sys.executable, str(self.root / ".ci" / "setup.py"), *extras]
        # python3.12 first: where the machine has a real python3.11, that one must not be found.
        given |= {"PYTHON": str(self.bin / "python3.12")} | env
        return subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.root)

    def run(self, *extras: str, **env: str) -> tuple[int, str]:
        process = self.start(*extras, **env)
        out, _ = process.communicate(timeout=30)
        return process.returncode, out

    def asked(self) -> list[str]:
        """What the interpreter was asked since the last time."""
        lines = self.trace.read_text().splitlines()
        self.trace.write_text("")
        return lines

    @property
    def state(self) -> dict[str, object]:
        return json.loads((self.root / ".venv" / "winnow.json").read_text())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def fresh(asked: list[str]) -> bool:
    return any(line.startswith("-m venv") for line in asked)


def test_first_call_builds_and_the_second_does_nothing_at_once(place: Place) -> None:
    code, out = place.run("dev")
    asked = place.asked()
    assert code == 0 and "ready" in out and place.state["state"] == "ready"
    assert fresh(asked) and "base.txt" in asked[2] and "cpu.txt" in asked[2] and "dev.txt" in asked[2] and "gym.txt" not in asked[2]
    assert all("--no-deps" in line for line in asked if "pip install" in line)
    started = time.monotonic()
    assert place.run("dev") == (0, "")
    assert place.run() == (0, "")  # less than what is there
    assert time.monotonic() - started < 4
    assert place.asked() == []


def test_byte_code_is_written_even_where_it_is_switched_off(place: Place) -> None:
    """Without any, each start of an engine compiles all that it imports: two to three times as long."""
    assert place.run(PYTHONDONTWRITEBYTECODE="1")[0] == 0
    asked = place.asked()
    assert any("import" in line for line in asked) and not any("without byte code" in line for line in asked)


def test_an_extra_is_added_to_what_is_there_and_stays(place: Place) -> None:
    place.run()
    place.asked()
    assert place.run("dev", "gym")[0] == 0
    asked = place.asked()
    assert not fresh(asked) and "base.txt" not in "".join(asked)
    # gym after the others: some of its packages are built with what these bring
    assert [i for i, line in enumerate(asked) if "gym.txt" in line] > [i for i, line in enumerate(asked) if "dev.txt" in line]
    place.lock("gym", "gym-package==2\n")
    assert place.run()[0] == 0
    assert "gym.txt" in "".join(place.asked())


@pytest.mark.parametrize("change", ["lock", "project"])
def test_a_change_of_what_is_wanted_updates(place: Place, change: str) -> None:
    place.run()
    place.asked()
    if change == "lock":
        place.lock("base", "base-package==2\n")
    else:
        (place.root / "pyproject.toml").write_text("[project]\nversion = '2'\n")
    assert place.run()[0] == 0
    asked = place.asked()
    assert not fresh(asked) and "--editable" in "".join(asked)
    assert ("base.txt" in "".join(asked)) is (change == "lock")
    assert place.run() == (0, "")


@pytest.mark.parametrize("step", ["*-m*venv*", "*base.txt*", "*--editable*", "*import*"])
def test_a_failed_step_is_told_and_never_trusted(place: Place, step: str) -> None:
    code, out = place.run(FAIL=step)
    assert code == 1 and "told to fail" in out and "failed" in out and "setup.log" in out
    assert place.state == {"state": "building"}
    (place.root / ".venv" / "half-made").touch()
    place.asked()
    assert place.run()[0] == 0
    assert fresh(place.asked()) and not (place.root / ".venv" / "half-made").exists()


def test_a_failed_update_is_never_trusted(place: Place) -> None:
    place.run()
    place.lock("base", "base-package==2\n")
    assert place.run(FAIL="*base.txt*")[0] == 1
    place.asked()
    assert place.run()[0] == 0
    assert fresh(place.asked())


def test_after_a_kill_the_next_call_waits_for_the_orphan_and_starts_afresh(place: Place) -> None:
    process = place.start(PAUSE="1.5")
    while not place.trace.read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert place.state == {"state": "building"}
    code, out = place.run()
    assert code == 0 and "waiting" in out
    asked = place.trace.read_text().splitlines()
    assert [line[:7] for line in asked[:3]] == ["-m venv", "woke", "-m venv"]  # the orphan ended before the new one began


def test_two_calls_at_once_build_once(place: Place) -> None:
    first, second = place.start(PAUSE="0.2"), place.start(PAUSE="0.2")
    assert [first.wait(30), second.wait(30)] == [0, 0]
    assert sum(line.startswith("-m venv") for line in place.asked()) == 1
    for process in (first, second):
        process.communicate()


def test_an_interrupt_is_one_sentence(place: Place) -> None:
    process = place.start(PAUSE="20")
    while not place.trace.read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 1 and "Traceback" not in out and "stopped" in out
    assert place.state == {"state": "building"}


def test_torch_falls_back_to_its_own_index_only_where_pip_finds_no_cpu_build(place: Place) -> None:
    place.run()
    assert "index-url" not in "".join(place.asked())
    shutil.rmtree(place.root / ".venv")
    code, out = place.run(FAIL="*torch==1+cpu")  # fails unless something follows
    assert code == 0 and "asking" in out
    tried = [line for line in place.asked() if "torch==1+cpu" in line]
    assert len(tried) == 2 and "--extra-index-url" in tried[1]


def test_a_foreign_folder_is_refused_and_left_alone(place: Place) -> None:
    (place.root / ".venv").mkdir()
    (place.root / ".venv" / "mine").touch()
    code, out = place.run()
    assert code == 1 and "was not made by this set-up" in out and "VENV" in out
    assert [path.name for path in (place.root / ".venv").iterdir()] == ["mine"]
    assert place.run(VENV="other")[0] == 0
    assert (place.root / "other" / "winnow.json").exists()


def test_an_environment_keeps_its_kind_until_asked_for_the_other(place: Place) -> None:
    place.run(EXTRA="gpu")
    asked = place.asked()
    assert "gpu.txt" in "".join(asked) and "cpu.txt" not in "".join(asked)
    assert place.run(EXTRA="") == (0, "")
    assert place.run(EXTRA="cpu")[0] == 0
    assert fresh(place.asked()) and place.state["kind"] == "cpu"


def test_a_machine_with_a_gpu_gets_the_gpu_kind_and_lives_without_flash_attn(place: Place) -> None:
    place.script("nvidia-smi", "#!/bin/sh\necho 'GPU 0: model'\n")
    code, out = place.run(EXTRA="", FLASH_ATTN="0")
    assert code == 0 and place.state["kind"] == "gpu" and "without flash-attn (FLASH_ATTN=0)" in out
    assert "gpu.txt" in "".join(place.asked())
    shutil.rmtree(place.root / ".venv")
    place.script("nvcc", "#!/bin/sh\n")
    code, out = place.run(EXTRA="", FAIL="*flash-attn*")
    assert code == 0 and "its build failed" in out
    shutil.rmtree(place.root / ".venv")
    code, out = place.run(EXTRA="")
    assert code == 0 and "without" not in out


def test_a_moved_environment_and_a_lost_interpreter_are_built_again(place: Place) -> None:
    place.run()
    os.rename(place.root / ".venv", place.root / ".venv.moved")
    assert place.run(VENV=".venv.moved")[0] == 0
    assert fresh(place.asked())
    (place.root / ".venv.moved" / "bin" / "python").unlink()
    assert place.run(VENV=".venv.moved")[0] == 0
    assert fresh(place.asked())


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"EXTRA": "tpu"}, "EXTRA=tpu is not a kind"),
        ({"FAKE_VERSION": "3.9"}, "is 3.9"),
        ({"PYTHON": "", "FAKE_VERSION": "3.14"}, "python3.12 (is 3.14)"),
        ({"PYTHON": "nowhere"}, "PYTHON=nowhere is not one"),
    ],
)
def test_what_cannot_be_is_one_sentence(place: Place, env: dict[str, str], words: str) -> None:
    for version in ("3.11", "3.13"):
        place.script(f"python{version}", "#!/bin/sh\nexit 1\n")
    for name in ("python3", "python"):
        place.script(name, "#!/bin/sh\nexit 1\n")
    code, out = place.run(**env)
    assert code == 1 and words in out and "Traceback" not in out and len(out.splitlines()) == 1
    assert not (place.root / ".venv").exists()


def test_the_first_interpreter_that_works_is_taken(place: Place) -> None:
    for version in ("3.11", "3.13"):
        place.script(f"python{version}", "#!/bin/sh\nexit 1\n")
    assert place.run(PYTHON="")[0] == 0
    assert place.state["python"] == "3.12"


def test_an_unknown_extra_is_one_sentence(place: Place) -> None:
    code, out = place.run("devel")
    assert code == 1 and out == "set-up: there is no extra named devel: give any of dev, gym, bench.\n"
