"""The inside of one verifier process: read a batch, judge item by item, say what was found.

It trusts no clock of its own: the pool watches and kills. Started by `verifier.process`
as `python -c`, never by fork, so it holds nothing of its parent's.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import resource
import select
import signal
import sys
import threading
import time
from typing import Any

from verifier import canonical, frames, load, prepare

FLUSH_AFTER = 0.002  # seconds that a verdict may wait for its neighbours
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STACK = 64 << 20  # a deep answer must end in RecursionError, not in a crash


def main(parent: int, progress: int) -> None:
    """Serve until stdin ends. `parent`: pid of the pool; `progress`: file descriptor of the shared page."""
    _die_with(parent)
    reply = os.dup(1)
    os.set_inheritable(reply, False)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)  # a verifier that prints must not garble the messages
    source = os.dup(0)
    os.set_inheritable(source, False)
    os.dup2(null, 0)
    page = frames.Progress(mmap.mmap(progress, frames.PAGE))
    os.close(progress)
    threading.stack_size(STACK)
    runner = threading.Thread(target=_run, args=(source, reply, page), name="verifier")
    runner.start()
    runner.join()
    os._exit(0)


def _die_with(parent: int) -> None:
    """End when the pool's process ends, however it ends: by the kernel's signal, and by a watch that also ends our children."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what our children leave behind stays findable below us
    if os.getppid() != parent:
        os._exit(1)
    with contextlib.suppress(OSError, AttributeError):
        fd = os.pidfd_open(parent)
        threading.Thread(target=_watch, args=(fd,), name="parent-watch", daemon=True).start()


def _watch(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not poll.poll():
        pass
    os.killpg(0, signal.SIGKILL)


def _run(source: int, reply: int, page: frames.Progress) -> None:
    """Hello, then batches, in a thread of its own with a deep stack."""
    reader = frames.Reader(limit=1 << 31)
    options: dict[str, dict[str, Any]] | None = None
    while True:
        data = os.read(source, 1 << 20)
        if not data:
            os._exit(0)
        for message in reader.feed(data):
            if options is None:
                options = message["options"]
                _write(reply, ["ready", _prepare(message)])
            else:
                _batch(message, options, reply, page)


_prepared: set[str] = set()


def _prepare(hello: dict[str, Any]) -> list[str]:
    """Take on the parent's import path and our memory limit, and do ahead what will be needed. Returns what the log should say."""
    sys.path[:] = [*sys.path, *(p for p in hello["path"] if p not in sys.path)]
    notes = []
    for name in hello["prewarm"]:
        notes.append(prepare(name, hello["options"].get(name, {})))
        _prepared.add(name)
    limit = int(hello["memory_mb"]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return [n for n in notes if n]


def _batch(batch: list[list[Any]], options: dict[str, dict[str, Any]], reply: int, page: frames.Progress) -> None:
    """Judge the items of one batch in order. Ends the process after an item that may have left it broken."""
    done: list[list[Any]] = []
    flushed = time.monotonic()
    fatal = False
    for index, (name, gold, response, meta) in enumerate(batch):
        if page.limit <= index:
            break
        start = time.monotonic()
        if done and start - flushed > FLUSH_AFTER:
            _write(reply, ["some", done])
            done, start = [], time.monotonic()
            flushed = start
        page.set(frames.LOADING, start)
        status, reward, detail = "raised", None, ""
        try:
            opts = options.get(name, {})
            verifier = load(name, opts)
            if name not in _prepared:
                prepare(name, opts)
                _prepared.add(name)
            start = time.monotonic()
            page.set(index, start)
            status, reward, detail = _judge(verifier, name, gold, response, opts, meta)
        except MemoryError:
            status, reward, detail, fatal = "timeout", 0.0, "out of memory", True
        except BaseException as e:  # SystemExit from a user's function included
            detail, fatal = f"{type(e).__name__}: {e}", True
        done.append([index, status, reward, detail[: frames.MAX_DETAIL], time.monotonic() - start])
        if fatal:
            break
    page.set(frames.IDLE, time.monotonic())
    _write(reply, ["last" if fatal else "all", done, _resident_kb()])
    if fatal:
        os._exit(0)


def _judge(
    verifier: Any, name: str, gold: str, response: str | None, options: dict[str, Any], meta: dict[str, Any]
) -> tuple[str, float | None, str]:
    """Status, reward and reason of one item. Without a response, the gold answer itself is on trial."""
    if response is None:
        response = canonical(name, gold, options, meta)
        if response is None:
            return "value", 1.0, "nothing to check"
    verdict = verifier.verify(gold, response, options, meta)
    if verdict.status == "error":
        return "error", None, verdict.detail
    if verdict.reward is None or not math.isfinite(verdict.reward):
        return "error", None, f"{name} gave a reward of {verdict.reward}"
    return verdict.status, float(verdict.reward), verdict.detail


def _write(fd: int, message: Any) -> None:
    data = memoryview(frames.pack(message))
    while data:
        data = data[os.write(fd, data) :]


def _resident_kb() -> int:
    with open("/proc/self/statm", "rb") as f:
        return int(f.read().split()[1]) * (mmap.PAGESIZE // 1024)
