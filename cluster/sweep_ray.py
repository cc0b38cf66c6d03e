"""The job server of a Ray cluster, as a sweep sees it: the cluster that is given, or a head of the sweep's own on this machine."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from cluster import jobs, load
from cluster.job_head import JobHead
from cluster.resources import cpus_here, gpus_here
from cluster.submit import as_sent
from cluster.sweep_jobs import Jobs, State


class Submitted:
    """Jobs of a cluster that is given, submitted as `winnow submit` does. Their output is kept beside the run folder, as NAME.log."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._ids: dict[Path, str] = {}

    def running(self) -> Sequence[Path]:
        alive = [job for job in jobs.jobs(self.client) if not job.status.is_terminal()]
        self._ids = {Path(where): job.submission_id for job in alive if (where := jobs.run_dir_of(job))}
        return list(self._ids)

    def submit(self, run_dir: Path, recipe: str, flags: Sequence[str]) -> None:
        sent = recipe if recipe in load.builtin_recipes() else as_sent(Path(recipe))
        self._ids[run_dir] = jobs.submit(self.client, sent, flags, run_dir, run_dir.name)

    def state(self, run_dir: Path) -> State:
        status = jobs.info(self.client, self._ids[run_dir]).status
        return "running" if not status.is_terminal() else "succeeded" if status.value == "SUCCEEDED" else "failed"

    def stop(self, run_dir: Path) -> None:
        jobs.stop(self.client, self._ids[run_dir])

    def log(self, run_dir: Path) -> str:
        text = str(self.client.get_job_logs(self._ids[run_dir]))
        with open(run_dir.with_name(f"{run_dir.name}.log"), "a", encoding="utf-8") as file:
            file.write(text)
        return text


class Local(Submitted):
    """Jobs of a head on this machine: they run where the sweep was called, like `winnow train`, and nothing is sent."""

    def submit(self, run_dir: Path, recipe: str, flags: Sequence[str]) -> None:
        words = [sys.executable, "-u", "-m", "cluster.launch", "train", recipe, *flags, "--name", run_dir.name, f"--run_dir={run_dir}"]
        path = os.pathsep.join([str(jobs.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._ids[run_dir] = self.client.submit_job(
            entrypoint=f"cd {shlex.quote(os.getcwd())} && exec {shlex.join([*words, '--resume', 'auto'])}",
            submission_id=f"{re.sub(r'[^a-zA-Z0-9-]+', '-', run_dir.name)}-{secrets.token_hex(4)}",
            runtime_env={"env_vars": {"PYTHONPATH": path, "RAY_JOB_STOP_WAIT_TIME_S": str(jobs.STOP_SECONDS)}},
            metadata={jobs.RUN_DIR: str(run_dir)},
        )


def ray_jobs(address: str | None) -> AbstractContextManager[tuple[Jobs, float, float]]:
    """The jobs of the server at `address`, or of a head of the sweep's own; with the CPUs and GPUs that there are."""
    return own_head() if address is None else given_cluster(address)


@contextmanager
def own_head() -> Iterator[tuple[Jobs, float, float]]:
    """A head that ends with the sweep, and the machine's CPUs and GPUs."""
    head = JobHead()
    try:
        yield Local(jobs.connect(head.address)), float(cpus_here()), float(gpus_here())
    finally:
        head.close()


@contextmanager
def given_cluster(address: str) -> Iterator[tuple[Jobs, float, float]]:
    """A cluster that stays, and what all its nodes have. Raises UserError when nothing answers."""
    from ray.util.state import list_nodes

    client = jobs.connect(address)
    nodes = [node.resources_total for node in list_nodes(address=address) if node.state == "ALIVE"]
    yield Submitted(client), sum(node.get("CPU", 0.0) for node in nodes), sum(node.get("GPU", 0.0) for node in nodes)
