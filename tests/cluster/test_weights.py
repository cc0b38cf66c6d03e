"""When an engine counts as having new weights, what is told of it, and several transfers told of as one.

Engines are stand-ins that report what the test gives; no Ray. Does not cover: bytes and fingerprints (tests/e2e/test_engine.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import ray

from cluster.health import Health, Restarts
from cluster.services import Services
from cluster.weights import TransferStats, WeightError, WeightSync, together
from rollout.weights import TensorEntry, WeightManifest

MANIFEST = WeightManifest(0, 3, "here", "/none", (TensorEntry("w", "float32", (2,), 0, 8, 7),))
REPORT = {"missing": (), "fingerprints": {"w": 7}, "seconds_paused": 0.1}


def method(result: Callable[..., Any]) -> Any:
    """What `actor.NAME` is: its `remote` gives a task."""

    async def call(*args: Any) -> Any:
        found = result(*args)
        return await found if asyncio.iscoroutine(found) else found

    return type("Method", (), {"remote": lambda _, *args: asyncio.ensure_future(call(*args))})()


class Engine:
    """An engine on this host whose update gives `result`."""

    def __init__(self, result: Callable[..., Any]) -> None:
        self.host, self.update = method(lambda: "here"), method(result)


class Rank:
    """A learner rank that gives memory back."""

    release = method(lambda manifest: None)


def loaded(*results: Callable[..., Any]) -> tuple[WeightSync, list[list[int]]]:
    """The sync after a load into engines with these updates, and the versions each time that it said an engine was ready."""
    told: list[list[int]] = []

    async def go() -> WeightSync:
        engines = [Engine(result) for result in results]
        services = Services(None, engines, [], [Rank()])  # type: ignore[arg-type]  # no actor is made
        health = Health(services, Restarts(20), 60.0, lambda _: None)
        health.engine_lost = lambda *_: None  # type: ignore[method-assign]  # tests/cluster/test_health.py
        sync = WeightSync(services, health, "shm", 1)
        sync.ready = lambda: told.append(list(sync.versions))
        try:
            await sync.load(MANIFEST, 0.0, only=range(len(engines)))
        finally:
            health.close()
        return sync

    return asyncio.run(go()), told


def test_each_engine_is_told_of_when_it_has_the_weights_and_not_when_all_have_them() -> None:
    async def late() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return dict(REPORT)

    sync, told = loaded(lambda *_: dict(REPORT), lambda *_: late())
    assert told == [[3, -1], [3, 3]] and sync.versions == [3, 3]


def test_an_engine_that_is_lost_in_a_load_is_not_told_of() -> None:
    def lost(*_: Any) -> Any:
        raise ray.exceptions.RayActorError

    sync, told = loaded(lost, lambda *_: dict(REPORT))
    assert told == [[-1, 3]] and sync.versions == [-1, 3]


@pytest.mark.parametrize("wrong", [{"fingerprints": {"w": 8}}, {"missing": ("w",)}])
def test_other_bytes_or_a_parameter_left_behind_end_the_run(wrong: dict[str, Any]) -> None:
    with pytest.raises(WeightError, match="engine 0"):
        loaded(lambda *_: REPORT | wrong)


def test_several_transfers_are_told_of_as_one() -> None:
    one, other = TransferStats(4, 100, 10, 0.5, 0.0, 0.2, 1.0), TransferStats(5, 100, 0, 0.25, 0.1, 0.1, 2.0)
    assert together([]) is None and together([one]) == one
    assert together([one, other]) == TransferStats(5, 200, 10, 0.75, 0.1, 0.2, 3.0)
