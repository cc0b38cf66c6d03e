"""Errors of an engine's library leave its process in winnow's classes: nobody imports the library to read them.

Does not cover: which errors a real engine raises (tests/chaos kills the cores of real ones).
"""

from __future__ import annotations

import asyncio
import inspect
import pickle

import pytest

from rollout.actor import Rollout
from rollout.engine_errors import EngineDeadError, EngineError, plainly


def of_vllm(name: str) -> type[Exception]:
    """A class that vLLM could have."""
    return type(name, (Exception,), {"__module__": "vllm.v1.engine.exceptions"})


def raised(error: Exception) -> Exception:
    """What leaves a method that raises this."""

    @plainly
    async def call() -> None:
        raise error

    with pytest.raises(Exception) as caught:
        asyncio.run(call())
    return caught.value


@pytest.mark.parametrize("name", ["EngineDeadError", "EngineGenerateError"])
def test_a_dead_core_is_told_without_the_class_of_its_library(name: str) -> None:
    told = raised(of_vllm(name)("the core died"))
    sent = pickle.dumps(told)
    assert b"vllm" not in sent
    got = pickle.loads(sent)
    assert type(got) is EngineDeadError and got.kind == name and str(got) == f"{name}: the core died"
    assert told.__cause__ is not None, "the library's own trace stays in the text that Ray sends along"


def test_other_errors_of_a_library_do_not_condemn_the_engine() -> None:
    told = raised(of_vllm("VLLMValidationError")("too long"))
    assert type(told) is EngineError and told.kind == "VLLMValidationError"


@pytest.mark.parametrize("error", [TimeoutError(), RuntimeError("cancelled"), EngineError("A", "b")])
def test_errors_that_everyone_can_read_pass(error: Exception) -> None:
    assert raised(error) is error


def test_every_coroutine_of_the_worker_that_asks_its_engine_tells_errors_plainly() -> None:
    calls = {name: f for name, f in vars(Rollout).items() if inspect.iscoroutinefunction(f)}
    assert {name for name, f in calls.items() if not hasattr(f, "__wrapped__")} == {"stop"}
