"""Errors that leave an engine's process, in words that whoever gets them can read without the library that raised them.

Ray sends an actor's error by its class, and to unpickle a class of vLLM's the controller would import vLLM: 180 MiB that stay, and
seconds in which it does nothing else.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

DEAD = ("EngineDeadError", "EngineGenerateError")  # vLLM's names for errors after which its engine serves nobody


class EngineError(RuntimeError):
    """What an engine's library raised, by the name of its class, `kind`, and its text; the engine lives."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


class EngineDeadError(EngineError):
    """The core of an engine is dead or unreachable: all that the engine holds is lost."""


def plainly(call: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """`call`, a coroutine function, with every error that is neither Python's, winnow's nor Ray's raised as an EngineError."""

    @functools.wraps(call)
    async def told(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await call(*args, **kwargs)
        except Exception as error:
            kind = type(error)
            root = kind.__module__.partition(".")[0]
            if root in sys.stdlib_module_names or root in ("rollout", "ray"):
                raise
            said = EngineDeadError if kind.__name__ in DEAD else EngineError
            raise said(kind.__name__, str(error)) from error

    return told
