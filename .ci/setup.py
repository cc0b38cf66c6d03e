"""Makes the environment `.venv` that the Makefile's targets run in; run by them, or as `make setup`.

    python3 .ci/setup.py [dev] [gym] [bench]

The environment has the exact versions of `.ci/lock/*.txt`: `base`, then `cpu` or `gpu`, then the extras named. A machine with an NVIDIA
GPU gets `gpu`; EXTRA=cpu or EXTRA=gpu decides otherwise, and an environment keeps its kind until it is asked for the other.
PYTHON=/path/to/python chooses the interpreter (else the first of python3.11, 3.12, 3.13 that works) and VENV=folder the place.

What is there is described by one file, `.venv/winnow.json`. It says "building" before anything is installed, and "ready", with a hash of
what was installed, after the last step: so a run that failed or was killed is never trusted, and the next one starts afresh. A second call
compares the hashes and ends. One call builds at a time; a lock on this file is held until the last child has gone.

Runs on any Python from 3.8, so that a person whose `python3` is old is told so in a sentence.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = ("dev", "gym", "bench")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own; asked only where the configured places have no CPU build
IMPORTS = {  # what must work; importing it here also writes the byte code that the first run would otherwise wait for
    "base": "transformers.models.qwen3.modeling_qwen3, datasets, pydantic_settings, rich, math_verify, wandb, ray",
    "cpu": "vllm.v1.engine.async_llm, vllm.v1.worker.cpu_worker",
    "gpu": "vllm.v1.engine.async_llm",
    "dev": "pytest, hypothesis",
    "gym": "reasoning_gym",
    "bench": "trl, gguf",
}


class SetupError(Exception):
    """Ends the set-up; the message is what the user reads."""


def has_gpu() -> bool:
    """An NVIDIA GPU that the driver shows."""
    if os.path.exists("/dev/nvidia0"):
        return True
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU " in listed.stdout


def find_python(chosen: str = "") -> tuple[str, str]:
    """(interpreter, its version such as "3.11") of the first that fits; `chosen` is taken or refused.

    An interpreter fits if it runs, has a supported version, and can make environments (Debian keeps `venv` in a package of its own).
    """
    probe = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    seen = []
    for name in [chosen] if chosen else [*(f"python{version}" for version in PYTHONS), "python3", "python"]:
        path = shutil.which(name)
        if path is None:
            continue
        ran = subprocess.run([path, "-c", probe], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        version = ran.stdout.strip()
        if ran.returncode == 0 and version in PYTHONS:
            return path, version
        seen.append(f"{path} ({'is ' + version if ran.returncode == 0 else 'does not run, or lacks the modules venv and ensurepip'})")
    found = f"PYTHON={chosen} is not one" if chosen else "there is none"
    raise SetupError(
        f"winnow needs Python {PYTHONS[0]} to {PYTHONS[-1]} with venv, and {found}{': ' + ', '.join(seen) if seen else ''}; "
        "install one (on Debian and Ubuntu: python3-venv), or name it with PYTHON=/path/to/python."
    )


def lock_hashes(root: Path, parts: Iterable[str]) -> dict[str, str]:
    return {part: hashlib.sha256((root / ".ci" / "lock" / f"{part}.txt").read_bytes()).hexdigest() for part in parts}


def read_state(folder: Path) -> dict[str, Any] | None:
    """What `winnow.json` says; None where there is no environment; refuses a folder that the set-up did not make."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        state = json.loads((folder / "winnow.json").read_text())
        return state if isinstance(state, dict) else {"state": "building"}
    except FileNotFoundError:
        raise SetupError(f"{folder} was not made by this set-up; remove it, or choose another place with VENV=folder.") from None
    except ValueError:
        return {"state": "building"}


def plan(state: dict[str, Any] | None, want: dict[str, Any], healthy: bool) -> str:
    """"nothing", "update" (install what differs into what is there) or "build" (start afresh).

    `healthy`: the environment's interpreter is there. `want` has the keys of `state`; `want["python"]` is "" where any version will do.
    """
    if state is None or state.get("state") != "ready" or not healthy:
        return "build"
    if state.get("folder") != want["folder"] or state.get("kind") != want["kind"]:  # a moved environment's scripts point elsewhere
        return "build"
    if want["python"] not in ("", state.get("python")):
        return "build"
    same = all(state.get("locks", {}).get(part) == digest for part, digest in want["locks"].items())
    return "nothing" if same and state.get("project") == want["project"] else "update"


