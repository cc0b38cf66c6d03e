"""Who worked when: the share of the wall-clock time in which an engine, a verifier, the learner or a transfer of weights did."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Who = Literal["engines", "verifiers", "learner", "transfer"]


@dataclass(frozen=True)
class Use:
    """Seconds of a window in which each kind of actor worked, at least one of it, and in which none of any kind did."""

    window: float
    engines: float
    verifiers: float
    learner: float
    transfer: float
    idle: float


class Timeline:
    """Takes what is known of each piece of work when it ends, and counts by windows that follow each other.

    Actors say for how many seconds they worked, and their message has come when it is noted: so a span ends then, which moves it by the
    message's way, a millisecond or so, and keeps its length.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._from = clock()
        self._spans: list[tuple[Who, float, float]] = []
        self._begun: dict[tuple[Who, Hashable], float] = {}

    def begin(self, who: Who, key: Hashable) -> None:
        """A piece of work was sent; until it ends it counts as under way."""
        self._begun[who, key] = self.clock()

    def end(self, who: Who, key: Hashable, seconds: float | None = None) -> None:
        """It came back after `seconds` of work, by the actor's own clock; None: by what is seen here."""
        now, begun = self.clock(), self._begun.pop((who, key), None)
        if seconds is not None or begun is not None:
            self._spans.append((who, begun if seconds is None else now - seconds, now))  # type: ignore[arg-type]

    def worked(self, who: Who, seconds: float) -> None:
        """Work that is over and of which nothing was known before."""
        now = self.clock()
        self._spans.append((who, now - seconds, now))

    @contextmanager
    def during(self, who: Who) -> Iterator[None]:
        """What is done inside is that work."""
        key = object()
        self.begin(who, key)
        try:
            yield
        finally:
            self.end(who, key)

    def cut(self) -> Use:
        """The window that ends now; the next begins."""
        start, now = self._from, self.clock()
        spans = [*self._spans, *((who, begun, now) for (who, _), begun in self._begun.items())]
        kinds: tuple[Who, ...] = ("engines", "verifiers", "learner", "transfer")
        by = {kind: covered([(a, b) for who, a, b in spans if who == kind], start, now) for kind in kinds}
        idle = now - start - covered([(a, b) for _, a, b in spans], start, now)
        self._from, self._spans = now, []
        return Use(now - start, **by, idle=idle)


def covered(spans: list[tuple[float, float]], start: float, stop: float) -> float:
    """Length of the union of spans within `[start, stop]`."""
    total, reached = 0.0, start
    for a, b in sorted(spans):
        a, b = max(a, reached), min(b, stop)
        if b > a:
            total += b - a
            reached = b
    return total
