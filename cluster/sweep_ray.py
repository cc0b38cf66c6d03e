"""The job server of a Ray cluster, as a sweep sees it: `winnow train` as jobs, by their run folders."""

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

from ray.job_submission import JobStatus, JobSubmissionClient

from cluster.job_head import JobHead
from cluster.resources import cpus_here, gpus_here
from cluster.sweep_jobs import Jobs, State

ROOT = Path(__file__).parent.parent
RUN_DIR = "winnow_run_dir"
"""Key of a job's metadata: the run folder that it holds."""
ENDED: dict[JobStatus, State] = {JobStatus.SUCCEEDED: "succeeded", JobStatus.FAILED: "failed", JobStatus.STOPPED: "failed"}


class RayJobs:
    """Jobs of one job server. Their output is kept beside the run folder, as NAME.log, once they are over."""

    def __init__(self, client: JobSubmissionClient, python: str, runtime_env: dict[str, Any]) -> None:
        """`python` is what a shell runs before the arguments of Python."""
        self._client, self._python, self._runtime_env = client, python, runtime_env
        self._ids: dict[Path, str] = {}

    def running(self) -> Sequence[Path]:
        for job in self._client.list_jobs():
            where = (job.metadata or {}).get(RUN_DIR)
            if where and job.submission_id and not job.status.is_terminal():
                self._ids[Path(where)] = job.submission_id
        return list(self._ids)

    def submit(self, run_dir: Path, arguments: Sequence[str]) -> None:
        name = re.sub(r"[^\w-]+", "-", run_dir.name)
        self._ids[run_dir] = self._client.submit_job(
            entrypoint=f"{self._python} {shlex.join(['-m', 'cluster.launch', 'train', *arguments])}",
            submission_id=f"winnow-{name}-{secrets.token_hex(4)}",
            runtime_env=self._runtime_env,
            metadata={RUN_DIR: str(run_dir)},
        )

    def state(self, run_dir: Path) -> State:
        return ENDED.get(self._client.get_job_status(self._ids[run_dir]), "running")

    def stop(self, run_dir: Path) -> None:
        self._client.stop_job(self._ids[run_dir])

    def log(self, run_dir: Path) -> str:
        text = str(self._client.get_job_logs(self._ids[run_dir]))
        with open(run_dir.with_name(f"{run_dir.name}.log"), "a", encoding="utf-8") as file:
            file.write(text)
        return text


def ray_jobs(address: str | None) -> AbstractContextManager[tuple[Jobs, float, float]]:
    """The jobs of the server at `address`, or of a head of the sweep's own, with the CPUs and GPUs that there are."""
    if address is None:
        return own_head()
    raise NotImplementedError


@contextmanager
def own_head() -> Iterator[tuple[Jobs, float, float]]:
    """A head of the sweep's own on this machine: (its jobs, CPUs, GPUs). A job runs where the sweep was called, like `winnow train`."""
    head = JobHead()
    try:
        python = f"cd {shlex.quote(os.getcwd())} && exec {shlex.quote(sys.executable)}"
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        jobs = RayJobs(JobSubmissionClient(head.jobs), python, {"env_vars": {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}})
        yield jobs, float(cpus_here()), float(gpus_here())
    finally:
        head.close()
