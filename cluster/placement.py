"""Joining Ray, and a place for every actor: checked in numbers before anything waits."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import RunConfig
from cluster.head import Head, stay_on_loopback
from cluster.packing import why_not
from cluster.resources import cluster_address
from rollout.errors import UserError

KNOCK_SECONDS = 5.0
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Places:
    """A placement group with one bundle per actor: engines first, then learner ranks, then verifiers."""

    group: PlacementGroup
    engines: int
    ranks: int
    verifiers: int

    def options(self, kind: str, index: int, bundle: dict[str, float], env: dict[str, str]) -> dict[str, Any]:
        """Ray options that put actor `index` of `kind` into its bundle."""
        strategy = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=self._bundle(kind, index))
        return {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": strategy,
            # Ray's head would keep 3 KB of every call, for its list of tasks, until it has 100,000 of them.
            "enable_task_events": False,
            "runtime_env": {"env_vars": env},
        }

    def node(self, kind: str, index: int) -> str:
        """The node on which the bundle of an actor lies; "" after the loss of that node, until another has room."""
        return placement_group_table(self.group)["bundles_to_node_id"].get(self._bundle(kind, index)) or ""

    def _bundle(self, kind: str, index: int) -> int:
        return {"engine": 0, "rank": self.engines, "verifier": self.engines + self.ranks}[kind] + index


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


def begin(config: RunConfig) -> None:
    """Where no cluster is named, a private one starts to come up, which takes it seconds; `join` waits for it."""
    global _head
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if _head is None and not ray.is_initialized() and cluster_address(config) is None:
        _head = Head()


def join(config: RunConfig) -> None:
    """Connect to Ray: to the cluster that the config or RAY_ADDRESS names (a submitted job finds it set), else to a private one.

    Does nothing where this process has joined already. Raises UserError when the address does not answer as a cluster.
    """
    if ray.is_initialized():
        return
    address = cluster_address(config)
    begin(config)
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        assert _head is not None
        ray.init(address=_head.address, **quiet)
        return
    _knock(address)
    try:
        ray.init(address=address, **quiet)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"{_no_cluster(address)} ({str(error).strip().splitlines()[0]}): {_REMEDY}") from None


_REMEDY = "give the head's HOST:PORT as --ray_address, and RAY_AUTH_MODE=token with its token where it asks for one (docs/operating.md)"


def _no_cluster(address: str) -> str:
    return f"cluster.ray_address = {address!r} leads to no Ray cluster that this process can join"


def _knock(address: str) -> None:
    """Raises UserError when HOST:PORT does not answer as a Ray head at once: Ray itself would try again for minutes.

    A head that answers on loopback alone is one that was kept there (`stay_on_loopback`), and so is this process then.
    """
    host, _, port = address.split("://")[-1].partition("/")[0].rpartition(":")
    if not port.isdigit():  # `auto`, or what Ray may know
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"{_no_cluster(address)} ({getattr(error, 'strerror', None) or error or 'no answer'}): {_REMEDY}") from None
    if "RAY_USE_TLS" not in os.environ and not _speaks_grpc(f"{host}:{port}"):
        raise UserError(f"{_no_cluster(address)} (what answers there is no head; its dashboard?): {_REMEDY}")
    card = ray.util.get_node_ip_address()
    if host in LOOPBACK and card not in LOOPBACK:
        try:
            socket.create_connection((card, int(port)), timeout=1.0).close()
        except OSError:
            stay_on_loopback()


def _speaks_grpc(address: str) -> bool:
    channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
    try:
        grpc.channel_ready_future(channel).result(timeout=KNOCK_SECONDS)
        return True
    except grpc.FutureTimeoutError:
        return False
    finally:
        channel.close()


def refuse_impossible(config: RunConfig, *, learner: bool = True) -> str | None:
    """Raises UserError with the numbers when the nodes of the cluster can never hold the run.

    Where the cluster adds nodes by itself (`autoscaling`), that may still come: what is missing is returned then.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    why = why_not(bundles(config), counts(config, learner=learner), nodes)
    if why is not None and not config.cluster.autoscaling:
        raise UserError(f"{why}: ask for less, add nodes, or set --autoscaling true where the cluster adds them by itself")
    return why


def reserve(
    config: RunConfig, *, learner: bool = True, note: Callable[[str], None] = print, given_up: Callable[[], bool] = lambda: False
) -> Places:
    """Reserve a place for every actor, and wait for it where it may still come, saying for what by `note`.

    Raises UserError when the cluster can never hold them, when `placement_timeout` has passed, and when `given_up` says so.
    """
    missing = refuse_impossible(config, learner=learner)
    each, number = bundles(config), counts(config, learner=learner)
    group = placement_group([each[kind] for kind in ("engine", "rank", "verifier") for _ in range(number[kind])], strategy="PACK")
    try:
        _wait(config, group, missing, note, given_up)
    except BaseException:
        remove_placement_group(group)
        raise
    return Places(group, number["engine"], number["rank"], number["verifier"])


def _wait(config: RunConfig, group: PlacementGroup, missing: str | None, note: Callable[[str], None], given_up: Callable[[], bool]) -> None:
    limit = config.cluster.placement_timeout
    deadline, said = time.monotonic() + limit, ""
    while not group.wait(1.0):
        free, there = ray.available_resources(), ray.cluster_resources()
        amounts = " and ".join(f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}s" for name in ("GPU", "CPU"))
        why = f"{missing}, so nodes have to be added" if missing else "other jobs hold what it needs"
        state = f"{why}; {amounts} are free"
        if given_up():
            raise UserError(f"stopped while it waited for a place ({state})")
        if time.monotonic() > deadline:
            raise UserError(
                f"no place for the actors within placement_timeout = {limit:g} s: {state}; wait for other jobs, ask for less, or raise it"
            )
        if state != said:
            note(f"waits for a place, at most placement_timeout = {limit:g} s: {state}")
            said = state


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
