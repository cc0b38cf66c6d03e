"""`random`: a coin that knows nothing of the answer: the control run that shows what rewards alone, whatever they say, would teach.

Reproducible (a hash of gold, response and salt), so a run can be repeated. Options: `p` (default 0.5), the chance of a reward of 1; `salt`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from verifier.verdict import Verdict, value


def verify(gold: str, response: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> Verdict:
    """1 with chance `p`, else 0, the same for the same gold and response."""
    text = f"{options.get('salt', '')}\0{gold}\0{response}".encode("utf-8", "surrogatepass")
    drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64
    return value(drawn < float(options.get("p", 0.5)), "drawn")
