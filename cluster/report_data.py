"""What a report knows of a run, read from its folder: series, lengths, samples, the books, the config. No plotting here."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.ledger import LEDGER_FILE, Books, read_books
from cluster.metrics import TABLE, name
from cluster.report_tokens import Pieces
from cluster.runfolder import CONFIG, EVALUATIONS, SUMMARY
from cluster.sinks import ADVICE, LENGTHS, METRICS, SAMPLES, read_rows
from learner.admission import RIGHT
from learner.denominators import answer_weights
from rollout.errors import UserError

Values = list[float | None]
"""One number a step; None where it was not logged."""

TEXT_KEPT = 20_000
"""Characters of an answer that a report shows."""


@dataclass(frozen=True)
class Run:
    """One run. `series` has a value per entry of `steps` for every logged name; `books` is None where there is no ledger."""

    label: str
    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    steps: list[int]
    series: Mapping[str, Values]
    lengths: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    advice: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    books: Books | None

    def points(self, field: str) -> tuple[list[int], Values]:
        """(steps, values) of a field; those of an evaluation from evaluations.jsonl, which has the one before training."""
        kind, _, key = field.partition(".")
        if kind != "eval" or not self.evaluations:
            return self.steps, self.values(field)
        found = {row["step"]: _number(row.get(key)) for row in self.evaluations}  # a step evaluated anew counts as it was last
        return sorted(found), [found[step] for step in sorted(found)]

    def values(self, field: str) -> Values:
        """The series of a field of the table; None at every step where it was never logged."""
        return list(self.series.get(name(field), [None] * len(self.steps)))

    def star(self, field: str) -> dict[str, Values]:
        """The series of a row for `*`, by what stands for it: `star("buffer.staleness.*")`."""
        stem = name(field).removesuffix("*")
        return {key.removeprefix(stem): list(values) for key, values in self.series.items() if key.startswith(stem)}

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting by its dotted name."""
        at: Any = self.config
        for part in key.split("."):
            if not isinstance(at, Mapping) or part not in at:
                return default
            at = at[part]
        return at


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs that were asked for, each with a label of its own. Raises UserError for a folder that holds no steps."""
    return [read_run(folder, label) for folder, label in zip(folders, labels(folders), strict=True)]


def labels(folders: Sequence[Path]) -> list[str]:
    """The folders' names; with as many parents before them as it takes to tell them apart, or a number where nothing does."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        found = ["/".join(p[-depth:]).lstrip("/") for p in parts]
        if len(set(found)) == len(found):
            return found
    seen: Counter[str] = Counter()
    unique = []
    for part in parts:
        seen[part[-1]] += 1
        unique.append(f"{part[-1]} ({seen[part[-1]]})")
    return unique


def read_run(folder: Path, label: str) -> Run:
    """One run. Raises UserError when `folder` is none, has no step, or has a damaged file."""
    if not folder.is_dir():
        raise UserError(f"RUN = {folder} is not a folder: give the run folder that training printed as its last line")
    if not (folder / METRICS).is_file():
        raise UserError(f"RUN = {folder} has no {METRICS}: give a run folder in which at least one step was taken")
    rows = read_rows(folder / METRICS)
    if not rows:
        raise UserError(f"RUN = {folder} has an empty {METRICS}: give a run folder in which at least one step was taken")
    return Run(
        label=label,
        folder=folder,
        config=_toml(folder / CONFIG),
        summary=_json(folder / SUMMARY),
        steps=[row["step"] for row in rows],
        series=_series(rows),
        lengths=read_rows(folder / LENGTHS),
        samples=read_rows(folder / SAMPLES),
        advice=read_rows(folder / ADVICE),
        evaluations=read_rows(folder / EVALUATIONS),
        books=read_books(folder) if (folder / LEDGER_FILE).is_file() else None,
    )


