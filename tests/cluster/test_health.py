"""What becomes of engines and verifiers that are lost: replaced, waited for where their node is gone, and counted against one budget.

Actors are stand-ins whose calls are futures; no Ray. Does not cover: real processes and nodes (tests/e2e/test_faults.py, `make chaos`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import ray

from cluster import health as module
from cluster.health import Health, Restarts, RunFailed
from cluster.services import Services


class Actor:
    """Its `start` and `ready` give a future each, which the test resolves."""

    def __init__(self) -> None:
        self.up: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __getattr__(self, name: str) -> Any:
        if name not in ("start", "ready"):
            raise AttributeError(name)
        return type("Method", (), {"remote": lambda _: self.up})()


NODE = ["a node"]  # where actors have their place; emptied by a test whose new actors have none


class Maker:
    """Gives new stand-ins, which have a place on a node or none."""

    def __init__(self) -> None:
        self.places = self

    def node(self, kind: str, index: int) -> str:
        return NODE[0] if NODE else ""

    def engine(self, index: int) -> Actor:
        return Actor()

    verifier = engine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    NODE[:] = ["a node"]
    monkeypatch.setattr(module, "put_away", lambda actor: None)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "NODE_SECONDS", 0.1)


def with_health(test: Callable[[Health, list[str]], Any], *, limit: int = 20, start_timeout: float = 60.0) -> None:
    """Run a coroutine on a health of two engines and two verifiers, and on what it notes."""

    async def go() -> None:
        said: list[str] = []
        services = Services(Maker(), [Actor(), Actor()], [Actor(), Actor()], [])
        health = Health(services, Restarts(limit), start_timeout, said.append)
        await test(health, said)
        health.close()

    asyncio.run(go())


async def until(condition: Callable[[], Any]) -> None:
    """Let everything go on until the condition holds; fails after 20 s."""
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_lost_verifier_is_given_no_work_before_it_is_up_again() -> None:
    async def test(health: Health, said: list[str]) -> None:
        first = health.services.verifiers[0]
        assert {await health.verifier() for _ in range(4)} == {0, 1}
        health.verifier_lost(first, "killed")
        health.verifier_lost(first, "said twice")
        new = health.services.verifiers[0]
        assert new is not first and [await health.verifier() for _ in range(3)] == [1, 1, 1]
        new.up.set_result(None)
        await until(lambda: "verifier 0 is back" in said)
        assert {await health.verifier() for _ in range(4)} == {0, 1}
        assert said == ["verifier 0 is lost (killed) and made again, restart 1 of 20", "verifier 0 is back"]

    with_health(test)


def test_with_no_verifier_a_group_waits_for_one() -> None:
    async def test(health: Health, said: list[str]) -> None:
        for actor in list(health.services.verifiers):
            health.verifier_lost(actor, "killed")
        waits = asyncio.ensure_future(health.verifier())
        await asyncio.sleep(0.3)
        assert not waits.done()
        health.services.verifiers[1].up.set_result(None)
        assert await asyncio.wait_for(waits, 20.0) == 1

    with_health(test)


def test_an_actor_whose_node_is_gone_waits_for_a_place_and_says_so_once() -> None:
    async def test(health: Health, said: list[str]) -> None:
        NODE.clear()
        health.engine_lost(1, health.services.engines[1], "actor_died")
        await until(lambda: len(said) > 1)
        await asyncio.sleep(0.3)  # many times start_timeout
        assert [s for s in said if "waits for a place" in s] == [said[1]] and health.restarts.counts.total() == 1
        assert health.alive() == [0] and health.failure is None
        health.services.engines[1].up.set_result(None)
        await until(lambda: health.started == {1})

    with_health(test, start_timeout=0.05)


def test_without_any_engine_and_without_a_place_the_run_ends_and_says_why() -> None:
    async def test(health: Health, said: list[str]) -> None:
        NODE.clear()
        for index in (0, 1):
            health.engine_lost(index, health.services.engines[index], "actor_died")
        await until(lambda: health.failure)
        assert isinstance(health.failure, RunFailed) and "no node has had room for engine" in str(health.failure)

    with_health(test, start_timeout=0.05)


def test_an_engine_that_has_a_place_and_does_not_start_is_made_again() -> None:
    async def test(health: Health, said: list[str]) -> None:
        lost = health.services.engines[0]
        health.engine_lost(0, lost, "killed")
        again = "engine 0 is lost (it did not start within start_timeout = 0.05 s) and made again, restart 2 of 20"
        await until(lambda: again in said)

    with_health(test, start_timeout=0.05)


def test_one_budget_counts_all_kinds_in_all_lives() -> None:
    async def test(health: Health, said: list[str]) -> None:
        health.engine_lost(0, health.services.engines[0], "killed")
        again = Health(health.services, health.restarts, 60.0, said.append)
        again.verifier_lost(again.services.verifiers[0], "killed")
        assert again.failure is None
        again.restarts.add("learner")
        assert again.restarts.over() == ""
        before = again.services.engines[1]
        again.engine_lost(1, before, "killed")
        assert isinstance(again.failure, RunFailed) and again.services.engines[1] is before
        assert str(again.failure) == (
            "more actors were lost than max_restarts = 3 allows (engine 2, learner 1, verifier 1): see Ray's logs, or raise it"
        )

    with_health(test, limit=3)


def test_an_actor_made_again_on_a_node_that_is_lost_too_is_one_restart_and_one_that_fails_by_itself_is_two() -> None:
    async def test(health: Health, said: list[str]) -> None:
        async def fails(move_to: str) -> None:
            first = health.services.engines[0]
            await asyncio.sleep(0.1)  # its place has been looked at
            NODE[:] = [move_to]
            first.up.set_exception(ray.exceptions.ActorDiedError())
            await until(lambda: health.services.engines[0] is not first)

        health.engine_lost(0, health.services.engines[0], "actor_died")
        await fails("another node")
        assert health.restarts.counts == {"engine": 1}
        await fails("another node")
        assert health.restarts.counts == {"engine": 2} and "it did not start (ActorDiedError)" in said[-1]

    with_health(test)


def test_a_fault_of_ours_ends_the_loop_and_is_no_silent_wait() -> None:
    async def test(health: Health, said: list[str]) -> None:
        health.engine_lost(0, health.services.engines[0], "killed")
        await asyncio.sleep(0.1)
        health.services.engines[0].up.set_exception(AttributeError("ours"))
        await until(lambda: isinstance(health.failure, AttributeError))
        assert health.changed.is_set()

    with_health(test)
