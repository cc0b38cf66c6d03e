"""The Grafana dashboard over the live gauges, made from the table of metrics.

`python -m cluster.grafana > cluster/dashboards/winnow.json` writes it anew. In Grafana: Dashboards, New, Import, and choose a
Prometheus that scrapes Ray's metrics ports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from cluster.live import EXPORTED, KEY, RUN, gauge_name
from cluster.metrics import name, row


class Panel(NamedTuple):
    """One plot: the fields in it. `stacked` adds them up; `width` of the 24 columns of a row."""

    title: str
    fields: Sequence[str]
    stacked: bool = False
    width: int = 8


LAYOUT: dict[str, tuple[Panel, ...]] = {
    "What to watch": (
        Panel("reward", ("buffer.reward",), width=6),
        Panel("informative", ("buffer.informative",), width=6),
        Panel("resp_len", ("buffer.resp_len",), width=6),
        Panel("clipfrac", ("train.clipfrac",), width=6),
        Panel("held-out accuracy", ("eval.greedy",)),
        Panel("groups without signal", ("buffer.all_right", "buffer.all_wrong", "buffer.equal")),
        Panel("entropy", ("train.entropy",)),
    ),
    "Time and waiting": (
        Panel("a step", ("seconds_generate_wait", "seconds_train", "seconds_sync", "seconds_eval", "seconds_checkpoint"), stacked=True),
        Panel("waiting for a batch", ("seconds_generate_wait", "buffer.refill_wait_s", "buffer.blocked_by_oldest_s")),
        Panel("the learner's parts", ("train.seconds.prepare", "train.seconds.forward_backward", "train.seconds.optimiser"), stacked=True),
    ),
    "Token ledger": (
        Panel(
            "tokens, in total",
            (
                "ledger.tokens_trained", "ledger.tokens_masked_overlong", "ledger.tokens_masked_error", "ledger.tokens_masked_mismatch",
                "ledger.tokens_uninformative", "ledger.tokens_failed", "ledger.tokens_surplus", "ledger.tokens_lost_attempt",
                "ledger.tokens_held",
            ),
            stacked=True,
        ),
        Panel(
            "groups, in total",
            (
                "ledger.groups_trained", "ledger.groups_uninformative", "ledger.groups_failed", "ledger.groups_surplus",
                "ledger.groups_kept", "ledger.groups_in_flight",
            ),
            stacked=True,
        ),
        Panel("tokens of a step", ("buffer.tokens", "train.tokens")),
    ),
    "Staleness": (
        Panel("versions behind", ("buffer.staleness_mean", "staleness"), width=12),
        Panel("groups by versions behind", ("buffer.staleness.*",), stacked=True, width=12),
    ),
    "Refill": (
        Panel("groups", ("buffer.scored", "buffer.dispatched", "buffer.unkept")),
        Panel("kept and in flight", ("buffer.kept", "buffer.in_flight")),
        Panel("left until refilling stops", ("buffer.refill_left",)),
    ),
    "Verifiers": (
        Panel("verification of a group", ("buffer.seconds_verify",), width=12),
        Panel("errors and timeouts", ("buffer.verifier_errors", "buffer.verifier_timeouts"), width=12),
    ),
    "Engines": (
        Panel("generated tokens a second", ("tokens_per_second",)),
        Panel("without a group to generate", ("seconds_engines_idle",)),
        Panel("generation of a group", ("buffer.seconds_generate",)),
        Panel("a transfer of weights", ("transfer.seconds", "transfer.seconds_publish", "transfer.seconds_paused")),
        Panel("answers cut off", ("buffer.truncated",)),
        Panel("engine against learner", ("train.mismatch.mean_abs",)),
        Panel("resident memory", ("resident_gb",)),
    ),
    "Faults": (
        Panel("attempts and groups that failed", ("buffer.attempts_failed", "ledger.groups_failed"), width=12),
        Panel("optimiser steps skipped", ("train.nonfinite", "train.empty"), width=12),
    ),
}  # fmt: skip
"""Rows of the dashboard, in order. Every field is one that any run logs, those of an evaluation where there is one."""

UNITS = {"s": "s", "B": "bytes", "1": "none", "GiB": "gbytes"}
"""Grafana's names of units; others are written out by the panel's title."""
HEIGHT = 7


def shown(max_staleness: int) -> list[str]:
    """Every field of the dashboard, staleness by each number of versions that may occur."""
    fields = dict.fromkeys(field for panels in LAYOUT.values() for panel in panels for field in panel.fields)
    behind = range(max_staleness + 1)
    return [one for field in fields for one in ([field[:-1] + str(k) for k in behind] if field.endswith("*") else [field])]


def query(field: str) -> str:
    """The PromQL expression of a field, for the runs that are chosen."""
    return f'{EXPORTED}{gauge_name(row(field))}{{{RUN}=~"$run"}}'


def dashboard() -> dict[str, Any]:
    """Grafana's dashboard JSON: a data source and the runs are variables."""
    run_values = f"label_values({EXPORTED}{gauge_name(row('buffer.reward'))}, {RUN})"
    source = {"type": "prometheus", "uid": "${source}"}
    many = {"includeAll": True, "multi": True, "current": {"text": ["All"], "value": ["$__all"]}}
    return {
        "title": "winnow",
        "uid": "winnow",
        "tags": ["winnow"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                {"name": "run", "label": "run", "type": "query", "datasource": source, "query": run_values, "refresh": 2, **many},
            ]
        },
        "panels": list(_panels(source)),
    }


def _panels(source: dict[str, str]) -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for heading, panels in LAYOUT.items():
        number += 1
        whole = {"h": 1, "w": 24, "x": 0, "y": y}
        yield {"id": number, "type": "row", "title": heading, "collapsed": False, "gridPos": whole, "panels": []}
        y += 1
        x = 0
        for panel in panels:
            if x + panel.width > 24:
                x, y = 0, y + HEIGHT
            number += 1
            place = {"h": HEIGHT, "w": panel.width, "x": x, "y": y}
            yield {"id": number, "gridPos": place, "datasource": source, **_plot(panel, source)}
            x += panel.width
        y += HEIGHT


def _plot(panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    rows = [row(field) for field in panel.fields]
    custom = {"lineWidth": 2, "fillOpacity": 40 if panel.stacked else 0, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    unit = UNITS.get(rows[0].unit, "short")
    return {
        "type": "timeseries",
        "title": panel.title if unit != "short" or rows[0].unit in panel.title else f"{panel.title} [{rows[0].unit}]",
        "description": "\n".join(f"{metric.name}: {metric.meaning}" for metric in rows),
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": query(field), "legendFormat": _legend(field, len(rows) > 1)}
            for i, field in enumerate(panel.fields)
        ],
    }


def _legend(field: str, several: bool) -> str:
    key = f" {{{{{KEY}}}}}" if field.endswith(".*") else ""
    return f"{name(field)} {{{{{RUN}}}}}" if several else f"{{{{{RUN}}}}}{key}"


def document() -> str:
    """The dashboard as the file has it."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(document(), end="")
