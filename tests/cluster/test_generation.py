"""The time in which engines have nothing to generate, and when a group is sent.

Does not cover the rest of a group's way, which the end-to-end tests follow on real actors.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from cluster.config import RunConfig
from cluster.generation import EngineLoad, Generation
from cluster.timeline import Timeline
from learner.buffer import SamplingBuffer
from learner.config import BufferConfig
from rollout.records import Prompt


def test_idle_time_is_that_of_engines_without_a_group_mean_over_the_engines() -> None:
    now = [10.0]
    load = EngineLoad(2, clock=lambda: now[0])
    now[0] = 12.0  # both without a group for 2 s
    load.add(0, 1)
    now[0] = 15.0  # one of them for 3 s more
    load.add(0, 1)
    load.add(1, 1)
    now[0] = 19.0  # none
    load.add(0, -1)
    load.add(0, -1)
    now[0] = 20.0  # the first again for 1 s
    assert load.groups == [0, 1]
    assert load.take_idle() == 2.0 + 1.5 + 0.5
    now[0] = 21.0
    assert load.take_idle() == 0.5, "since the last call alone"


class Drawn:
    """A stream of prompts that writes down when each was drawn."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.uid = log, 0

    def next(self) -> Prompt:
        self.uid += 1
        self.log.append(f"drawn {self.uid}")
        return Prompt(self.uid, np.zeros(3, dtype=np.int32), "", "", "", "", "")


class Asked:
    """An engine's handle that writes down when it was asked, and never answers."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.generate, self.name, self.log = self, name, log

    def options(self, num_returns: int) -> Asked:
        assert num_returns == 2
        return self

    def remote(self, prompt: Prompt, attempt: int, sampling: Any) -> tuple[Any, Any]:
        self.log.append(f"sent {prompt.uid} to {self.name}")
        return asyncio.get_running_loop().create_future(), object()


def test_each_group_is_sent_before_the_next_is_drawn_and_within_the_call() -> None:
    """An engine works from the first group on, and does not wait until the caller, which has a step to write down, gives way."""
    log = list[str]()

    async def sent() -> list[str]:
        buffer = SamplingBuffer(
            BufferConfig(batch_size=3), group_size=2, filter_groups=True, spread_tol=1e-6, max_staleness=0, attempts=2,
            drop_errors=False, clock=lambda: 0.0,
        )  # fmt: skip
        services: Any = SimpleNamespace(engines=[Asked("a", log), Asked("b", log)])
        health: Any = SimpleNamespace(alive=lambda: [0, 1], changed=asyncio.Event())
        stream: Any = Drawn(log)
        sync: Any = SimpleNamespace(versions=[0, 0])
        generation = Generation(RunConfig(), services, stream, buffer, sync, health, Timeline())
        generation.dispatch()
        seen = list(log)
        await generation.close()
        return seen

    assert asyncio.run(sent()) == ["drawn 1", "sent 1 to a", "drawn 2", "sent 2 to b", "drawn 3", "sent 3 to a"]
