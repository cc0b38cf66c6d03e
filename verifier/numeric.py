"""`numeric`: the last number of the response, compared exactly. Strict and quick: the built-in arithmetic's verifier.

Options: `fractions` (default false): "3/4" and "1 1/2" count as one number each; without it "3/4" ends in the
number 4. A decimal is always one number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifier import quantity
from verifier.extract import SEARCHED, after_thinking, plain
from verifier.verdict import Verdict, error, value


def verify(gold: str, response: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> Verdict:
    """1 when the last number of `response` is `gold`, else 0; an error when `gold` is not a number."""
    want = quantity.read(plain(gold))
    if want is None:
        return error(f"gold answer {gold[:80]!r} is not a number")
    rest = after_thinking(response)
    if rest is None:
        return value(0, "unclosed think block")
    found = quantity.last_number(plain(rest[-SEARCHED:]), fractions=bool(options.get("fractions", False)))
    if found is None:
        return value(0, "no number")
    return value(quantity.read(found) == want, found[:80])


def canonical(gold: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """The gold answer itself."""
    return gold
