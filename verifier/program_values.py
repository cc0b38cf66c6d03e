"""Values that come back from the sandbox, with their exact types, and what counts as equal to an expected value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 45


class Strange:
    """A value of no plain type, or a message that makes no sense: equal to nothing, itself included."""

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class Rules:
    """`tuples`: a tuple is no list. `numbers`: 3.0 is not 3. `tolerance`: relative, where a float is expected."""

    tuples: bool = False
    numbers: bool = False
    tolerance: float = 1e-9


def decode(message: Any, depth: int = 0) -> Any:
    """The value that `jail.encode` described. Never raises: nonsense is Strange."""
    try:
        return _decode(message, depth)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError):
        return Strange()


def _decode(message: Any, depth: int) -> Any:
    kind = message[0]
    if depth > MAX_DEPTH:
        return Strange()
    if kind == "n":
        return None
    if kind == "b":
        return bool(message[1])
    if kind == "i":
        return int(message[1], 16)
    if kind == "f":
        return float.fromhex(message[1])
    if kind == "s" and isinstance(message[1], str):
        return message[1]
    if kind == "c":
        return complex(float.fromhex(message[1]), float.fromhex(message[2]))
    if kind == "y":
        return bytes.fromhex(message[1])
    if kind in ("l", "t", "e"):
        items = [_decode(m, depth + 1) for m in message[1]]
        return items if kind == "l" else tuple(items) if kind == "t" else frozenset(items)
    if kind == "d":
        return {_decode(k, depth + 1): _decode(v, depth + 1) for k, v in message[1]}
    return Strange()


def matches(expected: Any, got: Any, rules: Rules) -> bool:
    """Whether `got` is `expected`, by type and value. NaN is only equal to NaN, True is no number."""
    if isinstance(expected, bool) or isinstance(got, bool):
        return type(expected) is type(got) and expected == got
    if isinstance(expected, float) or isinstance(got, float):
        if not isinstance(expected, int | float) or not isinstance(got, int | float) or (rules.numbers and type(expected) is not type(got)):
            return False
        if isinstance(expected, float):
            return (math.isnan(expected) and math.isnan(got)) or expected == got or _close(expected, got, rules.tolerance)
        return expected == got
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        if rules.tuples and type(expected) is not type(got):
            return False
        return len(expected) == len(got) and all(matches(e, g, rules) for e, g in zip(expected, got, strict=True))
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(matches(v, got[k], rules) for k, v in expected.items())
    return type(expected) is type(got) and expected == got


def _close(expected: float, got: float, tolerance: float) -> bool:
    try:
        return math.isfinite(expected) and math.isclose(expected, got, rel_tol=tolerance)
    except OverflowError:
        return False
