"""A private Ray cluster as a process of its own: `python -m cluster.head` starts it, and ends it when its standard input ends.

It lives in a session apart from the run's, so that a signal to the run's whole process group (Ctrl-C in a terminal,
`timeout`) reaches the run alone, which can then write its checkpoint with its actors still there. Whatever becomes of the
run, its end closes the pipe, and the cluster is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

OBJECT_STORE = 512 * 2**20  # bytes; a private cluster holds a few batches of tokens
ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# Ray starts a worker for each core in advance, of which a run can use none: its actors have environments of their own.
NO_IDLE_WORKERS = {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
MARK = "winnow-head "
END_SECONDS = 8.0


class HeadProcess:
    """`python -m MODULE ARGS` as a head that ends with its standard input. `address` is what it says behind `MARK` when it is up."""

    def __init__(self, module: str, *args: str, stderr: int | None = None, log: str) -> None:
        """Start it, and wait for nothing."""
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
            env=os.environ | NO_IDLE_WORKERS,
        )

    @cached_property
    def address(self) -> str:
        """Where it is, once it is up. Raises RuntimeError, which names its log, when it does not come up."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return line.removeprefix(MARK).strip()
        raise RuntimeError(f"Ray did not start (exit code {self.process.wait()}): see {self.log}")

    def close(self, seconds: float = END_SECONDS) -> None:
        """End it, hard when it does not end by itself in that time."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Head(HeadProcess):
    """The private cluster, seen from the run. `address` is where to join it."""

    def __init__(self) -> None:
        show_token()
        stay_on_loopback()
        super().__init__("cluster.head", stderr=subprocess.DEVNULL, log="/tmp/ray/session_latest/logs")


def show_token() -> None:
    """Show a cluster that asks for it the token that `ray.init` left, unless the user has said otherwise."""
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        read_environment_again()


def read_environment_again() -> None:
    """Ray reads its environment when it is imported, and once more here."""
    from ray._raylet import Config  # type: ignore[attr-defined]  # compiled

    Config.initialize("")


def stay_on_loopback() -> None:
    """This process and those that it starts listen on 127.0.0.1 alone.

    Left to itself Ray takes the address of a network card for the node's, and its servers listen on all of them; told that this
    machine cannot be part of a larger cluster (which is meant for laptops of other systems, and holds on any) it takes 127.0.0.1.
    The links between learner ranks and of vLLM choose their network card by themselves too.
    """
    for name, value in ON_LOOPBACK.items():
        os.environ.setdefault(name, value)
    os.environ[ONE_MACHINE] = "0"
    if "ray" in sys.modules:  # Ray has read its environment when it was imported
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = False


def leave_out() -> None:
    """Let a private cluster come up without three processes that do nothing for it, and take seconds of a core each to start.

    They are the API server (there is no dashboard), the monitor (nothing here scales) and the monitor of logs (no
    driver shows its workers' output). `ray.init` has no switch for them.
    """
    from ray._private.node import Node

    for name in ("start_api_server", "start_monitor", "start_log_monitor"):
        assert hasattr(Node, name), f"this Ray has no Node.{name}"
        setattr(Node, name, lambda self, **_: None)


def main() -> int:
    """Start Ray, say where, and wait for the end of standard input."""
    import ray

    leave_out()
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    # "local": a cluster of its own, even where another runs on this machine, or where the trace of one that has died is left.
    context = ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE, **quiet)
    print(MARK + str(context.address_info["gcs_address"]), flush=True)
    sys.stdin.read()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