def _series(rows: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
    """Columns in the table's order."""
    seen = dict.fromkeys(key for row in rows for key in row if key != "step")
    exact = {m.name: i for i, m in enumerate(TABLE)}
    stems = [(m.name[:-1], i) for i, m in enumerate(TABLE) if m.name.endswith("*")]

    def place(key: str) -> int:
        return exact.get(key, next((i for stem, i in stems if key.startswith(stem)), len(TABLE)))

    return {key: [_number(row.get(key)) for row in rows] for key in sorted(seen, key=place)}


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value else None


def _toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is no TOML ({error}): mend it or remove it") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def differing(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Settings in which the runs differ: (dotted key, value of each run); the run's name and folder are none."""
    flats = [dict(flat(run.config)) for run in runs]
    keys = [key for key in dict.fromkeys(key for flat in flats for key in flat) if key not in ("name", "run_dir", "resume")]
    table = [(key, [json.dumps(flat[key]) if key in flat else "–" for flat in flats]) for key in keys]
    return [(key, values) for key, values in table if len(set(values)) > 1]


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Every leaf of a tree of settings by its dotted key."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


# -- lengths ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Answers by length: `right` and `other` map the first length of a bin of `width` tokens to a count."""

    first_step: int
    last_step: int
    width: int
    right: Mapping[int, int]
    other: Mapping[int, int]


def length_spans(run: Run, share: float = 0.2) -> list[Lengths]:
    """The histograms of the run's first and last part, from lengths.jsonl, or from the samples of a run without it."""
    rows = run.lengths or _lengths_of_samples(run)
    if not rows:
        return []
    count = max(1, round(share * len(rows)))
    spans = [rows[:count]] if len(rows) < 2 else [rows[:count], rows[-count:]]
    return [_merged(span) for span in spans]


def _lengths_of_samples(run: Run) -> list[dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    for sample in run.samples:
        row = rows.setdefault(sample["step"], {"step": sample["step"], "width": 1, "right": Counter(), "other": Counter()})
        for answer in sample["answers"]:
            if answer["reward"] is not None:
                row["right" if answer["reward"] >= RIGHT else "other"][str(answer["tokens"])] += 1
    return list(rows.values())


def _merged(rows: Sequence[Mapping[str, Any]]) -> Lengths:
    width = max(int(row["width"]) for row in rows)  # a resumed run may have another budget
    found: dict[str, Counter[int]] = {"right": Counter(), "other": Counter()}
    for row in rows:
        for kind, bins in found.items():
            for place, count in row[kind].items():
                bins[int(place) * int(row["width"]) // width * width] += count
    return Lengths(rows[0]["step"], rows[-1]["step"], width, dict(sorted(found["right"].items())), dict(sorted(found["other"].items())))


# -- samples ------------------------------------------------------------------------------------------------------------


def browsable(run: Run, budget: int) -> list[dict[str, Any]]:
    """Samples as the page shows them, each answer cut into tokens with the push on each; steps evenly thinned to `budget` bytes."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in run.samples:
        by_step.setdefault(row["step"], []).append(row)
    steps = sorted(by_step)
    sizes = {step: sum(_size(row) for row in by_step[step]) for step in steps}
    kept = thinned(steps, [sizes[step] for step in steps], budget)
    pieces = Pieces.of(run.folder)
    return [_shown(row, run, pieces) for step in kept for row in by_step[step]]


def thinned(steps: Sequence[int], sizes: Sequence[int], budget: int) -> list[int]:
    """As many steps, evenly spaced and with the last one, as `budget` bytes hold; at least one."""
    for every in range(1, len(steps) + 1):
        at = range(len(steps) - 1, -1, -every)
        if sum(sizes[i] for i in at) <= budget:
            return [steps[i] for i in reversed(at)]
    return list(steps[-1:])


def _size(row: Mapping[str, Any]) -> int:
    """About how many bytes a sample takes in the page."""
    answers = row["answers"]
    return len(row["prompt"]) + sum(min(len(a["text"]), TEXT_KEPT) + 4 * len(a.get("ids") or ()) + 150 for a in answers) + 200


def _shown(row: Mapping[str, Any], run: Run, pieces: Pieces) -> dict[str, Any]:
    weights = _weights(row["answers"], run)
    answers = []
    for answer, weight in zip(row["answers"], weights, strict=True):
        advantage = answer.get("advantage")
        answers.append(
            {
                "pieces": pieces.cut(answer["text"][:TEXT_KEPT], answer.get("ids") or []),
                "tokens": answer["tokens"],
                "finish": answer["finish"],
                "reward": answer["reward"],
                "status": answer["status"],
                "detail": str(answer["detail"])[:300],
                "advantage": advantage,
                "push": None if advantage is None or weight is None else advantage * weight,
            }
        )
    return {**{key: row[key] for key in ("step", "uid", "source", "outcome", "versions", "prompt", "gold")}, "answers": answers}


def _weights(answers: Sequence[Mapping[str, Any]], run: Run) -> list[float | None]:
    """Each answer's weight in the loss as it was logged; else as if the group were the whole batch, which is right up to a factor."""
    logged = [answer.get("weight") for answer in answers]
    if any(weight is not None for weight in logged):
        return logged
    lengths = [0 if answer["reward"] is None else answer["tokens"] for answer in answers]
    mode, budget = run.setting("objective.loss_agg", "token-mean"), run.setting("rollout.max_tokens") or max([1, *lengths])
    return [float(w) for w in answer_weights(lengths, [0] * len(lengths), mode=mode, max_len=budget)]
