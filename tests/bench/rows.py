"""What a benchmark gives: rows of one table. No torch, no measuring: numbers in, numbers and text out.

A row compares ours with the peer by the median over pairs that were measured one after the other, so that what the machine does
meanwhile touches both alike. `ratio` says how many times better ours is, whichever way the unit points; `share_of_limit` how near ours is
to what the machine allows, 1.0 being there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the table and one object of `bench.json`. `limit` has the row's unit; None: there is nothing of the kind.

    `spread`: largest less smallest ratio over the pairs, by their median (without a peer: of ours). `bar` says in words what the row
    must show and `met` whether it does; `note` is whatever else a reader should know (what the peer and the limit are).
    """

    name: str
    unit: str
    ours: float
    peer: float | None = None
    ratio: float | None = None
    limit: float | None = None
    share_of_limit: float | None = None
    spread: float | None = None
    bar: str = ""
    met: bool | None = None
    note: str = ""


def compare(
    name: str,
    unit: str,
    ours: Sequence[float] | float,
    peer: Sequence[float] | float | None = None,
    *,
    limit: float | None = None,
    higher_is_better: bool = True,
    least_ratio: float | None = None,
    least_share: float | None = None,
    most: float | None = None,
    note: str = "",
) -> Row:
    """A row from measurements; those of `ours` and `peer` at the same place are a pair.

    The bars: `least_ratio`, `least_share` (of the limit) and `most` (for `ours` itself, in its unit), each where given.
    """
    mine = [ours] if isinstance(ours, (int, float)) else list(ours)
    theirs = None if peer is None else [peer] if isinstance(peer, (int, float)) else list(peer)
    value, ratio, spread = median(mine), None, spread_of(mine)
    if theirs is not None:
        assert len(theirs) == len(mine), f"{name}: {len(mine)} measurements of ours and {len(theirs)} of the peer are no pairs"
        ratios = [better(a, b, higher_is_better) for a, b in zip(mine, theirs, strict=True)]
        ratio, spread = median(ratios), spread_of(ratios)
    share = None if limit is None else better(value, limit, higher_is_better)
    bars = [
        (f"ratio ≥ {least_ratio}", None if ratio is None or least_ratio is None else ratio >= least_ratio),
        (f"share ≥ {least_share}", None if share is None or least_share is None else share >= least_share),
        (f"≤ {most} {unit}", None if most is None else value <= most),
    ]
    asked = [(text, met) for text, met in bars if met is not None]
    return Row(
        name=name,
        unit=unit,
        ours=value,
        peer=None if theirs is None else median(theirs),
        ratio=ratio,
        limit=limit,
        share_of_limit=share,
        spread=spread,
        bar=", ".join(text for text, _ in asked),
        met=all(met for _, met in asked) if asked else None,
        note=note,
    )


def better(a: float, b: float, higher_is_better: bool) -> float:
    """How many times better `a` is than `b`."""
    top, bottom = (a, b) if higher_is_better else (b, a)
    return top / bottom if bottom else math.inf


def spread_of(values: Sequence[float]) -> float | None:
    """(largest − smallest) / median; None of fewer than two."""
    middle = median(values)
    return (max(values) - min(values)) / abs(middle) if len(values) > 1 and middle else None


def to_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Objects for `bench.json`; numbers that JSON has not are null."""
    return [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(row).items()} for row in rows]


COLUMNS = ("name", "unit", "ours", "peer", "ratio", "limit", "share", "spread", "bar")


def table(rows: Iterable[Row]) -> str:
    """The rows as aligned text; a missed bar is marked, notes follow below."""
    rows = list(rows)
    cells = [COLUMNS] + [
        (r.name, r.unit, *map(number, (r.ours, r.peer, r.ratio, r.limit, r.share_of_limit, r.spread)), bar_of(r)) for r in rows
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    lines = []
    for row in cells:
        aligned = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        aligned[:2] = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        lines.append("  ".join([*aligned[:-1], row[-1]]).rstrip())
    lines += ["", *(f"{r.name}: {r.note}" for r in rows if r.note)]
    return "\n".join(lines)


def bar_of(row: Row) -> str:
    """The bar and whether it is met."""
    return "" if row.met is None else f"{row.bar}: {'yes' if row.met else 'NO'}"


def number(value: float | None) -> str:
    """Three significant digits, without exponents for what the tables hold."""
    if value is None or not math.isfinite(value):
        return "" if value is None else str(value)
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"
