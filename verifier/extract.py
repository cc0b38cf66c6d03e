"""Where the final answer stands in a response: after the thinking, in the last box, behind the last marker."""

from __future__ import annotations

import re

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

_MINUS = dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63"), "-")
_FULL_WIDTH = {0xFF01 + i: chr(0x21 + i) for i in range(94)}
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000"), " ")
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\u2061\u2062\u2063\ufeff"), None)
_PLAIN: dict[int, str | None] = {**_FULL_WIDTH, **_SPACES, **_INVISIBLE, **_MINUS, 0xFF0D: "-"}


def plain(text: str) -> str:
    """`text` with full-width characters, Unicode minus signs and fancy spaces as ASCII. Superscripts stay what they are."""
    return text if text.isascii() else text.translate(_PLAIN)


SEARCHED = 100_000  # characters at the end of a response in which a final answer is looked for


def after_thinking(response: str) -> str | None:
    """The text after the last `</think>`; the whole text without think tags; None when a think block is still open."""
    close = response.rfind(THINK_CLOSE)
    rest = response if close < 0 else response[close + len(THINK_CLOSE) :]
    return None if THINK_OPEN in rest else rest


_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
MAX_BOXES = 64


def boxes(text: str) -> list[str]:
    r"""The contents of the balanced `\boxed{…}` and `\fbox{…}`, outermost ones, in order; the last MAX_BOXES of them.

    Linear in the length of the text. A box that is never closed is no box, and hides none that comes before or inside it.
    """
    starts = {m.end() - 1: m.start() for m in _BOX.finditer(text)}
    if not starts:
        return []
    found: list[tuple[int, int, int]] = []
    stack: list[int] = []
    for m in _BRACE.finditer(text, next(iter(starts.values()))):
        c = m.group()
        if c == "{":
            stack.append(m.start())
        elif c == "}" and stack:
            brace = stack.pop()
            if brace in starts:
                found.append((starts[brace], brace + 1, m.start()))
    outer: list[tuple[int, int, int]] = []
    for box in sorted(found):
        if not outer or box[0] > outer[-1][2]:
            outer.append(box)
    return [text[a:b] for _, a, b in outer[-MAX_BOXES:]]
