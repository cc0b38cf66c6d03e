"""`gsm8k`: the number behind the last `####`, compared exactly.

Gold answers may be whole GSM8K solutions. Options: `final` says what counts as the final answer,
"marker_or_last" (default: without a marker the last number of the text), "marker" (no marker, no reward) or
"last_number" (markers are not looked at).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from verifier import quantity
from verifier.extract import SEARCHED, after_thinking, boxes, plain
from verifier.verdict import Verdict, error, value

MARKER = "####"
MAX_LINE = 512  # characters of the marked answer; an answer is a number, perhaps with its unit
_DRESS = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*|\\[$%,!]|[*$€£{}]|\\")
_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9.,])")


def verify(gold: str, response: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> Verdict:
    """1 when the final answer of `response` is the gold number, else 0; an error when the gold has no number."""
    want = quantity.read(_strip(_marked(gold) or gold))
    if want is None:
        return error(f"gold answer {gold[-80:]!r} has no number after its last {MARKER}")
    rest = after_thinking(response)
    if rest is None:
        return value(0, "unclosed think block")
    final = options.get("final", "marker_or_last")
    line = None if final == "last_number" else _marked(rest)
    if line is None:
        if final == "marker":
            return value(0, f"no {MARKER}")
        found = quantity.last_number(plain(rest[-SEARCHED:]))
        return value(found is not None and quantity.read(found) == want, found[:80] if found else "no number")
    got, why = _one_number(line)
    return value(got is not None and got == want, why)


def canonical(gold: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """The gold answer behind a marker."""
    return f"{MARKER} {_marked(gold) or gold}"


def _marked(text: str) -> str | None:
    """The first non-empty line after the last marker, '' when there is none, None without a marker."""
    at = text.rfind(MARKER)
    if at < 0:
        return None
    return text[at + len(MARKER) : at + len(MARKER) + MAX_LINE * 2].strip().partition("\n")[0].strip()


def _strip(line: str) -> str:
    """The line without currency signs, emphasis, TeX wrappers and a full stop."""
    boxed = boxes(line)
    return _DRESS.sub("", plain(boxed[-1] if boxed else line).replace("{,}", ",")).strip().rstrip(".").strip()


def _one_number(line: str) -> tuple[Fraction | None, str]:
    """The value of a line that names one number, with or without its unit; None and why when it names none or several."""
    if len(line) >= MAX_LINE:
        return None, "the marked answer is too long"
    text = _strip(line)
    left, equals, right = text.rpartition("=")
    if equals and quantity.read(left) is None:
        text = right.strip()
    text = _SPACED.sub(lambda m: m.group().replace(" ", ""), text)
    numbers = [m.group() for m in quantity.RATIONAL.finditer(text)]
    values = {quantity.read(n) for n in numbers}
    if len(values) > 1:
        return None, "several candidates"
    return (values.pop(), numbers[0][:80]) if values else (None, "no number")
