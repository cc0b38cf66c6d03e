"""`function`: a reward function of the user's, named by its dotted path.

Options: `path` = "package.module.name" or "package.module:name". It is called as `name(gold, response, meta)` in a
process that can be killed, and returns a number, a bool, or a Verdict. What it raises is an error of ours: the answer gets no reward.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from rollout.errors import UserError
from verifier.verdict import Verdict, value


@lru_cache(maxsize=64)
def find(path: str) -> Callable[[str, str, Mapping[str, Any]], Any]:
    """The function at `path`. Raises UserError when it is not there."""
    module, _, name = path.rpartition(":" if ":" in path else ".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise UserError(f"verifier_options.function.path = {path!r} cannot be imported ({e}): give it as package.module.name.") from e
    if not callable(found):
        raise UserError(f"verifier_options.function.path = {path!r} is not a function: give it as package.module.name.")
    return found


def verify(gold: str, response: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> Verdict:
    """Whatever the user's function says."""
    if not isinstance(options.get("path"), str):
        raise UserError(f"verifier_options.function.path = {options.get('path')!r} is not set: give it as package.module.name.")
    said = find(options["path"])(gold, response, meta)
    return said if isinstance(said, Verdict) else value(float(said))
