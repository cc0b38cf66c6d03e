"""Runs one untrusted Python program, bounded in every way that this machine offers, and says what it did. Judges nothing.

The ladder, strongest first; all rungs have rlimits, no_new_privs and seccomp (`jail`), a wall clock, and bounded output:
`bubblewrap` (namespaces: its own files, network, processes), `landlock` (the kernel's file and TCP rules), `uid` (a user id of its own;
needs root).
Each rung is tried by a program that tries to break out; the first that holds is taken. Without one, running is refused unless a recipe
says `sandbox = "none"`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUNGS = ("bubblewrap", "landlock", "uid", "none")
LIMITS: dict[str, float] = {"time_s": 5, "mem_mb": 256, "out_kb": 64, "procs": 1}
WALL_SLACK = 1.75  # seconds beyond the CPU limit: machines stall
SCRATCH_MB = 64
_JAIL = (Path(__file__).parent / "jail.py").read_text()
_PYTHON = os.path.realpath(os.path.join(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}"))
_SCRATCH = "winnow-scratch-"
_SYSTEM = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/usr/share/zoneinfo",
    "/dev/null",
    "/dev/urandom",
    "/dev/zero",
)


@dataclass(frozen=True)
class Outcome:
    """What a run did. `values`: one per step reached. `ended`: "exit", "signal", "wall" or "output"; `code`: exit code or signal."""

    ended: str
    code: int
    stdout: bytes
    values: tuple[Any, ...] = ()
    raised: str = ""
    complete: bool = False
    layers: Mapping[str, Any] = field(default_factory=dict)
    stderr: bytes = b""


@dataclass(frozen=True)
class Job:
    """A program and what to do with it: `mode` "stdio" runs it with `stdin`, "steps" runs it and then each step.

    A step is ("call", expression of a callable, arguments), ("eval", expression, ()) or ("exec", statement, ()).
    """

    code: str
    mode: str = "stdio"
    stdin: bytes = b""
    steps: Sequence[tuple[str, str, Sequence[Any]]] = ()


def limits_of(given: Mapping[str, Any] | None) -> dict[str, float]:
    """All limits, those in `given` instead of the defaults: time_s (CPU seconds), mem_mb (MiB), out_kb (KiB), procs."""
    return {**LIMITS, **{k: float(v) for k, v in (given or {}).items() if k in LIMITS}}


def run(job: Job, limits: Mapping[str, float], rung: str) -> Outcome:
    """Run `job` on that rung of the ladder. Raises OSError when the machine cannot start a process."""
    with _scratch(rung) as scratch:
        description = {
            "code": job.code,
            "mode": job.mode,
            "steps": list(job.steps),
            "limits": dict(limits),
            "scratch": scratch,
            "landlock": rung in ("bubblewrap", "landlock"),
            "uid": _free_uid() if rung == "uid" else 0,
            "parent": 0 if rung == "bubblewrap" else os.getpid(),
            "readable": [os.path.realpath(sys.base_prefix), *_SYSTEM],
        }
        if description["uid"]:
            os.chown(scratch, description["uid"], description["uid"])
        return _supervise(_command(rung), job.stdin, json.dumps(description).encode(), limits)


@contextlib.contextmanager
def _scratch(rung: str) -> Any:
    """The program's folder: in the sandbox's own memory with bubblewrap, else on disk, removed afterwards."""
    if rung == "bubblewrap":
        yield "/tmp"
        return
    _sweep()
    path = tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@functools.lru_cache(maxsize=1)
def _sweep() -> None:
    """Remove what killed processes left behind, once per process."""
    for path in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        m = re.match(rf"{_SCRATCH}([0-9]+)-", path.name)
        if m and not os.path.exists(f"/proc/{m.group(1)}"):
            shutil.rmtree(path, ignore_errors=True)


def _free_uid() -> int:
    """A user id that no running process and no account is likely to have; one per verifier process."""
    return 1_900_000_000 + os.getpid() % 10_000_000


def _command(rung: str) -> list[str]:
    python = [_PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", _JAIL]
    if rung != "bubblewrap":
        return python
    binds: list[str] = []
    for path in ("/usr", "/lib", "/lib64", "/bin"):
        if os.path.islink(path):
            binds += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            binds += ["--ro-bind", path, path]
    prefix = os.path.realpath(sys.base_prefix)
    if not prefix.startswith("/usr"):
        binds += ["--ro-bind", prefix, prefix]
    return [
        "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534",
        "--clearenv", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8", *binds,
        "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache",
        "--dev", "/dev", "--size", str(SCRATCH_MB << 20), "--tmpfs", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp",
        "--", *python,
    ]  # fmt: skip


def _supervise(command: list[str], stdin: bytes, description: bytes, limits: Mapping[str, float]) -> Outcome:
    """Start, feed, listen, kill, reap."""
    job_r, job_w = os.pipe()
    result_r, result_w = os.pipe()
    try:
        p = subprocess.Popen(
            [*command, str(job_r), str(result_w)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(job_r, result_w),
            start_new_session=True,
            env={"LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"},
            cwd="/",
        )
    except OSError:
        for fd in (job_r, job_w, result_r, result_w):
            os.close(fd)
        raise
    os.close(job_r)
    os.close(result_w)
    assert p.stdin and p.stdout and p.stderr
    with _Ears(int(limits["out_kb"]) << 10) as ears:
        ears.write(job_w, description)
        ears.write(os.dup(p.stdin.fileno()), stdin)
        p.stdin.close()
        ears.read(os.dup(p.stdout.fileno()), "stdout")
        ears.read(os.dup(p.stderr.fileno()), "stderr")
        ears.read(result_r, "result")
        p.stdout.close()
        p.stderr.close()
        ended = ears.listen(p, time.monotonic() + limits["time_s"] + WALL_SLACK)
        with contextlib.suppress(OSError):
            os.killpg(p.pid, signal.SIGKILL)
        code = p.wait()
        ears.drain()
        if ended == "exit" and ears.over:
            ended = "output"
        if ended == "exit" and (code < 0 or code > 128):
            ended, code = "signal", -code if code < 0 else code - 128
        return _outcome(ended, code, ears)


def _outcome(ended: str, code: int, ears: _Ears) -> Outcome:
    layers: Mapping[str, Any] = {}
    values: list[Any] = []
    raised, complete = "", False
    for line in ears.texts["result"].split(b"\n"):
        try:
            message = json.loads(line)
            kind = message[0]
        except (ValueError, IndexError, KeyError, TypeError, RecursionError):
            continue
        if kind == "layers" and not layers:
            layers = message[1]
        elif kind == "value" and len(message) > 1:
            values.append(message[1])
        elif kind == "raised" and len(message) > 1:
            raised = str(message[1])[:80]
        elif kind == "end":
            complete = True
    return Outcome(ended, code, ears.texts["stdout"], tuple(values), raised, complete, layers, ears.texts["stderr"][-500:])


class _Ears:
    """Several pipes at once, each bounded."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.over = False
        self.texts: dict[str, bytes] = {"stdout": b"", "stderr": b"", "result": b""}
        self._selector = selectors.DefaultSelector()
        self._left: dict[int, memoryview] = {}
        self._names: dict[int, str] = {}

    def __enter__(self) -> _Ears:
        return self

    def __exit__(self, *exc: object) -> None:
        for fd in [*self._left, *self._names]:
            os.close(fd)
        self._selector.close()

    def write(self, fd: int, data: bytes) -> None:
        """Feed `data` into `fd`, which is closed at the end."""
        os.set_blocking(fd, False)
        self._left[fd] = memoryview(data)
        self._selector.register(fd, selectors.EVENT_WRITE)

    def read(self, fd: int, name: str) -> None:
        """Take what comes from `fd`."""
        os.set_blocking(fd, False)
        self._names[fd] = name
        self._selector.register(fd, selectors.EVENT_READ)

    def listen(self, p: subprocess.Popen[bytes], deadline: float) -> str:
        """Until the process has ended ("exit"), the time is up ("wall") or it has said too much ("output")."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "wall"
            if not self._names:
                try:
                    p.wait(left)
                except subprocess.TimeoutExpired:
                    return "wall"
            if p.poll() is not None:
                return "exit"
            for key, _ in self._selector.select(min(left, 0.5)):
                self._serve(key.fd)
            if self.over:
                return "output"

    def drain(self) -> None:
        """What is still in the pipes of a process that has ended."""
        for _ in range(1000):
            ready = [k.fd for k, _ in self._selector.select(0) if k.fd in self._names]
            if not ready or self.over:
                return
            for fd in ready:
                self._serve(fd)

    def _serve(self, fd: int) -> None:
        if fd in self._left:
            try:
                self._left[fd] = self._left[fd][os.write(fd, self._left[fd]) :]
            except BlockingIOError:
                return
            except OSError:
                self._left[fd] = memoryview(b"")
            if not self._left[fd]:
                self._close(fd, self._left)
            return
        name = self._names[fd]
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(fd, self._names)
            return
        self.texts[name] += data
        # A value takes several times its size on the way.
        if len(self.texts[name]) > self.limit * (8 if name == "result" else 1) + (4096 if name == "result" else 0):
            self.over = True

    def _close(self, fd: int, table: dict[int, Any]) -> None:
        self._selector.unregister(fd)
        del table[fd]
        os.close(fd)


# -- the ladder ----------------------------------------------------------------------------------------------------------------

_BREAKOUT = """
import os, socket
got = []
def attempt(name, f):
    try:
        f()
    except BaseException:
        return
    got.append(name)
