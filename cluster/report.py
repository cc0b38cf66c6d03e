"""`winnow report RUN [RUN …]`: runs side by side on one HTML page that needs no network, as images, and as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from cluster import load
from cluster.metrics import HEADLINE, TABLE
from cluster.report_data import Run, browsable, differing, read_runs
from cluster.report_plots import colour, timeline
from cluster.runfolder import plain, write_atomic
from rollout.errors import UserError

SAMPLES_BYTES = 2_500_000
"""Bytes of samples in a page, over all runs; plotly.js takes 4.8 MB, and 10 MB is what a page may take."""
SERIES_BYTES = 1_500_000
"""Bytes of the series among which any may be looked at; longer ones are thinned evenly."""
TEMPLATE = Path(__file__).with_name("report_page.html")


def main(argv: Sequence[str]) -> int:
    """Exit code 0. Raises UserError for a folder that is no run, and for a place that cannot be written."""
    parser = load.SentenceParser(prog="winnow report", description="Runs side by side: curves, ledger, timeline, histograms, samples.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--out", type=Path, help="HTML file; default: RUN/report.html, for several runs report.html here")
    parser.add_argument("--png", type=Path, metavar="DIR", help="also write the main plots as PNG files (needs matplotlib)")
    parser.add_argument("--csv", type=Path, metavar="DIR", help="also write every run's series as a CSV file")
    args = parser.parse_args(list(argv))
    runs = read_runs(args.runs)
    out = args.out or (args.runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    if out.is_dir():
        raise UserError(f"--out {out} is a folder: give the path of a file, e.g. --out {out / 'report.html'}")
    try:
        if args.csv is not None:
            print(*write_csv(runs, args.csv), sep="\n")
        if args.png is not None:
            from cluster.report_images import write_images

            print(*write_images(runs, args.png), sep="\n")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, page(runs))
    except OSError as error:
        raise UserError(f"{error.filename or out} cannot be written ({error.strerror}): give another path") from None
    print(out)
    return 0


def write_csv(runs: Sequence[Run], folder: Path) -> list[Path]:
    """One file a run: a line per step, a column per logged name in the table's order, empty where nothing was logged."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for run in runs:
        path = folder / f"{run.label.replace('/', '-')}.csv"
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *run.series])
            writer.writerows([step, *(values[i] for values in run.series.values())] for i, step in enumerate(run.steps))
        written.append(path)
    return written


# -- the page -----------------------------------------------------------------------------------------------------------


def page(runs: Sequence[Run]) -> str:
    """The whole page; plotly.js and all data are in it."""
    from cluster.report_figures import figures

    return render("winnow: " + ", ".join(run.label for run in runs), [_overview(runs)], figures(runs), runs)


def render(title: str, lead: Sequence[str], made: Sequence[tuple[str, str, Any]], runs: Sequence[Run]) -> str:
    """A page: sections of HTML, plots as (heading, caption, plotly figure), any metric of the runs, and their samples."""
    from plotly.offline import get_plotlyjs

    sections = [
        *lead,
        *(
            f'<section><h2>{escape(heading)}</h2><p class="caption">{escape(caption)}</p><div id="plot{i}"></div></section>'
            for i, (heading, caption, _) in enumerate(made)
        ),
    ]
    data = {
        "figures": [json.loads(figure.to_json()) for _, _, figure in made],
        "runs": [_for_page(run, place, len(runs)) for place, run in enumerate(runs)],
        "meanings": _meanings(runs),
    }
    parts = {
        "TITLE": escape(title),
        "BODY": "\n".join(sections),
        "PLOTLY": get_plotlyjs(),
        "DATA": json.dumps(plain(data), ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    head, *rest = TEMPLATE.read_text(encoding="utf-8").split("@")
    # TEMPLATE has its places as @NAME@, and no other @: so what is put in is never looked at again.
    return head + "".join(parts.get(piece, piece) for piece in rest)


def _for_page(run: Run, place: int, count: int) -> dict[str, Any]:
    numbers = len(run.steps) * max(len(run.series), 1)
    every = -(-(numbers * 9 * count) // SERIES_BYTES)
    kept = list(range(len(run.steps) - 1, -1, -every))[::-1]
    return {
        "label": run.label,
        "colour": colour(place),
        "steps": [run.steps[i] for i in kept],
        "series": {key: [_short(values[i]) for i in kept] for key, values in run.series.items()},
        "samples": browsable(run, SAMPLES_BYTES // count),
    }


def _short(value: float | None) -> float | None:
    """Five digits; whole numbers as they are."""
    return value if value is None or isinstance(value, int) else float(f"{value:.5g}")


def _meanings(runs: Sequence[Run]) -> dict[str, str]:
    """Logged name -> what it means."""
    exact = {m.name: m for m in TABLE}
    stars = [m for m in TABLE if m.name.endswith("*")]
    found = {}
    for key in dict.fromkeys(key for run in runs for key in run.series):
        metric = exact.get(key) or next((m for m in stars if key.startswith(m.name[:-1])), None)
        if metric is not None:
            found[key] = f"{metric.meaning} [{metric.unit}, {metric.reduction}]"
    return found


def _overview(runs: Sequence[Run]) -> str:
    """A line per run, what was advised, and the settings in which they differ."""
    head = ["run", "variant", "steps", "accuracy before", "after", *HEADLINE, "tokens/s", "running time", "books"]
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    for place, run in enumerate(runs):
        dot = f'<span class="dot" style="background:{colour(place)}"></span>'
        cells = [dot + escape(run.label), escape(str(run.setting("variant") or "grpo")), *map(escape, _figures_of(run))]
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    parts = ["<h2>Runs</h2>", html_table(lines)]
    for run in runs:
        if run.advice:
            said = [f"<li>step {a['step']}: {escape(a['evidence'])}; try {escape(a['remedy'])}</li>" for a in run.advice[-20:]]
            parts.append(f"<h2>Advice: {escape(run.label)}</h2><ul>{''.join(said)}</ul>")
    if len(runs) > 1 and (rows := differing(runs)):
        head_row = "".join(f"<th>{escape(cell)}</th>" for cell in ["setting", *(run.label for run in runs)])
        body = ["".join(f"<td>{escape(_cut(cell))}</td>" for cell in [key, *values]) for key, values in rows]
        parts += ["<h2>Settings that differ</h2>", html_table([head_row, *body])]
    return f"<section>{''.join(parts)}</section>"


def _figures_of(run: Run) -> list[str]:
    """The cells of a run's line, from the steps on."""
    line = timeline(run)
    generated = sum(v for v in run.values("buffer.tokens") if v)
    accuracy = [run.summary.get(key) for key in ("accuracy_before", "accuracy_after")]
    last = [next((v for v in reversed(run.values(m.field)) if v is not None), None) for m in TABLE if m.name in HEADLINE]
    books = "–" if run.books is None else "close" if not run.books.problems else f"{len(run.books.problems)} problems"
    return [
        f"{run.steps[-1]}",
        *("–" if a is None else f"{a:.3f}" for a in accuracy),
        *("–" if v is None else f"{v:.3g}" for v in last),
        f"{generated / line.total:,.0f}" if line.total else "–",
        _time(line.total),
        books,
    ]


def _time(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"


def _cut(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + " …"


def html_table(rows: Sequence[str]) -> str:
    """Rows of cells, each with its tags."""
    return '<div class="scroll"><table>' + "".join(f"<tr>{cells}</tr>" for cells in rows) + "</table></div>"
