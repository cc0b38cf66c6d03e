r"""`format`: is the answer of the asked shape? The gold answer is not looked at.

Options: `shape` = "box" (default: exactly one balanced `\boxed{}`, not empty, after the thinking), "think_box" (one closed
think block, then that), "marker" (one `####` with something behind it) or "regex" (the whole response matches `pattern`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verifier.extract import THINK_CLOSE, THINK_OPEN, after_thinking, boxes
from verifier.verdict import Verdict, error, value


def verify(gold: str, response: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> Verdict:
    """1 when `response` has the shape, else 0; an error when the options name no shape."""
    shape = options.get("shape", "box")
    if shape == "regex":
        if not isinstance(options.get("pattern"), str):
            return error("format: shape = 'regex' needs a pattern")
        return value(re.fullmatch(options["pattern"], response, re.DOTALL) is not None)
    if shape == "marker":
        parts = response.split("####")
        return value(len(parts) == 2 and bool(parts[1].strip()))
    if shape not in ("box", "think_box"):
        return error(f"format: shape = {shape!r} is none of box, think_box, marker, regex")
    if shape == "think_box" and (response.count(THINK_CLOSE) != 1 or response.count(THINK_OPEN) > 1):
        return value(0, "not one closed think block")
    rest = after_thinking(response)
    if rest is None:
        return value(0, "unclosed think block")
    found = boxes(rest)
    return value(len(found) == 1 and bool(found[0].strip()), f"{len(found)} boxes")