class Builder:
    """Runs the steps, shows how they go, and keeps what they print in `setup.log` of the environment."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder, self.lock = folder, lock
        self.python = str(folder / "bin" / "python")
        self.started = time.monotonic()
        # PYTHONDONTWRITEBYTECODE may hold for what is run later; without byte code here every start would take two to three times as long.
        drop = ("PYTHONHOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIRE_HASHES")
        self.env = {key: value for key, value in os.environ.items() if key not in drop}
        self.env.update(PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_REQUIRE_VIRTUALENV="0", OMP_NUM_THREADS="1")

    def say(self, text: str) -> None:
        print(f"set-up {time.monotonic() - self.started:4.0f} s: {text}", flush=True)

    def run(self, *commands: list[str]) -> int:
        """Runs commands side by side; returns the first exit status that is not 0, else 0."""
        with open(self.folder / "setup.log", "a") as log:
            for command in commands:
                log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            # The children hold the lock too: if this process is killed, no other set-up starts while they still write.
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": self.env, "pass_fds": (self.lock,)}
            children = [subprocess.Popen(command, **options) for command in commands]
            try:
                return next((status for status in [child.wait() for child in children] if status), 0)
            finally:
                for child in children:
                    if child.poll() is None:
                        child.terminate()
                        child.wait()

    def must(self, what: str, *commands: list[str]) -> None:
        if self.run(*commands):
            log = self.folder / "setup.log"
            tail = "".join(f"  {line}\n" for line in log.read_text(errors="replace").splitlines()[-12:])
            raise SetupError(f"{what} failed:\n{tail}All of its output is in {log}; the next call starts afresh.")

    def pip(self, *arguments: str) -> list[str]:
        # No dependencies: the lock names every package. No byte code: the modules that are used get theirs when they are imported below.
        options = ["--no-deps", "--no-compile", "--no-build-isolation", "--use-pep517", "--progress-bar", "off"]
        return [self.python, "-m", "pip", "install", *options, *arguments]


def install_torch(build: Builder, lock: Path) -> None:
    """The CPU build of torch: from where pip is configured to look, else from PyTorch's own index."""
    torch = next(line for line in lock.read_text().splitlines() if re.match(r"torch=", line))
    if build.run(build.pip(torch)):
        build.say(f"{torch} is not where pip looks; asking {CPU_INDEX}")
        build.must("Installing torch", build.pip(torch, "--extra-index-url", CPU_INDEX))


def install_flash_attn(build: Builder) -> str:
    """Builds flash-attn, which has no wheels; returns why it is missing, or "".

    Nothing stands or falls with it: without it attention goes through torch's own kernels.
    """
    if os.environ.get("FLASH_ATTN") == "0":
        return "FLASH_ATTN=0"
    if shutil.which("nvcc") is None:
        return "nvcc is not on PATH"
    build.say("building flash-attn (up to an hour; FLASH_ATTN=0 leaves it out)")
    return "its build failed (see setup.log)" if build.run(build.pip("flash-attn==2.8.3.post2")) else ""


def begin(folder: Path, want: dict[str, Any], build: Builder) -> str:
    """A new environment in place of whatever is there; returns its Python version."""
    python, version = find_python(want["python"] and os.environ.get("PYTHON", ""))
    removing = folder.with_name(folder.name + ".removing")  # moved in one step: a half-removed environment is never found in its place
    if folder.exists():
        build.say(f"removing {folder}, which is unfinished or of another kind")
        if folder.is_symlink():
            folder.unlink()  # another checkout's environment, which is not ours to remove
        else:
            shutil.rmtree(removing, ignore_errors=True)
            os.rename(folder, removing)
    shutil.rmtree(removing, ignore_errors=True)
    folder.mkdir(parents=True)
    record(folder, {"state": "building"})
    build.say(f"new environment {folder} with Python {version} for {want['kind']}")
    build.must("Making the environment", [python, "-m", "venv", str(folder)])
    return version


