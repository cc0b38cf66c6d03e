"""Runs as jobs of a Ray cluster, by Ray's own client: connect, submit, find, follow, stop.

A job is found again by its run folder, which stands in its metadata; in a job of `ray job submit` it is read off the entrypoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
"""What is sent to the cluster, without what .gitignore and .rayignore name."""
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ANSWER_SECONDS = 10.0
AWAY_SECONDS = 60.0
STOP_SECONDS = 600
"""How long Ray lets a run that was told to stop finish its batch and write a checkpoint, before it kills it."""
RUN_DIR, NAME = "run_dir", "job_name"  # keys of a job's metadata
_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
STOPPED = 130  # exit code of a run that was stopped, as of one that got the signal itself

Say = Callable[[str], object]


def connect(address: str | None = None) -> Any:
    """A client of the job server at `address` (default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, else the dashboard's port here).

    The machine's token is shown only to a server that asks for one. Raises UserError when nothing answers within 10 s.
    """
    given = address or next((os.environ[name] for name in _ADDRESSES if os.environ.get(name)), DEFAULT_ADDRESS)
    answer: list[Any] = []
    asking = threading.Thread(target=lambda: answer.append(_client(given)), daemon=True)  # Ray's client knows no deadline
    asking.start()
    asking.join(ANSWER_SECONDS)
    said = answer[0] if answer else f"nothing answered within {ANSWER_SECONDS:g} s"
    if isinstance(said, str):
        raise UserError(
            f"there is no job server of Ray at {given} ({said}): "
            "give the address of the head's dashboard as --address http://HOST:PORT, or start a head (docs/operating.md)"
        )
    return said


def _client(address: str) -> Any:
    """A client, or what was wrong in a few words."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    from cluster.head import show_token

    for name in ("ray.dashboard", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what it leaves out and where it uploads to
    try:
        with _no_other_address():
            try:
                return JobSubmissionClient(address)
            except AuthenticationError:
                show_token()
                return JobSubmissionClient(address)
    except AuthenticationError:
        return "it refuses this machine's token: set RAY_AUTH_MODE=token and put the head's token into ~/.ray/auth_token"
    except ConnectionError:
        return "nothing listens there"
    except Exception as error:  # whatever listens there may answer anything
        return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")


@contextmanager
def _no_other_address() -> Iterator[None]:
    """Ray's client prefers its environment variables to the address that it is given; not so here."""
    kept = {name: os.environ.pop(name) for name in _ADDRESSES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def submit(client: Any, recipe: str, flags: Sequence[str], run_dir: Path, name: str, env: Mapping[str, str] | None = None) -> str:
    """Submit `winnow train RECIPE [flags]` and give the job's id. It goes on from what `run_dir` (absolute) holds, if that is anything.

    `env` are environment variables of the run, which Ray shows to whoever may list its jobs: no secrets.
    """
    command = ["python", "-m", "cluster.launch", "train", recipe, *flags, "--name", name, "--run_dir", str(run_dir), "--resume", "auto"]
    given = {"OMP_NUM_THREADS": "1", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), **(env or {})}
    job_id = re.sub(r"[^\w.-]", "-", f"{run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        client.submit_job(
            entrypoint=shlex.join(command),
            submission_id=job_id,
            runtime_env={"working_dir": str(ROOT), "env_vars": given},
            metadata={NAME: name, RUN_DIR: str(run_dir)},
        )
    except (RuntimeError, ValueError) as error:
        why = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"Ray does not take the job ({why}): keep large files out of {ROOT}, and see that the head is whole") from None
    return job_id


def jobs(client: Any) -> list[Any]:
    """All jobs that were submitted to the cluster (Ray's JobDetails), newest first."""
    return sorted((job for job in client.list_jobs() if job.submission_id), key=lambda job: -(job.start_time or 0))


def run_dir_of(job: Any) -> str | None:
    """The run folder of a job; None when nothing says it."""
    if job.metadata and RUN_DIR in job.metadata:
        return str(job.metadata[RUN_DIR])
    words = shlex.split(job.entrypoint)
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in ("--run_dir", "--run-dir"):
            return value if equals else following
    return None


def holder(client: Any, run_dir: Path) -> Any | None:
    """The live job that runs in this folder, if there is one."""
    return next((job for job in jobs(client) if not job.status.is_terminal() and run_dir_of(job) == str(run_dir)), None)


def find(client: Any, what: str) -> Any:
    """The job of that id, run folder or name: a live one if there is one, else the newest. Raises UserError when there is none."""
    everyone = jobs(client)
    folder = str(Path(what).absolute())
    found = [
        job for job in everyone if what in (job.submission_id, (job.metadata or {}).get(NAME), Path(run_dir_of(job) or "/").name)
        or run_dir_of(job) == folder
    ]  # fmt: skip
    if not found:
        known = ", ".join(job.submission_id for job in everyone[:5]) or "none"
        raise UserError(f"the cluster has no job {what!r} by id, name or run folder: the newest are {known}; winnow jobs lists them all")
    return next((job for job in found if not job.status.is_terminal()), found[0])


def stop(client: Any, job_id: str) -> bool:
    """Ask a job to stop: its run finishes the batch at work and writes a checkpoint. False when it had ended before."""
    return bool(client.stop_job(job_id))


def follow(client: Any, job_id: str, write: Say = sys.stdout.write) -> int:
    """Write the log of a job as it grows, until the job has ended; its exit code (130 when it was stopped)."""
    asyncio.run(_tail(client, job_id, write))
    return ended(client, job_id)


async def _tail(client: Any, job_id: str, write: Say) -> None:
    """All of the log, over as many connections as it takes: a new one begins at the start, so what was written is passed over."""
    import aiohttp

    written = 0
    while True:
        at = 0
        try:
            async for text in client.tail_job_logs(job_id):
                fresh = text[max(0, written - at) :]
                at += len(text)
                if fresh:
                    write(fresh)
                    sys.stdout.flush()
                written = max(written, at)
        except (RuntimeError, aiohttp.ClientError, OSError):
            pass
        if (await asyncio.to_thread(info, client, job_id)).status.is_terminal():
            return
        await asyncio.sleep(1.0)


def info(client: Any, job_id: str) -> Any:
    """Ray's JobDetails of one job. Raises UserError when the job server has not answered for a minute."""
    import requests

    deadline = time.monotonic() + AWAY_SECONDS
    while True:
        try:
            return client.get_job_info(job_id)
        except requests.exceptions.RequestException:
            if time.monotonic() > deadline:
                raise UserError(f"the job server has not answered for {AWAY_SECONDS:g} s: see whether Ray's head still lives") from None
            time.sleep(1.0)


def ended(client: Any, job_id: str, seconds: float | None = None) -> int:
    """Wait for a job's end and give its exit code. Raises TimeoutError after `seconds`."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while not (job := info(client, job_id)).status.is_terminal():
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"job {job_id} has not ended within {seconds:g} s")
        time.sleep(0.5)
    if job.status.value == "STOPPED":
        return STOPPED
    return 0 if job.status.value == "SUCCEEDED" else int(job.driver_exit_code or 1)
