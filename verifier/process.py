"""One verifier process seen from the pool: start it ahead, talk to it without ever blocking, kill it with all its children, reap it."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from verifier import frames

ROOT = str(Path(__file__).resolve().parent.parent)
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from verifier.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
STDERR_KEPT = 2000  # characters of a process's last words


class Process:
    """A process and its pipes. Every method returns at once; the pool's one thread is the only caller."""

    def __init__(self, hello: dict[str, Any]) -> None:
        """Start it and send it `hello` (prewarm, options, memory_mb, path). Raises OSError when the machine cannot start a process."""
        memory = os.memfd_create("winnow-verifier", os.MFD_CLOEXEC)
        os.ftruncate(memory, frames.PAGE)
        self._progress = frames.Progress(mmap.mmap(memory, frames.PAGE))
        self._progress.set(frames.IDLE, 0.0)
        try:
            # A session of its own: Ctrl-C at the terminal reaches the pool, never its processes.
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, ROOT, str(os.getpid()), str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=(memory,),
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            )
        finally:
            os.close(memory)
        assert self._popen.stdin and self._popen.stdout and self._popen.stderr
        self.pid = self._popen.pid
        self.stdin, self.stdout, self.stderr = (f.fileno() for f in (self._popen.stdin, self._popen.stdout, self._popen.stderr))
        for fd in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(fd, False)
        self._reader = frames.Reader()
        self._out: deque[memoryview] = deque()
        self._words = b""
        self.born = time.monotonic()
        self.ready = False
        self.served = 0
        self.batch: list[Any] = []
        self.sent = 0.0
        self.recalled = False
        self.resident_kb = 0
        self._send(hello)

    def give(self, batch: list[Any], message: Any) -> None:
        """Hand over a batch; `batch` is what the pool knows of its items, `message` what the process is told."""
        assert self.ready and not self.batch
        self.batch, self.sent, self.recalled = batch, time.monotonic(), False
        self.served += len(batch)
        self._progress.limit = len(batch)
        self._send(message)

    def recall(self, index: int) -> None:
        """Ask it to start no item from `index` on. It may just have started one."""
        self._progress.limit = index
        self.recalled = True

    def progress(self) -> tuple[int, float]:
        """Which item of its batch it is at (or IDLE, LOADING), and since when by the monotonic clock."""
        return self._progress.get()

    def _send(self, message: Any) -> None:
        self._out.append(memoryview(frames.pack(message)))
        self.flush()

    @property
    def unsent(self) -> bool:
        """True while the pipe has not taken everything."""
        return bool(self._out)

    def flush(self) -> None:
        """Write as much as the pipe takes."""
        try:
            while self._out:
                head = self._out[0]
                n = os.write(self.stdin, head)
                if n == len(head):
                    self._out.popleft()
                else:
                    self._out[0] = head[n:]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # it is gone; its end shows on stdout

    def receive(self) -> tuple[list[Any], bool]:
        """Complete messages, and whether it has closed its end. A reply that breaks the rules counts as the end."""
        messages: list[Any] = []
        while True:
            try:
                data = os.read(self.stdout, 1 << 18)
            except BlockingIOError:
                return messages, False
            except OSError:
                return messages, True
            if not data:
                return messages, True
            try:
                messages += self._reader.feed(data)
            except ValueError:
                return messages, True

    def listen(self) -> bool:
        """Take what it writes to stderr and keep the end of it. False when it has closed its end."""
        try:
            while data := os.read(self.stderr, 1 << 16):
                self._words = (self._words + data)[-STDERR_KEPT:]
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    @property
    def last_words(self) -> str:
        """The last line it wrote to stderr."""
        lines = self._words.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    def kill(self) -> str:
        """SIGKILL to it, its group and all its descendants, and reap. Returns how it had ended, in words."""
        kill_tree(self.pid)
        code = self._popen.wait()
        self.listen()
        for f in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            with contextlib.suppress(OSError, AttributeError):
                f.close()  # type: ignore[union-attr]
        self._progress.close()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"ended by {signal.Signals(-code).name}"
        return f"ended with code {code}"


def descendants(pid: int) -> list[int]:
    """Pids of all living descendants of `pid`, nearest first."""
    found, queue = [], [pid]
    while queue:
        parent = queue.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{task}/children", "rb") as f:
                    children = [int(c) for c in f.read().split()]
                    found += children
                    queue += children
    return found


def kill_tree(pid: int) -> None:
    """SIGKILL to an unreaped child of ours, its process group and every descendant, those that left the group included."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)  # it must not start more while we look
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)
