"""The main plots of a report as PNG files, by matplotlib: plotly's own export needs a browser, which a cluster's head seldom has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.metrics import name
from cluster.report_data import Run, length_spans
from cluster.report_plots import (
    ACCOUNTS,
    BAD,
    FURTHER,
    GOOD,
    HEADLINE,
    WORK,
    colour,
    groups_by_state,
    panels,
    smooth,
    smoothing,
    staleness,
    timeline,
    tokens_by_account,
)  # fmt: skip
from rollout.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_images(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write every plot for which there is data to `folder`. Raises UserError when matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UserError("--png needs matplotlib: pip install matplotlib, or leave --png out") from None
    folder.mkdir(parents=True, exist_ok=True)
    plots: dict[str, Callable[[Sequence[Run]], Figure | None]] = {
        "curves": lambda runs: _curves(runs, HEADLINE, 2),
        "more_curves": lambda runs: _curves(runs, FURTHER, 3),
        "ledger": _ledger,
        "timeline": _timeline,
        "staleness": _staleness,
        "lengths": _lengths,
    }
    written = []
    for stem, draw in plots.items():
        figure = draw(runs)
        if figure is not None:
            written.append(folder / f"{stem}.png")
            figure.savefig(written[-1], dpi=110)
    return written


def _figure(width: float, height: float) -> Figure:
    """A figure without pyplot, which keeps figures and looks for a screen."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _legend(figure: Figure, axis: Any, columns: int) -> None:
    handles, names = axis.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=columns, frameon=False, fontsize=8)


def _curves(runs: Sequence[Run], fields: Sequence[str], columns: int) -> Figure | None:
    made = panels(runs, fields)
    if not made:
        return None
    rows = -(-len(made) // columns)
    figure = _figure(4.6 * columns, 2.6 * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for i, axis in enumerate(axes.flat):
        if i >= len(made):
            axis.set_axis_off()
            continue
        for place, (label, steps, values) in enumerate(made[i].lines):
            pairs = [(s, v) for s, v in zip(steps, values, strict=True) if v is not None]
            x, y = [s for s, _ in pairs], [v for _, v in pairs]
            width = smoothing(len(x))
            mark = "." if made[i].field.startswith("eval.") or len(x) < len(steps) else ""
            if width > 1:
                axis.plot(x, y, color=colour(place), alpha=0.3, linewidth=0.8)
            axis.plot(x, smooth(list(y), width), color=colour(place), label=label, linewidth=1.5, marker=mark)
        axis.set_title(made[i].title, fontsize=10)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
    if len(runs) > 1:
        _legend(figure, axes.flat[0], len(runs))
    return figure


def _ledger(runs: Sequence[Run]) -> Figure | None:
    held = [run for run in runs if run.books]
    if not held:
        return None
    figure = _figure(11, 1.6 + 0.5 * len(held))
    axes = figure.subplots(1, 2, sharey=True)
    handles: dict[str, Any] = {}
    for axis, title, count in zip(axes, ("groups", "tokens"), (groups_by_state, tokens_by_account), strict=True):
        for place, run in enumerate(held):
            counts, left = count(run.books.last) if run.books else {}, 0.0
            for state, number in counts.items():
                share = 100 * number / sum(counts.values())
                handles[state] = axis.barh(place, share, left=left, color=ACCOUNTS.get(state, "#555555"), height=0.6)
                left += share
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("%")
    axes[0].set_yticks(range(len(held)), [run.label for run in held])
    axes[0].invert_yaxis()
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _timeline(runs: Sequence[Run]) -> Figure | None:
    made = [(run, timeline(run)) for run in runs]
    made = [(run, line) for run, line in made if line.total > 0]
    if not made:
        return None
    figure = _figure(11, 1.2 + 0.9 * len(made))
    axes = figure.subplots(len(made), 1, squeeze=False)
    for axis, (run, line) in zip(axes.flat, made, strict=True):
        for field, spans in line.stretches.items():
            axis.broken_barh([(start, seconds) for start, seconds, _ in spans], (0, 1), color=WORK[field], label=name(field), linewidth=0)
        axis.set_yticks([0.5], [run.label])
        axis.set_xlim(0, line.total)
    axes.flat[-1].set_xlabel("seconds of running time")
    seen = {n: h for axis in axes.flat for h, n in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(seen.values()), list(seen), loc="outside upper left", ncols=len(seen), frameon=False, fontsize=8)
    return figure


def _staleness(runs: Sequence[Run]) -> Figure | None:
    found = [staleness(run) for run in runs]
    if not any(found):
        return None
    figure = _figure(6, 3)
    axis = figure.subplots()
    wide = 0.8 / len(runs)
    for place, (run, counts) in enumerate(zip(runs, found, strict=True)):
        axis.bar([s - 0.4 + wide * (place + 0.5) for s in counts], list(counts.values()), wide, color=colour(place), label=run.label)
    axis.set_xticks(sorted({s for counts in found for s in counts}))
    axis.set_xlabel("versions between a group's oldest token and the policy that it trained")
    axis.set_ylabel("groups")
    _legend(figure, axis, len(runs))
    return figure


def _lengths(runs: Sequence[Run]) -> Figure | None:
    made = [(run, length_spans(run)) for run in runs]
    made = [(run, spans) for run, spans in made if spans]
    if not made:
        return None
    figure = _figure(10, 2.6 * len(made))
    axes = figure.subplots(len(made), 2, squeeze=False, sharex="row", sharey="row")
    for line, (run, spans) in zip(axes, made, strict=True):
        for axis, span in zip(line, spans, strict=False):
            for kind, counts, tint, sign in (("right", span.right, GOOD, 1), ("not right", span.other, BAD, -1)):
                middles = [start + (span.width - 1) / 2 for start in counts]
                axis.bar(middles, [sign * n for n in counts.values()], span.width, color=tint, label=kind)
            axis.axhline(0, color="black", linewidth=0.6)
            axis.set_title(f"{run.label}, steps {span.first_step} to {span.last_step}", fontsize=10)
            axis.set_xlabel("tokens")
        line[0].set_ylabel("answers")
        for axis in line[len(spans) :]:
            axis.set_axis_off()
    _legend(figure, axes[0][0], 2)
    return figure