def make(root: Path, folder: Path, want: dict[str, Any], have: dict[str, Any] | None, build: Builder) -> dict[str, Any]:
    """Builds, or updates from `have`; returns the state to record. Whatever goes wrong, `winnow.json` then says "building"."""
    if have is None:
        version, old = begin(folder, want, build), {}
    else:
        version, old = have["python"], have["locks"]
        record(folder, {"state": "building"})
        build.say(f"updating {folder}")
    new = {part: root / ".ci" / "lock" / f"{part}.txt" for part, digest in want["locks"].items() if old.get(part) != digest}
    missing = ""
    if "cpu" in new:
        build.say("torch, CPU build")
        install_torch(build, new["cpu"])
    if new:
        counts = {part: sum(not line.startswith("#") for line in path.read_text().splitlines()) for part, path in new.items()}
        build.say("packages: " + ", ".join(f"{part} {count}" for part, count in counts.items()))
    for group in ([part for part in new if part != "gym"], ["gym"]):  # some of gym's packages are built with what comes before
        files = [word for part in group if part in new for word in ("-r", str(new[part]))]
        if files:
            build.must("Installing packages", build.pip(*files))
    if "gpu" in new:
        missing = install_flash_attn(build)
    build.must("Installing winnow itself", build.pip("--editable", str(root)))
    if new:
        build.say("importing what will be used")
        engine = [IMPORTS[part] for part in new if part in ("cpu", "gpu")]
        rest = [", ".join(IMPORTS[part] for part in new if part not in ("cpu", "gpu"))]
        build.must("Importing", *([build.python, "-W", "ignore", "-c", f"import {names}"] for names in engine + rest if names))
    if missing:
        build.say(f"without flash-attn ({missing}): attention goes through torch's own kernels")
    return {**want, "state": "ready", "python": version, "seconds": round(time.monotonic() - build.started, 1)}


def record(folder: Path, state: dict[str, Any]) -> None:
    """Replaces winnow.json in one move."""
    new = folder / "winnow.json.new"
    new.write_text(json.dumps(state, indent=1) + "\n")
    os.replace(new, folder / "winnow.json")


def wanted(root: Path, folder: Path, extras: list[str], state: dict[str, Any]) -> dict[str, Any]:
    """What the caller asks for, and what is there already besides: an environment never shrinks."""
    asked = os.environ.get("EXTRA", "")
    if asked not in ("", "cpu", "gpu"):
        raise SetupError(f"EXTRA={asked} is not a kind of environment: give cpu or gpu, or leave it out to go by the machine.")
    unknown = [extra for extra in extras if extra not in EXTRAS]
    if unknown:
        raise SetupError(f"there is no extra named {unknown[0]}: give any of {', '.join(EXTRAS)}.")
    kind = asked or state.get("kind") or ("gpu" if has_gpu() else "cpu")
    parts = ["base", kind, *(extra for extra in EXTRAS if extra in extras or extra in state.get("locks", {}))]
    python = ""
    if os.environ.get("PYTHON"):
        python = find_python(os.environ["PYTHON"])[1]
    project = hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest()
    return {"folder": str(folder), "kind": kind, "python": python, "locks": lock_hashes(root, parts), "project": project}


def main(root: Path, extras: list[str]) -> None:
    folder = (root / os.environ.get("VENV", ".venv")).absolute()
    with open(__file__) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("set-up: another one is at work here; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        state = read_state(folder)
        want = wanted(root, folder, extras, state or {})
        step = plan(state, want, healthy=(folder / "bin" / "python").exists())
        if step != "nothing":
            build = Builder(folder, lock.fileno())
            record(folder, make(root, folder, want, state if step == "update" else None, build))
            build.say("ready")


if __name__ == "__main__":
    try:
        main(ROOT, sys.argv[1:])
    except SetupError as error:
        sys.exit(f"set-up: {error}")
    except KeyboardInterrupt:
        sys.exit("set-up: stopped; the next call starts it afresh.")
