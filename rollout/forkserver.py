"""A process that has vLLM imported, from which the core of an engine on CPUs is forked.

vLLM starts its core as a new interpreter once its owner has imported vLLM, and the core then imports all of it again: some ten seconds of
one core after another ten. Here the second import runs beside the first (Python's own `multiprocessing.forkserver`), and a core is there
as soon as its owner asks. Only on CPUs: a process that has touched a GPU must not be forked.
"""

from __future__ import annotations

import glob
import multiprocessing
import multiprocessing.forkserver
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

_users = 0  # engines of this process that were started and not stopped


def start() -> None:
    """Begin with the imports, in a process of its own; call it when the environment of cores is set. As many `stop` as `start` end it."""
    global _users
    _users += 1
    os.environ["LD_PRELOAD"] = with_gomp(os.environ.get("LD_PRELOAD", ""))
    multiprocessing.set_forkserver_preload(["rollout.preloaded"])
    multiprocessing.forkserver.ensure_running()


def stop() -> None:
    """End the process, unless another engine's core is its child. It has nothing to lose, and would take seconds to forget its modules."""
    global _users
    _users -= 1
    server: Any = multiprocessing.forkserver._forkserver
    if _users:
        return
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()


def with_gomp(preloaded: str) -> str:
    """`LD_PRELOAD` with torch's own libgomp, as vLLM sets it for a core: a library can only be loaded first when a process starts."""
    spec = find_spec("torch")
    if "libgomp" in preloaded or spec is None or spec.origin is None:
        return preloaded
    found = sorted(glob.glob(str(Path(spec.origin).parent / "lib" / "libgomp*.so*")))
    return ":".join([*filter(None, [preloaded]), *found[:1]])


class Core(ForkServerProcess):
    """A forked process that has the environment of the one that asked for it, as a spawned one would."""

    def start(self) -> None:
        """Take the environment along."""
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """In the fork. What is the same stays where it lies: the process is named by writing over it."""
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in self.environment.items() if os.environ.get(name) != value})
        super().run()


class Context(ForkServerContext):
    """What vLLM takes its processes from."""

    Process = Core  # type: ignore[assignment]


@contextmanager
def forked() -> Iterator[None]:
    """In the block vLLM forks its core from that process."""
    from vllm.v1.engine import utils

    before = utils.get_mp_context
    utils.get_mp_context = Context
    try:
        yield
    finally:
        utils.get_mp_context = before
