"""What the tests of operation share: a real Ray head with dashboard and job server, on ports and with a token of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class RayHead:
    """A head under way. `env` is the environment in which clients reach it; `metrics_port` serves Prometheus's format."""

    address: str
    jobs: str
    metrics_port: int
    temp: Path
    env: dict[str, str]
    process: subprocess.Popen[bytes]

    def run(self, args: Sequence[str | Path], timeout: float = 300.0, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """A command in the head's environment, to its end; stderr is part of stdout."""
        return subprocess.run(
            [str(a) for a in args], cwd=cwd, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout
        )


def free_ports(number: int) -> list[int]:
    """Free ports that Ray does not keep for its workers (10002 to 19999)."""
    held: list[socket.socket] = []
    while len(held) < number:
        one = socket.socket()
        one.bind(("127.0.0.1", 0))
        if not 10002 <= one.getsockname()[1] <= 19999:
            held.append(one)
        else:
            one.close()
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def head_environment(folder: Path) -> dict[str, str]:
    """The environment of a head on this machine alone: its Python first on PATH, a token of its own, nothing of an outer Ray's."""
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return {
        **kept,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_JOB_STOP_WAIT_TIME_S": "120",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a cluster of one machine: every port on loopback
    }


def start_head(folder: Path, cpus: int = 8, seconds: float = 90.0) -> RayHead:
    """Start a head and wait for its job server."""
    gcs, dashboard, metrics, client, agent, grpc, runtime_env = free_ports(7)
    env = head_environment(folder)
    command = [
        str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--temp-dir", str(folder),
        "--num-cpus", str(cpus), "--object-store-memory", str(2**29), "--port", str(gcs), "--metrics-export-port", str(metrics),
        "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard), "--ray-client-server-port", str(client),
        "--dashboard-agent-listen-port", str(agent), "--dashboard-agent-grpc-port", str(grpc), "--runtime-env-agent-port", str(runtime_env),
    ]  # fmt: skip
    log = open(folder / "head.log", "wb")  # noqa: SIM115
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    log.close()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{dashboard}/api/gcs_healthz", timeout=2):
            break
        time.sleep(0.3)
    else:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError("Ray's head did not start:\n" + (folder / "head.log").read_text()[-4000:])
    return RayHead(f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}", metrics, folder, env, process)


def stop_head(head: RayHead) -> None:
    """End it in order, then hard, and remove its files."""
    head.process.send_signal(signal.SIGTERM)
    try:
        head.process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(head.process.pid, signal.SIGKILL)
        head.process.wait(10)
    shutil.rmtree(head.temp, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_head() -> Iterator[RayHead]:
    """A head for all tests of operation. Its folder has a short name: the paths of Ray's sockets are long."""
    head = start_head(Path(tempfile.mkdtemp(prefix="winnow-")))
    yield head
    stop_head(head)
