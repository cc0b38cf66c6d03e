"""What the plots of a report show, as plain data; `report_figures` and `report_images` draw it.

So page and images cannot differ in substance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.metrics import name, row
from cluster.report_data import Run, Values
from learner.ledger import FLIGHT, MASKED, UNINFORMATIVE, Ledger

COLOURS = ("#1f6fb4", "#d9601a", "#2a8f4e", "#8e4bb0", "#b8860b", "#c2325b", "#1c9aa0", "#6b6b6b")
"""One per run, in turn."""

HEADLINE = ("buffer.reward", "buffer.informative", "buffer.resp_len", "train.clipfrac")
FURTHER = (
    "eval.greedy", "buffer.all_right", "buffer.all_wrong", "buffer.truncated", "buffer.resp_len_right", "buffer.resp_len_wrong",
    "train.entropy", "train.kl_old", "train.grad_norm", "train.mismatch.mean_abs", "tokens_per_second", "train.lr",
)  # fmt: skip

GOOD, BAD = "#2a8f4e", "#c8452f"
ACCOUNTS = {
    "trained": "#2a8f4e",
    **dict(zip((f"masked({m})" for m in MASKED), ("#9ccfab", "#c9d98b", "#d8c76a"), strict=True)),
    "uninformative": "#8fa3b8",
    **dict(zip((f"uninformative({u})" for u in UNINFORMATIVE), ("#7d9cc0", "#b59bb8", "#c9c9c9"), strict=True)),
    "failed": "#c8452f",
    "surplus": "#e2975c",
    "lost_attempt": "#7a2d20",
    "kept": "#4aa3a8",
    "in flight": "#a8d5d8",
    "held by kept groups": "#4aa3a8",
}
"""Colour of each state of groups and account of tokens."""

WORK = {
    "seconds_checkpoint": "#7a6a9a",
    "seconds_generate_wait": "#d0d4da",
    "seconds_train": "#1f6fb4",
    "seconds_sync": "#d9a21a",
    "seconds_eval": "#2a8f4e",
}
"""What the loop does in a step, in its order, and the colour of each."""


def colour(place: int) -> str:
    """Of the run at that place."""
    return COLOURS[place % len(COLOURS)]


# -- plain data ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """One metric, a line per run: (label, steps, values)."""

    field: str
    lines: list[tuple[str, list[int], Values]]

    @property
    def title(self) -> str:
        """The logged name and its unit."""
        metric = row(self.field)
        return f"{name(self.field)}" + (f" [{metric.unit}]" if metric.unit not in ("1", "reward", "loss", "norm") else "")


def panels(runs: Sequence[Run], fields: Sequence[str]) -> list[Panel]:
    """Those of the metrics that any of the runs logged."""
    made = []
    for field in fields:
        lines = [(run.label, *run.points(field)) for run in runs]
        if any(v is not None for _, _, values in lines for v in values):
            made.append(Panel(field, lines))
    return made


def smooth(values: Values, width: int) -> Values:
    """Running mean over the `width` values up to each, those not logged left out."""
    out: Values = []
    seen: list[float] = []
    for value in values:
        if value is not None:
            seen.append(value)
        out.append(None if value is None else sum(seen[-width:]) / len(seen[-width:]))
    return out


def smoothing(steps: int) -> int:
    """Steps of the running mean: none below 60 steps, then a twenty-fifth of them."""
    return 1 if steps < 60 else steps // 25


def groups_by_state(ledger: Ledger) -> dict[str, int]:
    """Groups by state, in the order of ACCOUNTS; states without one left out."""
    counts: dict[str, int] = dict.fromkeys(ACCOUNTS, 0)
    for state, count in ledger.groups.items():
        known = "failed" if state.startswith("failed(") else state
        counts[known] = counts.get(known, 0) + count
    counts["kept"] = ledger.live("kept")
    counts["in flight"] = sum(ledger.live(state) for state in FLIGHT)
    return {state: count for state, count in counts.items() if count}


def tokens_by_account(ledger: Ledger) -> dict[str, int]:
    """Tokens by account, in the order of ACCOUNTS; accounts without one left out."""
    counts: dict[str, int] = dict.fromkeys(ACCOUNTS, 0)
    for account, count in ledger.tokens.items():
        counts[account] = counts.get(account, 0) + count
    counts["held by kept groups"] = ledger.held
    return {account: count for account, count in counts.items() if count}


@dataclass(frozen=True)
class Timeline:
    """What the loop did and when: of each kind the (start, seconds, step) of every stretch, and tokens/s over each step.

    `idle` is the share of each step, evaluation left out, in which an engine had no group; None where that was not timed.
    """

    stretches: Mapping[str, list[tuple[float, float, int]]]
    speed: list[tuple[float, float, float]]  # (start, seconds, tokens per second)
    idle: Values
    total: float

    def share(self, field: str) -> float:
        """Share of all time."""
        return sum(seconds for _, seconds, _ in self.stretches.get(field, ())) / self.total if self.total else 0.0


def timeline(run: Run) -> Timeline:
    """Steps end to end; within each, the stretches in the loop's order. Time between the lives of a resumed run is left out."""
    stretches: dict[str, list[tuple[float, float, int]]] = {field: [] for field in WORK}
    speed = []
    columns = {field: run.values(field) for field in WORK}
    now = 0.0
    for i, (step, whole, rate) in enumerate(zip(run.steps, run.values("seconds_step"), run.values("tokens_per_second"), strict=True)):
        at = now
        for field in WORK:
            seconds = columns[field][i] or 0.0
            if seconds > 0:
                stretches[field].append((at, seconds, step))
            at += seconds
        end = max(now + (whole or 0.0), at)
        speed.append((now, end - now, rate or 0.0))
        now = end
    working = [max((whole or 0.0) - (e or 0.0), 1e-9) for whole, e in zip(run.values("seconds_step"), columns["seconds_eval"], strict=True)]
    idle = [None if i is None else min(i / w, 1.0) for i, w in zip(run.values("seconds_engines_idle"), working, strict=True)]
    return Timeline({field: spans for field, spans in stretches.items() if spans}, speed, idle, now)


def staleness(run: Run) -> dict[int, float]:
    """Groups trained, by staleness."""
    counts = {int(key): sum(v for v in values if v) for key, values in run.star("buffer.staleness.*").items()}
    return dict(sorted(counts.items()))
