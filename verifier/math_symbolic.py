"""math-verify for what our own comparison cannot read, behind gates: no text is evaluated as a program, long computations are refused.

Its own timeouts are off: the pool's deadline holds.
"""

from __future__ import annotations

import logging
import re

from latex2sympy2_extended import latex2sympy
from math_verify import verify as math_verify

from verifier.math_text import WORD_OPEN

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

MAX_CHARACTERS = 200
MAX_OPERATIONS = 150
MAX_EXPONENT = 12
MAX_NESTING = 12
MAX_BARS = 4  # its parser takes exponential time in these
_REFUSED = re.compile(
    r"\\(?:int|iint|oint|sum|prod|lim|limsup|liminf|binom|det|partial|nabla|bigcup|bigcap|ldots|cdots|dots)(?![a-zA-Z])"
    r"|!|\.\.|__|(?:[-+] *){3}"
)
_DIGITS = re.compile(r"[0-9]{40,}")
_EXPONENT = re.compile(r"\^ *(?:\{ *)?[-+]?([0-9]+)")
_TOWER = re.compile(r"\^ *\{?[^{}^]*\^|(?:\^.*){12}")
_ALLOWED = re.compile(r"(?:[-+*/^_=<>(){}\[\]|,.;: &a-zA-Z0-9%']|\\[a-zA-Z]+|\\\\|\\[{}|])*")


def equal(gold: str, answer: str) -> tuple[bool, str]:
    """Whether two tidied formulas are the same by math-verify, and why not in words. Never raises."""
    for text in (gold, answer):
        why = _refuse(text)
        if why:
            return False, why
    try:
        g, a = latex2sympy(gold), latex2sympy(answer)
        if sum(e.count_ops() if hasattr(e, "count_ops") else 0 for e in (g, a)) > MAX_OPERATIONS:
            return False, "too many operations"
        return bool(math_verify(g, a, numeric_precision=60, float_rounding=30, strict=True, timeout_seconds=None)), "math-verify"
    except MemoryError:
        raise
    except Exception as e:  # it raises whatever its parser raises
        return False, f"not readable ({type(e).__name__})"


def _refuse(text: str) -> str:
    """Why `text` must not be computed with, or ''."""
    if len(text) > MAX_CHARACTERS:
        return "too long"
    if WORD_OPEN in text or not _ALLOWED.fullmatch(text):
        return "not a formula"
    if _REFUSED.search(text):
        return "a sum, an integral, a limit or a factorial that was not worked out"
    if (
        _DIGITS.search(text)
        or any(int(m) > MAX_EXPONENT for m in _EXPONENT.findall(text))
        or _TOWER.search(text)
        or text.count("|") > MAX_BARS
    ):
        return "too large"
    depth = deepest = 0
    for c in text:
        depth += (c in "({[") - (c in ")}]")
        deepest = max(deepest, depth)
    return "too deep" if deepest > MAX_NESTING else ""
