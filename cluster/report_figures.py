"""The plots of a report's page, as plotly figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cluster.metrics import name
from cluster.report_data import Run, length_spans
from cluster.report_plots import (
    ACCOUNTS,
    BAD,
    FURTHER,
    GOOD,
    HEADLINE,
    WORK,
    Panel,
    colour,
    groups_by_state,
    panels,
    smooth,
    smoothing,
    staleness,
    timeline,
    tokens_by_account,
)  # fmt: skip


def figures(runs: Sequence[Run]) -> list[tuple[str, str, go.Figure]]:
    """All plots of the page: (heading, caption, figure)."""
    made = [
        ("What to watch", "Raw values, and above 60 steps their running mean.", _curves(panels(runs, HEADLINE), columns=2, height=300)),
        ("More curves", "", _curves(panels(runs, FURTHER), columns=3, height=230)),
    ]
    if any(run.books for run in runs):
        made.append(("Where every group and every token went", "Shares; counts on hover.", _ledger(runs)))
    made += [
        (f"Who worked and who waited: {run.label}", _waited(run), _timeline(run)) for run in runs if timeline(run).total > 0
    ]  # fmt: skip
    if any(staleness(run) for run in runs):
        made.append(("Staleness", "Versions between a group's oldest token and the policy that it trained.", _staleness(runs)))
    for run in runs:
        if length_spans(run):
            made.append((f"Lengths of answers: {run.label}", "Right answers above the line, the others below.", _lengths(run)))
    return [(heading, caption, figure) for heading, caption, figure in made if figure.data]


def plain(figure: go.Figure, height: int, **more: Any) -> go.Figure:
    """The look of every plot."""
    figure.update_layout(
        template="plotly_white", height=height, margin={"l": 55, "r": 20, "t": 70, "b": 45}, font={"size": 12},
        legend={"orientation": "h", "yref": "container", "y": 0.995, "yanchor": "top", "x": 0}, hovermode="closest",
    )  # fmt: skip
    figure.update_layout(**more)
    return figure


def _curves(made: Sequence[Panel], columns: int, height: int) -> go.Figure:
    if not made:
        return go.Figure()
    rows = -(-len(made) // columns)
    figure = make_subplots(
        rows=rows, cols=columns, subplot_titles=[p.title for p in made], vertical_spacing=0.28 / rows, horizontal_spacing=0.16 / columns
    )
    for i, panel in enumerate(made):
        for place, (label, steps, values) in enumerate(panel.lines):
            if all(v is None for v in values):
                continue
            at = {"row": i // columns + 1, "col": i % columns + 1}
            sparse = panel.field.startswith("eval.") or sum(v is not None for v in values) < len(values)
            pairs = [(s, v) for s, v in zip(steps, values, strict=True) if v is not None]
            x, y = [s for s, _ in pairs], [float(f"{v:.5g}") for _, v in pairs]
            width = smoothing(len(x))
            style: dict[str, Any] = {"legendgroup": label, "name": label, "line": {"color": colour(place), "width": 1.8}}
            if width > 1:
                faint = {**style, "line": {"color": colour(place), "width": 1}, "opacity": 0.3, "showlegend": False, "hoverinfo": "skip"}
                figure.add_scatter(x=x, y=y, mode="lines", **faint, **at)
                y = [float(f"{v:.5g}") for v in smooth(list(y), width) if v is not None]
            mode = "lines+markers" if sparse or len(x) < 3 else "lines"
            figure.add_scatter(x=x, y=y, mode=mode, showlegend=i == 0 and len(panel.lines) > 1, **style, **at)
        if not any(v for _, _, values in panel.lines for v in values):  # a line of zeros lies on the axis, not in mid-air
            figure.update_yaxes(range=[0, 1], row=i // columns + 1, col=i % columns + 1)
    figure.update_xaxes(title_text="step", row=rows)
    return plain(figure, height * rows + 70)


def _ledger(runs: Sequence[Run]) -> go.Figure:
    """A bar per run for groups and one for tokens, each 100 %."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=["groups", "tokens"], shared_yaxes=True, horizontal_spacing=0.05)
    held = [run for run in runs if run.books]
    named: set[str] = set()
    for column, count in ((1, groups_by_state), (2, tokens_by_account)):
        found = {run.label: count(run.books.last) for run in held if run.books}
        for state in dict.fromkeys([*ACCOUNTS, *(s for counts in found.values() for s in counts)]):
            counts = [found[run.label].get(state, 0) for run in held]
            if not any(counts):
                continue
            totals = [sum(found[run.label].values()) or 1 for run in held]
            figure.add_bar(
                y=[run.label for run in held],
                x=[100 * n / total for n, total in zip(counts, totals, strict=True)],
                customdata=counts,
                orientation="h",
                name=state,
                legendgroup=state,
                showlegend=state not in named,
                marker={"color": ACCOUNTS.get(state, "#555555")},
                hovertemplate=f"{state}: %{{customdata:,}} (%{{x:.1f}} %)<extra>%{{y}}</extra>",
                row=1,
                col=column,
            )
            named.add(state)
    figure.update_xaxes(title_text="%", range=[0, 100])
    figure.update_yaxes(autorange="reversed", automargin=True)
    return plain(figure, 190 + 60 * len(held), barmode="stack")


