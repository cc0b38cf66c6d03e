"""The plots of a sweep's page, as plotly figures: rates, scaling with its ideal, waiting by stage, rewards along three axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cluster.report_figures import plain
from cluster.report_plots import colour, smoothing
from cluster.sweep_table import Along, Kind, Point, mean_and_spread, reward_band, scaling

RATES = {"tokens": "generated in all", "per_generator": "generated, per generator", "per_learner": "trained, per learner rank"}
WAITS = {
    "wait_generators": ("generators", "#1f6fb4"), "wait_verifiers": ("verifiers", "#2a8f4e"), "wait_learner": ("learner", "#d9601a"),
    "wait_weights": ("weights", "#d9a21a"),
}  # fmt: skip
ALONG: dict[Along, str] = {"steps": "step", "seconds": "seconds of training", "tokens": "tokens generated"}
SCALING: dict[Kind, str] = {
    "strong": "Strong scaling: more generators, the same batch",
    "weak": "Weak scaling: more generators, the batch in proportion",
}
ABSENT: dict[Kind, str] = {
    "strong": "strong scaling is not in this grid: no two points differ in the number of generators alone (axes like engines = [1, 2])",
    "weak": "weak scaling is not in this grid: no two points have the same batch for each generator (axes like "
    "load = [{ engines = 1, batch_size = 16 }, { engines = 2, batch_size = 32 }])",
}


def figures(found: Sequence[Point]) -> list[tuple[str, str, go.Figure]]:
    """All plots for which the grid has points, as (heading, caption, figure)."""
    spread = " Bars: standard deviation over seeds." if any(len(point.runs) > 1 for point in found) else ""
    kinds: tuple[Kind, ...] = ("strong", "weak")
    made = [
        ("Tokens a second", f"Of the steps but the first, evaluation left out.{spread}", _rates(found)),
        *(_scaling_plot(found, kind, spread) for kind in kinds),
        ("Share of waiting, by stage", _WAITING, _waits(found)),
        ("Reward", _caption(found), _rewards(found)),
    ]
    return [(heading, caption, figure) for heading, caption, figure in made if figure.data]


def absent(found: Sequence[Point]) -> list[str]:
    """Which scaling the grid cannot show, and what would."""
    return [said for kind, said in ABSENT.items() if not scaling(found, kind)]


_WAITING = (
    "Generators: an engine has no group. Verifiers: a process has no answer. Learner: it waits for a batch. "
    "Weights: the loop is held up by their transfer."
)


def _caption(found: Sequence[Point]) -> str:
    several = any(len(point.runs) > 1 for point in found)
    return "Of all groups scored." + (" Lines: mean over seeds; shaded: from the lowest to the highest." if several else "")


def _rates(found: Sequence[Point]) -> go.Figure:
    figure = make_subplots(rows=1, cols=len(RATES), subplot_titles=list(RATES.values()), horizontal_spacing=0.06)
    for column, field in enumerate(RATES, 1):
        for place, point in enumerate(found):
            mean, spread = mean_and_spread([getattr(f, field) for f in point.figures])
            figure.add_bar(
                x=[point.label], y=[_number(mean)], error_y=_bars([spread]), name=point.label, legendgroup=point.label,
                showlegend=column == 1, marker={"color": colour(place)}, row=1, col=column,
            )  # fmt: skip
    figure.update_xaxes(showticklabels=False)
    figure.update_yaxes(title_text="tokens/s", col=1)
    return _with_legend(figure, 300, [point.label for point in found])


def _scaling_plot(found: Sequence[Point], kind: Kind, spread: str) -> tuple[str, str, go.Figure]:
    made = scaling(found, kind)
    heading = SCALING[kind]
    figure = make_subplots(rows=1, cols=2, subplot_titles=["tokens/s", "part of the ideal"], horizontal_spacing=0.1)
    for place, line in enumerate(made):
        style: dict[str, Any] = {"name": line.label, "legendgroup": line.label, "line": {"color": colour(place), "width": 2}}
        figure.add_scatter(
            x=line.engines, y=[_number(v) for v in line.tokens], error_y=_bars(line.spread), mode="lines+markers", row=1, col=1, **style
        )
        ideal = {**style, "name": f"{line.label}, ideal", "line": {"color": colour(place), "width": 1, "dash": "dash"}}
        figure.add_scatter(x=line.engines, y=[_number(v) for v in line.ideal], mode="lines", row=1, col=1, **ideal)
        figure.add_scatter(
            x=line.engines, y=[_number(v) for v in line.efficiency], mode="lines+markers", showlegend=False, row=1, col=2, **style
        )
        flat = {**ideal, "showlegend": False}
        figure.add_scatter(x=line.engines, y=[1.0] * len(line.engines), mode="lines", row=1, col=2, **flat)
    figure.update_xaxes(title_text="generators", tickvals=sorted({n for line in made for n in line.engines}))
    figure.update_yaxes(rangemode="tozero")
    labels = [f"{line.label}, ideal" for line in made] * 2
    return heading, f"Dashed: the ideal, from the fewest generators on.{spread}", _with_legend(figure, 340, labels)


def _waits(found: Sequence[Point]) -> go.Figure:
    figure = go.Figure()
    for field, (name, tint) in WAITS.items():
        pairs = [mean_and_spread([getattr(f, field) for f in point.figures]) for point in found]
        figure.add_bar(
            y=[point.label for point in found], x=[_number(100 * mean) for mean, _ in pairs], error_x=_bars([100 * s for _, s in pairs]),
            name=name, orientation="h", marker={"color": tint}, hovertemplate=f"{name}: %{{x:.1f}} %<extra>%{{y}}</extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="% of the time", range=[0, 105])
    figure.update_yaxes(autorange="reversed", automargin=True)
    return plain(figure, 130 + 62 * len(found), barmode="group")


def _rewards(found: Sequence[Point]) -> go.Figure:
    figure = make_subplots(rows=1, cols=len(ALONG), shared_yaxes=True, horizontal_spacing=0.03)
    for column, (axis, title) in enumerate(ALONG.items(), 1):
        for place, point in enumerate(found):
            band = reward_band(point, axis, max(3, smoothing(max(len(run.steps) for run in point.runs))))
            if band is None:
                continue
            tint, group = colour(place), {"legendgroup": point.label, "row": 1, "col": column}
            if len(point.runs) > 1:
                edge = {"x": [*band.x, *band.x[::-1]], "y": [*map(_number, band.high), *map(_number, band.low[::-1])]}
                shade = {"fill": "toself", "fillcolor": tint, "opacity": 0.18, "line": {"width": 0}}
                figure.add_scatter(**edge, **shade, hoverinfo="skip", showlegend=False, **group)
            line = {"x": [_number(x) for x in band.x], "y": [_number(v) for v in band.mean]}
            figure.add_scatter(**line, mode="lines", name=point.label, showlegend=column == 1, line={"color": tint, "width": 1.8}, **group)
        figure.update_xaxes(title_text=title, row=1, col=column)
    figure.update_yaxes(title_text="reward", col=1)
    return _with_legend(figure, 380, [point.label for point in found])


def _with_legend(figure: go.Figure, height: int, labels: Sequence[str]) -> go.Figure:
    """A plot of that height below a legend of as many lines as the labels take."""
    above = 18 * math.ceil(len(labels) * (60 + 7 * max(map(len, labels), default=0)) / 900)
    return plain(figure, height + above, margin={"l": 55, "r": 20, "t": 55 + above, "b": 45})


def _bars(spread: Sequence[float]) -> dict[str, Any] | None:
    """Error bars, where there are several runs."""
    return None if all(math.isnan(s) for s in spread) else {"type": "data", "array": [0.0 if math.isnan(s) else s for s in spread]}


def _number(value: float) -> float | None:
    """Five digits; what was not measured is a gap."""
    return None if math.isnan(value) else float(f"{value:.5g}")
