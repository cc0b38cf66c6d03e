"""What a run needs of a machine, and what this one has; and the line in which `winnow check` says so."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.config import RunConfig


@dataclass(frozen=True)
class Finding:
    """One line of the report: `ok`, `problem` (a sentence with key, value and remedy) or `unseen` (not known on this machine)."""

    state: Literal["ok", "problem", "unseen"]
    part: str
    text: str


def gpus_here() -> int:
    """GPUs that a process started here could use: those of the driver, cut down by CUDA_VISIBLE_DEVICES."""
    there = _driver_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    named = [v for v in visible.split(",") if v.strip()]
    if "-1" in named:
        named = named[: named.index("-1")]
    return min(there, len(named))


def _driver_gpus() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            said = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False).stdout
            return sum(line.startswith("GPU ") for line in said.splitlines())
        except (OSError, subprocess.TimeoutExpired):
            pass
    return sum(p.name.removeprefix("nvidia").isdigit() for p in Path("/dev").glob("nvidia*"))


def cpus_here() -> int:
    """CPUs that a process started here may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cluster_address(cfg: RunConfig) -> str | None:
    """The address of the cluster that is joined; None for a private one on this machine."""
    address = cfg.cluster.ray_address or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def look(cfg: RunConfig, *, learner: bool = True) -> Iterator[Finding]:
    """Findings on GPUs and CPUs; a cluster that is joined by address is asked when the run starts."""
    roll, model, verify = cfg.rollout, cfg.model, cfg.verify
    ranks = model.learner_ranks if learner else 0
    gpus = roll.engines * roll.engine_gpus + ranks * model.learner_gpus
    cpus = roll.engines * roll.engine_cpus + ranks * model.learner_cpus + verify.verifier_actors * verify.verifier_cpus
    ranked = f", model.learner_ranks = {ranks} with learner_gpus = {_n(model.learner_gpus)}" if learner else ""
    needs = f"the run needs {_gpus(gpus)} (rollout.engines = {roll.engines} with engine_gpus = {_n(roll.engine_gpus)}{ranked})"
    address = cluster_address(cfg)
    if address:
        text = f"{needs} and {_n(cpus)} CPUs of the cluster at {address}, which is asked when the run starts"
        yield Finding("unseen", "resources", text)
        return
    have_gpus, have_cpus = (gpus_here() if gpus else 0), cpus_here()
    if gpus > have_gpus:
        yield Finding("problem", "resources", f"{needs} and this machine has {have_gpus}: lower these, or run where there are more")
    if cpus > have_cpus:
        yield Finding("problem", "resources", (
            f"the run needs {_n(cpus)} CPUs (rollout.engines = {roll.engines} with engine_cpus = {_n(roll.engine_cpus)}, "
            f"model.learner_ranks = {model.learner_ranks} with learner_cpus = {_n(model.learner_cpus)}, "
            f"verify.verifier_actors = {verify.verifier_actors} with verifier_cpus = {_n(verify.verifier_cpus)}) "
            f"and this machine has {have_cpus}: lower these, or run where there are more"
        ))  # fmt: skip
    if gpus <= have_gpus and cpus <= have_cpus:
        first = f"{_n(gpus)} of {_gpus(have_gpus)}" if gpus else "no GPU"
        yield Finding("ok", "resources", f"{first}, {_n(cpus)} of {have_cpus} CPUs")


def _gpus(amount: float) -> str:
    return f"{_n(amount)} GPU" + ("" if amount == 1 else "s")


def _n(amount: float) -> str:
    return f"{amount:g}"
