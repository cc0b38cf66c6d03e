"""Says what the loop waits for once that has taken long: which actor, which group, in which stage, and since when."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable


class Watchdog:
    """Speaks when one wait reaches `limit` seconds, and again at twice, four times, … that."""

    def __init__(self, limit: float, note: Callable[[str], None]) -> None:
        self._limit, self._note = limit, note
        self._what: Hashable = None
        self._next = limit

    def look(self, what: Hashable, text: str, seconds: float) -> None:
        """`what` names the wait, `text` says it in words, `seconds` how long it has lasted."""
        if what != self._what:
            self._what, self._next = what, self._limit
        if seconds < self._next:
            return
        while self._next <= seconds:
            self._next *= 2
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        self._note(f"watchdog: since {since} {text}")
