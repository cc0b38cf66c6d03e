"""`winnow submit` and `winnow jobs`: a run on a Ray cluster from any machine that reaches its job server.

Everything that can be known is looked at before anything is submitted: the recipe, the address, the run folder. The same line
submitted again goes on with the same run, since a run's folder is named by its settings unless `--run_dir` names it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster import jobs, load
from cluster.config import RunConfig, resolved_objective
from rollout.errors import UserError

NOT_OF_THE_RUN = ("run_dir", "resume", "name", "log", "cluster")
"""Settings that do not make another run: where it lies, what it is called, what it says, where it runs."""


def submit(argv: Sequence[str]) -> int:
    """`winnow submit RECIPE [flags] [--address URL] [--detach]`: the exit code of the run, 130 when it is no longer followed."""
    rest, address, detach = _own_flags(argv)
    flags, recipes = load.parse_flags(rest)
    if len(recipes) != 1:
        got = f"got {len(recipes)}: {' '.join(recipes)}" if recipes else "got none"
        raise UserError(f"winnow submit takes one recipe, {got}; write winnow submit RECIPE [flags] [--address URL]")
    cfg = load.resolve(recipes[0], flags)
    run_dir = run_folder(cfg)
    check(cfg)
    client = jobs.connect(address)
    refuse_held(client, run_dir)
    recipe = recipes[0] if recipes[0] in load.builtin_recipes() else as_sent(Path(recipes[0]))
    job_id = jobs.submit(client, recipe, _as_words(flags), run_dir, cfg.name)
    print(f"submitted {job_id}, run folder {run_dir}", flush=True)
    return 0 if detach else watch(client, job_id)


def watch(client: Any, job_id: str) -> int:
    """Follow a job to its end. Ctrl-C lets go of it: a run on a cluster must not end with a terminal."""
    try:
        code = jobs.follow(client, job_id)
    except KeyboardInterrupt:
        print(f"\nthe run goes on: winnow jobs follow {job_id} shows it again, winnow jobs stop {job_id} ends it in order", file=sys.stderr)
        return jobs.STOPPED
    job = jobs.info(client, job_id)
    if job.status.value == "FAILED" and job.driver_exit_code is None:  # it never started, so its log says nothing
        print(job.message, file=sys.stderr)
    print(f"{job_id} has {'succeeded' if code == 0 else 'been stopped' if code == jobs.STOPPED else f'failed with exit code {code}'}")
    return code


def manage(argv: Sequence[str]) -> int:
    """`winnow jobs [follow JOB | stop JOB] [--address URL]`; JOB is an id, a name or a run folder."""
    rest, address, _ = _own_flags(argv)
    if rest and (rest[0] not in ("follow", "stop") or len(rest) != 2):
        raise UserError(f"winnow jobs does not know {' '.join(rest)!r}: write winnow jobs, winnow jobs follow JOB or winnow jobs stop JOB")
    client = jobs.connect(address)
    if not rest:
        for job in jobs.jobs(client):
            print(f"{job.submission_id}  {job.status.value:<9}  {jobs.run_dir_of(job) or job.entrypoint}")
        return 0
    job = jobs.find(client, rest[1])
    if rest[0] == "follow":
        return watch(client, job.submission_id)
    if not jobs.stop(client, job.submission_id):
        print(f"{job.submission_id} had ended before ({job.status.value.lower()})")
        return 0
    print(f"{job.submission_id} is told to stop: it finishes its batch and writes a checkpoint", flush=True)
    jobs.ended(client, job.submission_id)
    print("\n".join(client.get_job_logs(job.submission_id).splitlines()[-2:]))
    return 0


def check(cfg: RunConfig) -> None:
    """What `winnow check` finds, but the machine: the run will have another. Raises UserError."""
    from cluster.check import raise_first

    for key, model in (("model.model", cfg.model.model), ("critic.value_model", cfg.critic.value_model)):
        if model is not None and not Path(model).is_absolute() and Path(model).is_dir():
            raise UserError(f"{key} = {model!r} is a folder of this machine, and models are not sent along: give its absolute path there")
    raise_first(cfg.model_copy(update={"cluster": cfg.cluster.model_copy(update={"ray_address": "the cluster"})}))


def refuse_held(client: Any, run_dir: Path) -> None:
    """Raises UserError when a live job or a live run on this machine holds the folder."""
    from cluster.runfolder import holder

    job = jobs.holder(client, run_dir)
    if job is not None:
        raise UserError(
            f"run_dir = {str(run_dir)!r} is held by the job {job.submission_id}: follow it with winnow jobs follow, stop it with "
            "winnow jobs stop, or give another path"
        )
    who = holder(run_dir)
    if who is not None:
        raise UserError(f"run_dir = {str(run_dir)!r} is held by another live run ({who}): stop that run, or give another path")


def run_folder(cfg: RunConfig) -> Path:
    """The run folder, absolute: `--run_dir`, or runs/NAME-KEY here, where the key is that of the settings."""
    if cfg.run_dir is not None:
        return Path(cfg.run_dir).absolute()
    settings = cfg.model_dump(exclude=set(NOT_OF_THE_RUN)) | {"objective": resolved_objective(cfg).model_dump()}
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs").absolute() / f"{cfg.name}-{key}"


def as_sent(recipe: Path) -> str:
    """A recipe within the folder that is sent is named from there; another by its absolute path, which the head must have."""
    path = recipe.resolve()
    return str(path.relative_to(jobs.ROOT)) if path.is_relative_to(jobs.ROOT) else str(path)


def _own_flags(argv: Sequence[str]) -> tuple[list[str], str | None, bool]:
    """The arguments that are left, --address and --detach."""
    rest: list[str] = []
    address, detach, todo = None, False, list(argv)
    while todo:
        word = todo.pop(0)
        name, equals, value = word.partition("=")
        if name == "--address":
            if not equals and not todo:
                raise UserError("--address has no value: write --address http://HOST:PORT")
            address = value if equals else todo.pop(0)
        elif name == "--detach":
            detach = True
        else:
            rest.append(word)
    return rest, address, detach


def _as_words(flags: Mapping[str, Any]) -> list[str]:
    """Parsed flags as a command line that parses to the same."""
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in flags.items()]
