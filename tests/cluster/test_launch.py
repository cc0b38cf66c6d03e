"""The command line: subcommands, prints, exit codes.

Not covered: what a subcommand does after it is called; each has tests of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from cluster import launch
from cluster.config import RunConfig, fields, resolved_objective
from cluster.load import load, to_toml

ROOT = Path(launch.__file__).parent.parent


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list:
    """What reached cluster.train and cluster.offline, which are put aside."""
    calls: list = []
    run, offline = types.ModuleType("cluster.train"), types.ModuleType("cluster.offline")
    run.train = lambda cfg: calls.append(("train", cfg)) or 0  # type: ignore[attr-defined]
    offline.evaluate = lambda cfg: calls.append(("eval", cfg)) or 0  # type: ignore[attr-defined]
    offline.export = lambda run, **kw: calls.append(("export", run, kw)) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cluster.train", run)
    monkeypatch.setitem(sys.modules, "cluster.offline", offline)
    return calls


def test_train_gets_the_resolved_config(runs: list) -> None:
    assert launch.main(["train", "--steps", "3", "arithmetic", "--lr", "2e-4"]) == 0
    [(name, cfg)] = runs
    assert name == "train" and isinstance(cfg, RunConfig)
    assert (cfg.name, cfg.steps, cfg.optim.lr) == ("arithmetic", 3, 2e-4)


def test_eval_and_export(runs: list, tmp_path: Path) -> None:
    assert launch.main(["eval", "arithmetic"]) == 0
    assert launch.main(["export", str(tmp_path), "--step", "4", "--dtype", "bfloat16", "--out", "x"]) == 0
    assert runs[0][0] == "eval"
    assert runs[1] == ("export", tmp_path, {"step": 4, "dtype": "bfloat16", "out": Path("x")})


def test_what_the_subcommand_returns_is_the_exit_code(runs: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["cluster.train"], "train", lambda cfg: 7)
    assert launch.main(["train", "arithmetic"]) == 7


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["trian", "arithmetic"], ["'trian'", "nearest is 'train'"]),
        (["train"], ["takes one recipe, got none"]),
        (["train", "a", "b"], ["got 2: a b"]),
        (["train", "nowhere.toml"], ["'nowhere.toml'", "arithmetic"]),
        (["train", "arithmetic", "--lrr", "1"], ["unknown flag --lrr", "--lr?"]),
        (["train", "arithmetic", "--batch_size", "many"], ["buffer.batch_size", "whole number"]),
        (["train", "arithmetic", "--variant", "dr-grpo"], ["variant = dr-grpo", "nearest is dr_grpo"]),
        (["train", "arithmetic", "--engines", "2", "--engine_gpus", "64"], ["128 GPUs", "this machine has", "lower these"]),
        (["train", "arithmetic", "--max_tokens", "500"], ["rollout.max_tokens = 500", "516", "512"]),
        (["train", "arithmetic", "--prompt_format", "chat"], ["chat", "template", "raw"]),
        (["ledger"], ["RUN"]),
        (["ledger", "nowhere"], ["nowhere"]),
        (["verify"], ["file"]),
        (["verify", "nowhere"], ["nowhere"]),
        (["export", "nowhere"], ["no run folder nowhere"]),
        (["export", ".", "--step", "x"], ["--step", "'x'"]),
        (["export", ".", "--dtype", "int4"], ["--dtype", "int4", "bfloat16"]),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr_and_exit_code_2(
    runs: list, capsys: pytest.CaptureFixture, argv: list[str], parts: list[str]
) -> None:
    assert launch.main(argv) == 2
    said = capsys.readouterr()
    assert said.out == "" and runs == []
    assert said.err.startswith("winnow: ") and said.err.count("\n") == 1
    for part in parts:
        assert part in said.err


def test_print_config_is_the_config_as_toml_and_runs_nothing(runs: list, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert launch.main(["train", "gsm8k_qwen3", "--print-config", "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    file = tmp_path / "again.toml"
    file.write_text(printed)
    again, asked = load(str(file)), load("gsm8k_qwen3", ["--seed", "5"])
    assert again.model_dump() == {**asked.model_dump(), "objective": resolved_objective(asked).model_dump()}
    assert printed == to_toml(load(str(file))) and runs == []


def test_help_of_train_has_every_flag_under_both_names(capsys: pytest.CaptureFixture) -> None:
    assert launch.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for key, info in fields().items():
        assert f"--{key} " in text and f"--{key.rsplit('.', 1)[-1]} " in text
        assert " ".join(str(info.description).split())[:30] in " ".join(text.split())
    for section in ("data", "rollout", "optim", "objective"):
        assert f"{section} options:" in text
    assert "--print-config " in text
    assert "default factory" not in text and "--optim [JSON]" not in text


def test_usage_lists_the_subcommands(capsys: pytest.CaptureFixture) -> None:
    assert launch.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in launch.COMMANDS.items():
        assert name in text and command.help in text
    assert launch.main([]) == 2


def test_version(capsys: pytest.CaptureFixture) -> None:
    assert launch.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("winnow ")


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from cluster.launch import main; main(['train', '--help']); main(['train', 'arithmetic', '--print-config']);"
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'datasets', 'numpy.random') if m in sys.modules])"
    )
    start = time.monotonic()
    done = run(code)
    took = time.monotonic() - start
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]"
    assert took < 10  # about 0.4 s on a free core; the bound only catches a heavy import on a busy one


def test_a_mistake_in_a_real_process_leaves_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cluster.launch", "train", "arithmetic", "--optim.lrr", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "winnow: unknown flag --optim.lrr: did you mean --optim.lr?\n"


@pytest.mark.parametrize("line", ["train arithmetic --run_dir", "train arithmetic --model", "ledger", "train"])
def test_a_name_that_is_too_long_for_a_file_is_one_sentence(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch.main([*line.split(), "x" * 300]) == 2
    said = capsys.readouterr().err
    assert "shorten it" in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
