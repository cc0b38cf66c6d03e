"""Live metrics: every row of the table as a gauge of `ray.util.metrics`, for Ray's dashboard, Prometheus and Grafana.

The driver sets them once a step, and a thread sets them again every few seconds: Ray passes on a gauge once each time it is set, and
drops one that it has not heard of for some seconds, so that between two long steps nothing would be there. Ray exports a gauge
`winnow_x` as `ray_winnow_x`, on each node's metrics port. They are a copy for the eye: where they fail, a line says so and the run goes
on without.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cluster.metrics import TABLE, Metric, name, row

PREFIX = "winnow_"
EXPORTED = "ray_"
"""What Ray puts before the name of a gauge."""
REPEAT_SECONDS = 4.0
"""Seconds after which every gauge is set again; Ray's nodes export every ten."""
RUN, KEY = "run", "key"
"""Labels: the run folder's name, and in rows for `*` what stands for it."""


def gauge_name(metric: Metric) -> str:
    """The name of a row's gauge: letters, digits and underscores alone, as Prometheus wants it; "each" stands for `*`."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", metric.name.replace("*", "each"))


class Live:
    """The gauges of one run. Sums and totals that a step does not log are 0: nothing happened; other gauges keep their value."""

    def __init__(self, run: str, gauge: Callable[..., Any] | None = None, note: Callable[[str], None] = print) -> None:
        """`gauge` is `ray.util.metrics.Gauge` unless given; `note` takes a line of warning. Nothing happens before the first `set`."""
        self._run, self._make, self._note = _ascii(run), gauge, note
        self._off = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._repeating: threading.Thread | None = None
        self._values: dict[str, float] = {}  # by logged name, as they were last set
        self._gauges: dict[str, Any] = {}
        self._rows = {m.name: m for m in TABLE if "*" not in m.name}
        self._stars = [(m.name.removesuffix("*"), m) for m in TABLE if "*" in m.name]
        self._unlogged = {m.name for m in self._rows.values() if m.reduction in ("sum", "total")}

    def begin(self, fields: Iterable[str], every: float = REPEAT_SECONDS) -> None:
        """Before the first step: the sums and totals among the fields are 0, so that no plot of faults or errors looks broken.

        The others begin when they are measured; Ray drops NaN. From here on all are set again every so many seconds, until `close`.
        """
        self._put({name(field): 0.0 for field in fields if row(field).reduction in ("sum", "total")})
        self._repeating = threading.Thread(target=self._repeat, args=(every,), daemon=True, name="winnow-live")
        self._repeating.start()

    def close(self) -> None:
        """Set them no more."""
        self._ended.set()
        if self._repeating is not None:
            self._repeating.join(REPEAT_SECONDS)

    def set(self, metrics: Mapping[str, float]) -> None:
        """One step's numbers by logged name."""
        self._put({**dict.fromkeys(self._unlogged, 0.0), **metrics})

    def also(self, metrics: Mapping[str, float]) -> None:
        """Numbers that come between two steps, by logged name; the others keep their values."""
        self._put(metrics)

    def _repeat(self, every: float) -> None:
        while not self._ended.wait(every):
            self._put(self._values)

    def _put(self, metrics: Mapping[str, float]) -> None:
        with self._lock:
            if self._off:
                return
            rows = [(*self._row(logged), logged, value) for logged, value in metrics.items() if value is not None]
            try:
                for metric, key, logged, value in rows:
                    self._gauge(metric).set(float(value), tags={RUN: self._run, **({KEY: _ascii(key)} if key is not None else {})})
                    self._values[logged] = value
                    if metric.reduction == "total" and value:
                        self._unlogged.discard(logged)
            except Exception as error:
                self._off = True
                self._note(f"live metrics are off from here on: {type(error).__name__}: {error}".splitlines()[0])

    def _row(self, logged: str) -> tuple[Metric, str | None]:
        if logged in self._rows:
            return self._rows[logged], None
        for stem, metric in self._stars:
            if logged.startswith(stem):
                return metric, logged.removeprefix(stem)
        raise AssertionError(f"the logged name {logged!r} has no row in cluster/metrics.py")

    def _gauge(self, metric: Metric) -> Any:
        made = gauge_name(metric)
        if made not in self._gauges:
            if self._make is None:
                from ray.util.metrics import Gauge

                self._make = Gauge
            labels = (RUN, KEY) if "*" in metric.name else (RUN,)
            self._gauges[made] = self._make(made, description=_ascii(f"{metric.meaning} ({metric.unit})"), tag_keys=labels)
        return self._gauges[made]


def _ascii(text: str) -> str:
    """Ray's gauges take ASCII alone."""
    return text.encode("ascii", "replace").decode()
