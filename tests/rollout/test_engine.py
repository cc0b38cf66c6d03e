"""A call to an engine whose core dies meanwhile.

Does not cover: the real engine (tests/e2e/test_engine.py), and a core that hangs, which the caller's deadline ends.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout import engine
from rollout.engine import unless_dead


async def after(seconds: float) -> dict[str, Any]:
    """A call that takes so long."""
    await asyncio.sleep(seconds)
    return {"version": 7}


def test_a_call_to_a_core_that_dies_ends_with_its_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "DEATH_SECONDS", 0.01)
    looks: list[int] = []

    def death() -> RuntimeError | None:
        looks.append(1)
        return RuntimeError("the core is dead") if len(looks) > 2 else None

    with pytest.raises(RuntimeError, match="the core is dead"):
        asyncio.run(asyncio.wait_for(unless_dead(after(3600.0), death), 60.0))
    assert len(looks) == 3


def test_a_call_to_a_core_that_lives_gives_its_result_and_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "DEATH_SECONDS", 0.01)
    assert asyncio.run(unless_dead(after(0.05), lambda: None)) == {"version": 7}

    async def fails() -> dict[str, Any]:
        raise ValueError("no such tensor")

    with pytest.raises(ValueError, match="no such tensor"):
        asyncio.run(unless_dead(fails(), lambda: None))
