"""The Grafana dashboard: up to date with the table, in the order that was asked for, every query over a gauge that is set.

Does not cover Grafana and Prometheus themselves.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cluster import grafana
from cluster.live import gauge_name
from cluster.metrics import TABLE

ROOT = Path(__file__).parents[2]
FILE = ROOT / "cluster" / "dashboards" / "winnow.json"


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(FILE.read_text())["panels"]
    return found


def test_the_file_is_up_to_date() -> None:
    assert FILE.read_text() == grafana.document(), "run: python -m cluster.grafana > cluster/dashboards/winnow.json"


def test_the_four_stand_first_and_the_rest_in_order() -> None:
    plots = [panel["targets"][0]["expr"] for panel in panels() if panel["type"] == "timeseries"]
    assert plots[:4] == [f'ray_winnow_{name}{{run=~"$run"}}' for name in ("reward", "informative", "resp_len", "clipfrac")]
    assert [p["title"] for p in panels() if p["type"] == "row"] == [
        "What to watch", "Time and waiting", "Token ledger", "Staleness", "Refill", "Verifiers", "Engines", "Faults",
    ]  # fmt: skip


def test_every_query_is_over_a_gauge_of_the_table() -> None:
    known = {f"ray_{gauge_name(metric)}" for metric in TABLE}
    queries = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    names = [re.fullmatch(r'(\w+)\{run=~"\$run"\}', query) for query in queries]
    assert all(names) and {match[1] for match in names if match} <= known
    assert len(queries) == len(set(queries)) + 2, "waiting for a batch and failed groups are in two plots each, nothing else is"


def test_what_is_shown_has_staleness_by_every_number_of_versions() -> None:
    fields = grafana.shown(2)
    assert [f for f in fields if f.startswith("buffer.staleness.")] == [f"buffer.staleness.{k}" for k in range(3)]
    queried = {target["expr"] for panel in panels() for target in panel.get("targets", [])}
    assert {grafana.query(field) for field in fields} == queried


def test_no_two_panels_overlap_and_none_reaches_beyond_the_grid() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not mine & cells and max(x for x, _ in mine) < 24, panel["title"]
        cells |= mine
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_every_plot_says_what_it_shows() -> None:
    for panel in panels():
        if panel["type"] == "timeseries":
            assert len(panel["description"].splitlines()) == len(panel["targets"]) and len(panel["description"]) > 20
    (shares,) = (p for p in panels() if p["title"] == "groups by versions behind")
    assert shares["targets"][0]["legendFormat"] == "{{run}} {{key}}"