attempt("network", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
attempt("fork", os.fork)
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("kill", lambda: os.kill(os.getppid(), 0))
attempt("write", lambda: open(PROBE + "/written", "w"))
attempt("read", lambda: open(PROBE + "/secret").read())
attempt("environment", lambda: open("/proc/%d/environ" % os.getppid(), "rb").read())
open("own", "w").write("x")
"""


@dataclass(frozen=True)
class Probe:
    """The rung that holds ("" when none does), and what was found on the way."""

    rung: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        if not self.rung:
            return "no sandbox: " + "; ".join(self.notes)
        return f"code sandbox: {self.rung}" + (f" ({'; '.join(self.notes)})" if self.notes else "")


@functools.lru_cache(maxsize=8)
def probe(wanted: str = "auto") -> Probe:
    """Which rung of the ladder holds on this machine; `wanted` names one, or "auto". A fraction of a second, once per process."""
    notes: list[str] = []
    for rung in RUNGS[:-1] if wanted == "auto" else (wanted,):
        if rung == "none":
            return Probe("none", ("as the recipe says: untrusted programs run with rlimits only",))
        why = _try(rung)
        if not why:
            return Probe(rung, tuple(notes))
        notes.append(f"{rung}: {why}")
    return Probe("", tuple(notes))


def _try(rung: str) -> str:
    """Why a rung does not hold, or ''."""
    if rung == "bubblewrap" and shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin") is None:
        return "bwrap is not installed"
    if rung == "uid" and os.geteuid() != 0:
        return "only root can give a program a user id of its own"
    with tempfile.TemporaryDirectory(prefix=_SCRATCH + "0-") as folder:
        (Path(folder) / "secret").write_text("x")
        os.chmod(Path(folder) / "secret", 0o600)
        code = f"PROBE = {folder!r}\n{_BREAKOUT}"
        try:
            outcome = run(Job(code, "steps", steps=(("eval", "got", ()),)), {**LIMITS, "time_s": 5}, rung)
        except OSError as e:
            return str(e)
    if not outcome.complete or outcome.raised or not outcome.values:
        return (outcome.stderr.decode("utf-8", "replace").strip().splitlines() or [outcome.raised or outcome.ended])[-1][:120]
    if not outcome.layers.get("seccomp"):
        return "no seccomp"
    if rung == "landlock" and not outcome.layers.get("landlock"):
        return "the kernel has no Landlock"
    leaks = [v[1] for v in outcome.values[0][1]]
    return f"a program could reach: {', '.join(leaks)}" if leaks else ""
