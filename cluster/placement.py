"""Joining Ray, and a place for every actor: checked in numbers before anything waits."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import RunConfig
from cluster.head import Head
from rollout.errors import UserError


@dataclass(frozen=True)
class Places:
    """A placement group with one bundle per actor: engines first, then learner ranks, then verifiers."""

    group: PlacementGroup
    engines: int
    ranks: int
    verifiers: int

    def options(self, kind: str, index: int, bundle: dict[str, float], env: dict[str, str]) -> dict[str, Any]:
        """Ray options that put actor `index` of `kind` into its bundle."""
        first = {"engine": 0, "rank": self.engines, "verifier": self.engines + self.ranks}[kind]
        strategy = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=first + index)
        return {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": env},
        }


def bundles(config: RunConfig) -> dict[str, dict[str, float]]:
    """What one actor of each kind takes."""

    def bundle(cpus: float, gpus: float) -> dict[str, float]:
        return {"CPU": cpus, **({"GPU": gpus} if gpus else {})}

    return {
        "engine": bundle(config.rollout.engine_cpus, config.rollout.engine_gpus),
        "rank": bundle(config.model.learner_cpus, config.model.learner_gpus),
        "verifier": bundle(config.verify.verifier_cpus, 0),
    }


def counts(config: RunConfig, *, learner: bool = True) -> dict[str, int]:
    """How many actors of each kind there are; evaluation has no learner."""
    ranks = config.model.learner_ranks if learner else 0
    return {"engine": config.rollout.engines, "rank": ranks, "verifier": config.verify.verifier_actors}


_head: Head | None = None  # the private cluster that this process has started


def join(config: RunConfig) -> None:
    """Connect to Ray: to the cluster that the config or RAY_ADDRESS names (a submitted job finds it set), else to a private one."""
    global _head
    address = config.cluster.ray_address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not address:
        _head = Head()
        address = _head.address
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)


def reserve(config: RunConfig, *, learner: bool = True) -> Places:
    """Reserve a place for every actor. Raises UserError when the cluster lacks them, with the numbers."""
    each, number = bundles(config), counts(config, learner=learner)
    have = ray.cluster_resources()
    for resource, key in (("GPU", "engine_gpus, learner_gpus"), ("CPU", "engine_cpus, learner_cpus, verifier_cpus")):
        need = sum(number[kind] * each[kind].get(resource, 0) for kind in number)
        if need > have.get(resource, 0) + 1e-6:
            there = have.get(resource, 0)
            raise UserError(
                f"the run needs {need:g} {resource}s ({key}) and the cluster has {there:g}: lower engines or learner_ranks, or add nodes"
            )
    group = placement_group([each[kind] for kind in ("engine", "rank", "verifier") for _ in range(number[kind])], strategy="PACK")
    if not group.wait(config.cluster.placement_timeout):
        free = ray.available_resources()
        remove_placement_group(group)
        raise UserError(
            f"no place for the actors within placement_timeout = {config.cluster.placement_timeout:g} s: "
            f"{free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs are free; wait for other jobs, or ask for less"
        )
    return Places(group, number["engine"], number["rank"], number["verifier"])


def give_back(places: Places | None) -> None:
    """Free the places for others."""
    if places is not None:
        remove_placement_group(places.group)


def leave() -> None:
    """Disconnect; a private cluster ends with this."""
    global _head
    if ray.is_initialized():
        ray.shutdown()
    if _head is not None:
        _head.close()
        _head = None
