"""Numbers as people write them, read exactly: integers, decimals, fractions, mixed numbers, thousands, exponents."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 256  # longest run of digits that is read as a number
MAX_EXPONENT = 400  # of ten, in scientific notation

_INT = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_UNSIGNED = rf"(?:{_INT}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,3}}(?![0-9.]))?"
# A sign belongs to the number only where it cannot be an operator: "3-5" is 3 and 5, "=-5" is -5.
NUMBER = re.compile(rf"(?:(?<![0-9a-zA-Z)\]}}.])[+-])?{_UNSIGNED}")
# A fraction or a mixed number is one number: cutting it at the slash would expose its parts.
RATIONAL = re.compile(rf"(?:(?<![0-9a-zA-Z)\]}}.])[+-])?(?:{_INT} +(?={_INT} ?/))?{_UNSIGNED}(?: ?/ ?{_UNSIGNED})?")
_MIXED = re.compile(rf"([+-]?)({_INT}) +({_INT}) ?/ ?({_INT})")
_PLAIN = re.compile(rf"[+-]?{_UNSIGNED}")


def read(text: str) -> Fraction | None:
    """The exact value of `text` when it is one number and nothing else, or None. Never raises, whatever the text.

    "1,234.50", "-.5", "6.02e23", "3/4" and "1 1/4" are numbers; "4 10/3" is not (an improper mixed number hides a guess).
    """
    text = text.strip()
    if not text or len(text) > 2 * MAX_DIGITS + 16:
        return None
    if _PLAIN.fullmatch(text):
        return _decimal(text)
    mixed = _MIXED.fullmatch(text)
    if mixed:
        sign, whole, top, bottom = mixed.groups()
        w, a, b = _decimal(whole), _decimal(top), _decimal(bottom)
        if w is None or a is None or not b or a >= b:
            return None
        return -(w + a / b) if sign == "-" else w + a / b
    if text.count("/") == 1:
        top, bottom = text.split("/")
        if _PLAIN.fullmatch(top.strip()) and _PLAIN.fullmatch(bottom.strip()):
            a, b = _decimal(top.strip()), _decimal(bottom.strip())
            return None if a is None or not b else a / b
    return None


def _decimal(text: str) -> Fraction | None:
    """The value of a plain decimal, None when it is longer or larger than the gates allow."""
    text = text.replace(",", "")
    if len(text) > MAX_DIGITS + 8:
        return None
    if text.isdigit():
        return Fraction(int(text))
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_EXPONENT:
        return None
    return Fraction(text)


def last_number(text: str, fractions: bool = True) -> str | None:
    """The last number of `text`, as it is written, or None. Without `fractions`, "3/4" is the numbers 3 and 4.

    Only the end of a long text is searched, as far as needed: the cost does not grow with the text.
    """
    pattern = RATIONAL if fractions else NUMBER
    for size in (256, 4096, len(text)):
        tail = text[-size:] if size else ""
        last = None
        for m in pattern.finditer(tail):
            last = m
        # A match at the start of the tail may have been cut.
        if last is not None and (size >= len(text) or last.start() > 8 and not _TOUCHES.fullmatch(tail[: last.start()])):
            return last.group()
        if size >= len(text):
            return None if last is None else last.group()
    return None


_TOUCHES = re.compile(r"[0-9.,/+ eE-]*")