def _timeline(run: Run) -> go.Figure:
    """Above what the loop did, stretch by stretch; below, step by step, how fast the engines' tokens came and how long engines had none."""
    made = timeline(run)
    timed = any(share is not None for share in made.idle)
    heights = [0.5, 0.25, 0.25] if timed else [0.6, 0.4]
    figure = make_subplots(rows=len(heights), cols=1, shared_xaxes=True, vertical_spacing=0.05, row_heights=heights)
    for field, spans in made.stretches.items():
        figure.add_bar(
            y=["loop"] * len(spans),
            x=[round(seconds, 4) for _, seconds, _ in spans],
            base=[round(start, 3) for start, _, _ in spans],
            customdata=[step for _, _, step in spans],
            orientation="h",
            name=name(field),
            marker={"color": WORK[field], "line": {"width": 0}},
            hovertemplate=f"step %{{customdata}}: {name(field)} %{{x:.2f}} s<extra></extra>",
            row=1,
            col=1,
        )
    edges = [*(round(start, 3) for start, _, _ in made.speed), round(made.total, 3)]
    figure.add_heatmap(
        x=edges,
        y=["engines"],
        z=[[round(rate) for _, _, rate in made.speed]],
        customdata=[run.steps],
        zmin=0,
        colorscale="Blues",
        colorbar={"title": {"text": "tokens/s"}, "thickness": 12},
        hovertemplate="step %{customdata}: %{z:,} tokens/s<extra></extra>",
        row=2,
        col=1,
    )
    if timed:
        figure.add_heatmap(
            x=edges,
            y=["engines wait"],
            z=[[None if share is None else round(100 * share, 1) for share in made.idle]],
            customdata=[run.steps],
            zmin=0,
            zmax=100,
            colorscale="Oranges",
            showscale=False,
            hovertemplate="step %{customdata}: engines without a group %{z:.0f} % of the time<extra></extra>",
            row=3,
            col=1,
        )
    figure.update_xaxes(title_text="seconds of running time", row=len(heights))
    return plain(figure, 240 + 30 * len(heights), barmode="overlay", bargap=0.1)


def _waited(run: Run) -> str:
    made = timeline(run)
    parts = [f"{name(field)} {made.share(field):.0%}" for field in made.stretches]
    there = [share for share in made.idle if share is not None]
    engines = f" Engines had no group for {sum(there) / len(there):.0%} of a step." if there else ""
    return "Of all time: " + ", ".join(parts) + "." + engines


def _staleness(runs: Sequence[Run]) -> go.Figure:
    figure = go.Figure()
    for place, run in enumerate(runs):
        counts = staleness(run)
        figure.add_bar(x=list(counts), y=list(counts.values()), name=run.label, marker={"color": colour(place)}, showlegend=len(runs) > 1)
    figure.update_xaxes(title_text="versions", dtick=1)
    figure.update_yaxes(title_text="groups")
    return plain(figure, 280, barmode="group", bargap=0.5)


def _lengths(run: Run) -> go.Figure:
    spans = length_spans(run)
    titles = [f"steps {s.first_step} to {s.last_step}" for s in spans]
    figure = make_subplots(rows=1, cols=len(spans), subplot_titles=titles, shared_xaxes="all", shared_yaxes="all", horizontal_spacing=0.05)
    for i, span in enumerate(spans):
        for kind, counts, tint, sign in (("right", span.right, GOOD, 1), ("not right", span.other, BAD, -1)):
            figure.add_bar(
                x=[start + (span.width - 1) / 2 for start in counts],
                y=[sign * n for n in counts.values()],
                customdata=list(counts.values()),
                width=span.width,
                name=kind,
                legendgroup=kind,
                showlegend=i == 0,
                marker={"color": tint},
                hovertemplate=f"%{{x}} tokens: %{{customdata}} answers, {kind}<extra></extra>",
                row=1,
                col=i + 1,
            )
    figure.update_xaxes(title_text="tokens")
    figure.update_yaxes(title_text="answers", col=1)
    return plain(figure, 330, barmode="overlay", bargap=0.05)
