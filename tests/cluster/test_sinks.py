"""The sinks: what lies in the files after a crash and a resume, and that wandb neither holds up nor ends a run.

Does not cover: wandb online, and its merging of a resumed offline run by `wandb sync`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cluster import sinks
from cluster.config import LogConfig
from cluster.sinks import JsonlSink, Sinks, wandb_mode
from rollout.errors import UserError

ROOT = Path(__file__).parents[2]
OFF = LogConfig(wandb="off")


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _no_wandb_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


# -- files ------------------------------------------------------------------------------------------------------------


def test_one_line_a_step_is_on_disk_at_once_and_is_strict_json(tmp_path: Path) -> None:
    out = Sinks.open(tmp_path, OFF, {})
    out.log(1, {"reward": 0.5, "train/loss": float("nan"), "train/grad_norm": np.float32("inf"), "buffer/kept": np.int64(3)})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": 0.5, "train/loss": None, "train/grad_norm": None, "buffer/kept": 3}]
    out.close()


def test_a_resume_cuts_the_steps_beyond_it_and_a_half_written_line(tmp_path: Path) -> None:
    out = Sinks.open(tmp_path, OFF, {})
    for step in (1, 2, 3, 4):
        out.log(step, {"reward": step / 10})
        out.samples(step, [{"uid": 2 * step}, {"uid": 2 * step + 1}])
    out.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rew')
    out = Sinks.open(tmp_path, OFF, {}, resume_step=2)
    out.log(3, {"reward": 0.9})
    out.samples(3, [{"uid": 6}])
    out.close()
    assert [(r["step"], r["reward"]) for r in lines(tmp_path / "metrics.jsonl")] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert [r["uid"] for r in lines(tmp_path / "samples.jsonl")] == [2, 3, 4, 5, 6]


def test_a_resume_at_the_last_step_changes_no_byte(tmp_path: Path) -> None:
    out = Sinks.open(tmp_path, OFF, {})
    out.log(1, {"reward": 1 / 3})
    out.log(2, {"reward": 2 / 3})
    out.close()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    Sinks.open(tmp_path, OFF, {}, resume_step=2).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_resume_before_the_first_log_starts_the_files(tmp_path: Path) -> None:
    Sinks.open(tmp_path, OFF, {}, resume_step=0).close()
    assert lines(tmp_path / "metrics.jsonl") == [] == lines(tmp_path / "samples.jsonl")


@pytest.mark.parametrize("damage", ["{}", "no json", '{"step": "one"}', "[1]"])
def test_damage_in_the_middle_is_named_and_left_as_it_is(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 2}}\n')
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged at line 2: mend or remove that line"):
        JsonlSink(path, 1)
    assert path.read_bytes() == before


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def test_tensorboard_has_the_same_names_and_a_resume_undoes_later_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = LogConfig(wandb="off", tensorboard=True)
    out = Sinks.open(tmp_path, log, {})
    for step in (1, 2, 3):
        out.log(step, {"reward": step / 4, "train/loss": -0.5})
    out.close()
    time.sleep(1.1)  # the names of event files have seconds
    out = Sinks.open(tmp_path, log, {}, resume_step=2)
    out.log(3, {"reward": 1.0})
    out.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert read.Tags()["scalars"] == ["reward", "train/loss"]
    assert [(e.step, e.value) for e in read.Scalars("reward")] == [(1, 0.25), (2, 0.5), (3, 1.0)]
    assert [e.step for e in read.Scalars("train/loss")] == [1, 2]


def test_no_event_file_unless_asked(tmp_path: Path) -> None:
    Sinks.open(tmp_path, OFF, {}).close()
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_that_is_not_installed_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(UserError, match=r"log.tensorboard = true needs TensorBoard: pip install tensorboard"):
        Sinks.open(tmp_path, LogConfig(wandb="off", tensorboard=True), {})


def test_tensorboard_that_breaks_ends_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    out = Sinks.open(tmp_path, LogConfig(wandb="off", tensorboard=True), {}, note=notes.append)

    def full(event: object) -> None:
        raise OSError("no space left")

    assert out._tensorboard is not None
    monkeypatch.setattr(out._tensorboard._writer, "add_event", full)
    out.log(1, {"reward": 0.5})
    out.log(2, {"reward": 0.6})
    out.close()
    assert notes == ["TensorBoard is off from here on: OSError: no space left"]
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl")] == [1, 2]


# -- wandb ------------------------------------------------------------------------------------------------------------


def test_the_mode_follows_the_key_and_what_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [wandb_mode(m) for m in ("auto", "offline", "off")] == ["offline", "offline", "disabled"]
    with pytest.raises(UserError, match=r"log.wandb = 'online' finds no key: set WANDB_API_KEY"):
        wandb_mode("online")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert [wandb_mode(m) for m in ("auto", "online", "offline", "off")] == ["online", "online", "offline", "disabled"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto") == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password " + "x" * 40 + "\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode("auto") == "online"


def test_off_imports_no_wandb(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cluster.sinks import Sinks; from cluster.config import LogConfig\n"
        f"s = Sinks.open(Path({str(tmp_path)!r}), LogConfig(wandb='off'), {{}}); s.log(1, {{'reward': 1.0}}); s.close()\n"
        "print('wandb' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "False\n"
    assert not (tmp_path / "wandb").exists() and not (tmp_path / "wandb_id").exists()


def test_offline_wandb_gets_every_number_without_holding_up_a_step_and_leaves_no_process(tmp_path: Path) -> None:
    """A real offline run in a process of its own, opened, closed, and resumed under the same id."""
    code = f"""
