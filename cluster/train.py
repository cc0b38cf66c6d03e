"""`winnow train`: takes the run's folder, lets a private Ray come up while the run's imports take their seconds, and runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import placement
from cluster.config import RunConfig
from cluster.runfolder import RunFolder, has_run
from rollout.errors import UserError

TINY = "tiny"  # made by code, also where a folder is called so
JOB_COPY = "working_dir_files"  # the folder in which Ray unpacks what was submitted


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `code` is the exit code, `summary` what summary.json holds."""

    code: int
    run_dir: Path
    summary: Mapping[str, Any]


def train(cfg: RunConfig) -> int:
    """`winnow train`: the exit code; the run folder's path is the last line printed."""
    result = run(cfg)
    if JOB_COPY in result.run_dir.absolute().parts:
        print("the run folder lies in the job's copy of the code, which Ray removes in time: give --run_dir as an absolute path")
    print(result.run_dir.resolve())
    return result.code


def with_whole_paths(cfg: RunConfig) -> RunConfig:
    """The config with checkpoint folders as absolute paths: actors, and a resume, have other working directories."""
    model, critic = cfg.model.model, cfg.critic.value_model
    return cfg.model_copy(
        update={
            "model": cfg.model.model_copy(update={"model": whole_path(model)}),
            "critic": cfg.critic.model_copy(update={"value_model": critic and whole_path(critic)}),
        }
    )


def whole_path(name: str) -> str:
    """A folder's absolute path; the name of anything else as it is."""
    return str(Path(name).absolute()) if Path(name).is_dir() and name != TINY else name


def run(cfg: RunConfig, *, seconds_setup: float = 0.0) -> RunResult:
    """Train a config that `check.raise_first` has accepted, and give the summary. The folder is locked while it runs."""
    if cfg.resume == "auto":
        cfg = cfg.model_copy(update={"resume": has_run(cfg.run_dir)})
    folder = RunFolder.open(cfg.run_dir, cfg.name, bool(cfg.resume))
    try:
        cfg = with_whole_paths(cfg.model_copy(update={"run_dir": str(folder.path)}))
        placement.begin(cfg)
        from cluster.run import Session

        session = Session(cfg, folder, seconds_setup)
        code = asyncio.run(session.main())
        return RunResult(code, folder.path, session.summary)
    except UserError:
        folder.discard()
        raise
    finally:
        placement.leave()
        folder.close()
