"""A Ray head with a job server, for this machine alone: `python -m cluster.job_head` starts it, and ends it when standard input ends.

Every port is free, on loopback, and outside of those that Ray keeps for its workers; the token is the head's own. Like a private
cluster (`cluster.head`) it lives in a session apart, and is gone when whoever asked for it is.
"""

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
import urllib.error
import urllib.request
from pathlib import Path

from cluster.head import END_SECONDS, MARK, OBJECT_STORE, ONE_MACHINE, HeadProcess, read_environment_again
from cluster.jobs import STOP_SECONDS

START_SECONDS = 120.0
WORKER_PORTS = range(10002, 20000)  # Ray's own


class JobHead(HeadProcess):
    """The head, seen from who asked for it. `address` is that of its job server; this process's environment is that of its clients."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="winnow-"))  # short: the paths of Ray's sockets have at most 107 characters
        os.environ.update(client_environment(self.folder))
        read_environment_again()
        super().__init__("cluster.job_head", str(self.folder), log=f"the line above and {self.folder}/head.log")

    def close(self, seconds: float = 3 * END_SECONDS) -> None:
        """End it, and remove its folder."""
        super().close(seconds)
        shutil.rmtree(self.folder, ignore_errors=True)


def client_environment(folder: Path) -> dict[str, str]:
    """What a client of the head needs in its environment; the token is made where it is not there yet."""
    token = folder / "token"
    if not token.exists():
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


def free_ports(number: int) -> list[int]:
    """Ports on loopback that are free, and none of Ray's own."""
    with contextlib.ExitStack() as held:
        found: list[int] = []
        while len(found) < number:
            one = held.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            found += [port] if port not in WORKER_PORTS else []
        return found


def start(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """`ray start` in `folder`, and the job server's address. Raises RuntimeError when that does not answer."""
    names = (
        "port", "dashboard-port", "metrics-export-port", "ray-client-server-port", "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port", "runtime-env-agent-port",
    )  # fmt: skip
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    python = Path(sys.executable).parent
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env = {
        **kept,
        **client_environment(folder),
        "PATH": f"{python}{os.pathsep}{os.environ.get('PATH', '')}",
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
        ONE_MACHINE: "0",  # so that all of it is on loopback
    }
    command = [str(python / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--dashboard-host", "127.0.0.1"]
    command += ["--num-cpus", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    command += ["--object-store-memory", str(OBJECT_STORE), "--temp-dir", str(folder)]
    command += [word for name, port in ports.items() for word in (f"--{name}", str(port))]
    with open(folder / "head.log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    jobs = f"http://127.0.0.1:{ports['dashboard-port']}"
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if _answers(jobs):
            return process, jobs
        time.sleep(0.3)
    process.kill()
    last = (folder / "head.log").read_text(errors="replace").strip().splitlines()[-5:]
    raise RuntimeError("Ray's job server did not answer: " + " | ".join(last))


def _answers(jobs: str) -> bool:
    """Whether the job server is there; that it asks for a token is an answer too."""
    try:
        urllib.request.urlopen(f"{jobs}/api/version", timeout=2).close()
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)
    except OSError:
        return False
    return True


def main(folder: Path) -> int:
    """Start, say where, and wait for the end of standard input."""
    try:
        process, jobs = start(folder)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(MARK + jobs, flush=True)
    sys.stdin.read()
    process.terminate()  # `ray start --block` then ends all that it has started
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