import sys, time; from pathlib import Path; from cluster.sinks import Sinks; from cluster.config import LogConfig
import psutil
began = time.monotonic()
s = Sinks.open(Path({str(tmp_path)!r}), LogConfig(wandb="offline"), {{"steps": 4}}, resume_step=int(sys.argv[1]) or None, name="sums")
for step in range(int(sys.argv[1]) + 1, int(sys.argv[1]) + 3):
    s.log(step, {{"reward": step / 10, "train/loss": float("nan")}})
fed = time.monotonic() - began
while not list(Path({str(tmp_path)!r}).glob("wandb/offline-run-*/run-*.wandb")) or not s._wandb._started.is_set():
    time.sleep(0.05)
busy = [p.name() for p in psutil.Process().children()]
closing = time.monotonic()
s.close()
print(f"{{fed:.3f}} {{time.monotonic() - closing:.3f}} {{len(busy)}} {{len(psutil.Process().children())}}")
"""
    ids = set()
    for resumed in ("0", "2"):
        done = subprocess.run([sys.executable, "-c", code, resumed], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        fed, closing, busy, left = done.stdout.split()
        assert float(fed) < 0.5 and float(closing) < 5.0
        assert (int(busy) >= 1, int(left)) == (True, 0)
        ids.add((tmp_path / "wandb_id").read_text())
    runs = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert len(ids) == 1 and {r.name.rsplit("-", 1)[1] for r in runs} == {ids.copy().pop().strip()}
    seen = b"".join(p.read_bytes() for p in tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert b"reward" in seen and b"0.1" in seen


def fake_wandb(monkeypatch: pytest.MonkeyPatch, init: Any) -> None:
    module = types.ModuleType("wandb")
    module.init, module.Settings, module.teardown = init, lambda **k: None, lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)


def until(condition: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_a_wandb_that_fails_is_one_line_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> Any:
        raise RuntimeError("no such project\nand a second line")

    fake_wandb(monkeypatch, init)
    notes: list[str] = []
    out = Sinks.open(tmp_path, LogConfig(wandb="offline"), {}, note=notes.append)
    until(lambda: notes)
    out.log(1, {"reward": 0.5})
    out.close()
    assert notes == ["wandb is off from here on: RuntimeError: no such project"]
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl")] == [1]


def test_a_wandb_that_never_starts_is_given_up_and_its_process_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    service: list[subprocess.Popen[bytes]] = []

    def init(**_: Any) -> Any:
        service.append(subprocess.Popen(["bash", "-c", "exec -a wandb-core sleep 60"]))
        never.wait()

    fake_wandb(monkeypatch, init)
    monkeypatch.setattr(sinks, "WANDB_START_SECONDS", 0.2)
    monkeypatch.setattr(psutil.Process, "name", lambda self: "".join(self.cmdline()[:1]))
    notes: list[str] = []
    out = Sinks.open(tmp_path, LogConfig(wandb="offline"), {}, note=notes.append)
    until(lambda: service and "wandb-core" in psutil.Process(service[0].pid).name())
    time.sleep(0.25)
    out.log(1, {"reward": 0.5})
    out.log(2, {"reward": 0.5})
    began = time.monotonic()
    out.close(seconds=0.2)
    assert time.monotonic() - began < 3
    assert notes == ["wandb is off from here on: it had not started after 0 s"]
    assert not psutil.pid_exists(service[0].pid) or service[0].poll() is not None
    never.set()
