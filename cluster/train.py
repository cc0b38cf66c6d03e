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


def run(cfg: RunConfig, *, seconds_setup: float = 0.0) -> RunResult:
    """Train a config that `check.raise_first` has accepted, and give the summary. The folder is locked while it runs."""
    if cfg.resume == "auto":
        cfg = cfg.model_copy(update={"resume": has_run(cfg.run_dir)})
    folder = RunFolder.open(cfg.run_dir, cfg.name, bool(cfg.resume))
    try:
        cfg.run_dir = str(folder.path)
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
