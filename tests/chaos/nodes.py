"""A Ray cluster of two nodes on this machine, on loopback and free ports: a head, and a raylet that can be killed with all its workers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tests.chaos.processes import MARK, kill, marked

ROOT = Path(__file__).parents[2]
LOOPBACK = "127.0.0.1"
NODE = "WINNOW_TEST_NODE"  # in the environment of a raylet and of all its workers
UP, UP_SECONDS = "Ray runtime started", 60.0
STORE = 256 * 2**20  # bytes of each node's object store
# Groups of two-digit sums are small, and Ray would keep them with the controller; so they lie in the nodes' stores, as long ones
# do, and are lost with a node. A node that is killed is missed after seconds, not after half a minute.
RAY = {
    "RAY_max_direct_call_object_size": "1024",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_worker_niceness": "0",  # by itself Ray gives way to whatever else this machine does
    "RAY_AUTH_MODE": "token",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


def free_port() -> int:
    """A free TCP port outside 10002 to 19999, which Ray keeps for its workers."""
    while True:
        with socket.socket() as s:
            s.bind((LOOPBACK, 0))
            port = int(s.getsockname()[1])
        if not 10_000 <= port < 20_000:
            return port


class Cluster:
    """The two nodes, each the processes of a session of its own. All carry `mark`; `environment` is for the runs that join."""

    def __init__(self, mark: str, head_cpus: int, node_cpus: int) -> None:
        """`ray start` counts CPUs in whole numbers, so the recipe's shares must be whole too."""
        self.environment = {**os.environ, **RAY, MARK: mark, "RAY_AUTH_TOKEN": uuid.uuid4().hex, "PYTHONPATH": str(ROOT)}
        self.environment.pop("RAY_ADDRESS", None)
        self.address = f"{LOOPBACK}:{free_port()}"
        self.node_cpus = node_cpus
        self.nodes = 0
        self.node_process: subprocess.Popen[bytes] | None = None
        # Not Ray's usual folder, where others would find this cluster; short, for the names of its sockets.
        self.folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        head = ["--head", "--port", self.address.split(":")[1], "--include-dashboard", "false", "--num-cpus", str(head_cpus)]
        head += ["--temp-dir", self.folder.name]
        self.head_process = self._start("head", head)
        self.await_up("head")
        self.start_node()
        self.await_up("node-1")

    def _start(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        ray = str(Path(sys.executable).with_name("ray"))
        ports = ["--min-worker-port", "0", "--max-worker-port", "0", "--node-ip-address", LOOPBACK]
        command = [ray, "start", *arguments, *ports, "--object-store-memory", str(STORE), "--disable-usage-stats", "--block"]
        environment = {**self.environment, NODE: self._name(name)}
        with open(Path(self.folder.name) / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def await_up(self, name: str) -> None:
        """Until `ray start` says that the node is up. Raises RuntimeError with its words when it is not within a minute."""
        deadline = time.monotonic() + UP_SECONDS
        while UP not in (said := (Path(self.folder.name) / f"{name}.log").read_text(errors="replace")):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start: {said}")
            time.sleep(0.1)

    def _name(self, name: str) -> str:
        return f"{self.environment[MARK]}-{name}"

    def start_node(self) -> None:
        """A raylet that joins the head."""
        self.nodes += 1
        self.node_process = self._start(f"node-{self.nodes}", ["--address", self.address, "--num-cpus", str(self.node_cpus)])

    def node_ended(self) -> int | None:
        """The exit code of the extra node if it has ended; None while it lives."""
        assert self.node_process is not None
        return self.node_process.poll()

    def last_words(self) -> str:
        """The end of what the extra node said."""
        said = (Path(self.folder.name) / f"node-{self.nodes}.log").read_text(errors="replace")
        return " | ".join(line.strip() for line in said.splitlines()[-6:] if line.strip())

    def kill_node(self) -> dict[int, str]:
        """SIGKILL to the raylet and everything that it has started; what was killed."""
        assert self.node_process is not None
        found: dict[int, str] = {}
        while more := marked(self._name(f"node-{self.nodes}"), NODE):  # one that is being forked is met in the next round
            kill(more)
            found |= more
        self.node_process.wait(10)
        return found

    def node_pids(self) -> set[int]:
        """Processes of the extra node."""
        return set(marked(self._name(f"node-{self.nodes}"), NODE))

    def close(self) -> None:
        """End both in order."""
        for process in (self.node_process, self.head_process):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in (self.node_process, self.head_process):
            if process is not None:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self.folder.cleanup()
