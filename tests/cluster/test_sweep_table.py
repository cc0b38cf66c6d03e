"""What a sweep says of its runs: rates, shares of waiting, scaling against the ideal, rewards over seeds along three axes.

Does not cover how the plots look, nor the numbers of the runs themselves.
"""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest

from cluster.metrics import name
from cluster.report_data import Run
from cluster.sweep_figures import absent, figures
from cluster.sweep_spec import parse
from cluster.sweep_table import (
    Done,
    Figures,
    along,
    comma_separated,
    markdown,
    mean_and_spread,
    measure,
    points,
    reward_band,
    scaling,
    table,
)

STEPS = 11


def made(label: str, config: dict[str, Any], **changes: Any) -> Run:
    """Steps of 2 s that generate 3,000 tokens and train on 2,000; the first and the sixth hold an evaluation of 1 s more."""
    even: dict[str, list[float]] = {
        "buffer.tokens": [3000.0] * STEPS, "train.tokens": [2000.0] * STEPS,
        "seconds_step": [3.0 if i % 5 == 0 else 2.0 for i in range(STEPS)],
        "seconds_eval": [1.0 if i % 5 == 0 else 0.0 for i in range(STEPS)], "seconds_engines_idle": [0.5] * STEPS,
        "seconds_generate_wait": [1.2] * STEPS, "seconds_sync": [0.1] * STEPS, "buffer.seconds_verify": [0.01] * STEPS,
        "buffer.scored": [40.0] * STEPS, "buffer.reward": [0.1 * i for i in range(STEPS)],
    }  # fmt: skip
    even["buffer.tokens"][0] = 99.0  # the first step is not steady
    series = {name(field): values for field, values in (even | changes).items()}
    summary = {"accuracy_before": 0.25, "accuracy_after": 0.75}
    return Run(label, Path("/nowhere"), config, summary, list(range(1, STEPS + 1)), series, [], [], [], [], None)


def settings(engines: int, batch: int = 32, staleness: int = 0, seed: int = 0) -> dict[str, Any]:
    rollout = {"engines": engines, "max_staleness": staleness}
    return {"seed": seed, "rollout": rollout, "buffer": {"batch_size": batch}, "model": {"learner_ranks": 2}}


def test_the_figures_of_a_run_are_of_its_steady_time() -> None:
    assert measure(made("x", settings(3))) == Figures(
        tokens=pytest.approx(1500.0), per_generator=pytest.approx(500.0), per_learner=pytest.approx(500.0),
        wait_generators=pytest.approx(0.25), wait_verifiers=pytest.approx(0.8), wait_learner=pytest.approx(0.6),
        wait_weights=pytest.approx(0.05), seconds_step=pytest.approx(2.0), reward=pytest.approx(0.95), accuracy_before=0.25,
        accuracy_after=0.75,
    )  # fmt: skip


def test_a_run_that_timed_no_idle_engines_has_a_gap() -> None:
    run = made("x", settings(1))
    series = {key: values for key, values in run.series.items() if key != "time/wait_engines"}
    assert math.isnan(measure(Run(**{**vars(run), "series": series})).wait_generators)


AXES = {"engines": [1, 2, 4], "batch_size": [16, 32, 64], "seed": [0, 1]}


def grid(rate: Any, axes: dict[str, list[int]] = AXES) -> tuple[list[Done], tuple[str, ...]]:
    """A run for every place of the grid, of rate(engines, batch, seed) tokens a second."""
    spec = parse({"recipe": "arithmetic", "axes": axes}, Path("s.toml"))
    done = []
    for plan in spec.runs:
        cfg = plan.config
        tokens = 2.0 * rate(cfg.rollout.engines, cfg.buffer.batch_size, cfg.seed)
        config = settings(cfg.rollout.engines, cfg.buffer.batch_size, cfg.rollout.max_staleness, cfg.seed)
        done.append(Done(plan, made(plan.name, config, **{"buffer.tokens": [tokens] * STEPS}), "done"))
    return done, spec.axes


def test_points_are_the_grid_but_for_the_seed() -> None:
    done, axes = grid(lambda e, b, s: 100.0 + 10 * s)
    found = points(done, axes)
    assert len(found) == 9 and all(len(p.runs) == 2 for p in found)
    assert found[1].label == "engines=1, batch_size=32"
    assert mean_and_spread([f.tokens for f in found[0].figures]) == pytest.approx((105.0, 50**0.5))
    done[0] = Done(done[0].plan, None, "failed")
    assert len(points(done, axes)[0].runs) == 1


def test_strong_scaling_varies_the_generators_alone() -> None:
    done, axes = grid(lambda e, b, s: 100.0 * e**0.5 * b / 16)
    lines = scaling(points(done, axes), "strong")
    assert [(line.label, line.engines) for line in lines] == [(f"batch_size={b}", (1, 2, 4)) for b in (16, 32, 64)]
    assert lines[0].tokens == pytest.approx((100.0, 100 * 2**0.5, 200.0)) and lines[0].spread == (0.0, 0.0, 0.0)
    assert lines[0].ideal == pytest.approx((100.0, 200.0, 400.0)) and lines[1].efficiency == pytest.approx((1.0, 2**-0.5, 0.5))


def test_weak_scaling_keeps_the_batch_of_a_generator() -> None:
    done, axes = grid(lambda e, b, s: 100.0 * e * (1.0 if e == 1 else 0.9))
    lines = {line.label: line for line in scaling(points(done, axes), "weak")}
    assert {label: line.engines for label, line in lines.items()} == {
        "16 groups a generator": (1, 2, 4), "32 groups a generator": (1, 2), "8 groups a generator": (2, 4),
    }  # fmt: skip
    assert lines["16 groups a generator"].efficiency == pytest.approx((1.0, 0.9, 0.9))


def test_what_the_grid_cannot_show_is_said() -> None:
    done, axes = grid(lambda e, b, s: 100.0, {"engines": [1, 2]})
    found = points(done, axes)
    assert len(absent(found)) == 1 and absent(found)[0].startswith("weak scaling is not in this grid")
    assert [heading for heading, _, _ in figures(found)] == [
        "Tokens a second", "Strong scaling: more generators, the same batch", "Share of waiting, by stage", "Reward",
    ]  # fmt: skip
    assert not absent(points(*grid(lambda e, b, s: 100.0)))
    one, one_axes = grid(lambda e, b, s: 100.0, {"seed": [0, 1]})
    assert len(absent(points(one, one_axes))) == 2 and points(one, one_axes)[0].label == "all"


def test_the_plots_have_a_line_and_its_ideal_and_bars_over_seeds() -> None:
    found = points(*grid(lambda e, b, s: 100.0 * e + s))
    by_heading = {heading: figure.to_dict() for heading, _, figure in figures(found)}
    strong = by_heading["Strong scaling: more generators, the same batch"]["data"]
    first, ideal = strong[0], strong[1]
    assert list(first["x"]) == [1, 2, 4] and list(first["y"]) == pytest.approx([100.5, 200.5, 400.5])
    assert first["error_y"]["array"][0] == pytest.approx(0.5**0.5)
    assert list(ideal["y"]) == pytest.approx([100.5, 201, 402]) and ideal["line"]["dash"] == "dash"
    waits = by_heading["Share of waiting, by stage"]["data"]
    assert [trace["name"] for trace in waits] == ["generators", "verifiers", "learner", "weights"] and len(waits[0]["y"]) == 9
    assert sum(trace.get("fill") == "toself" for trace in by_heading["Reward"]["data"]) == 3 * 9


def test_rewards_along_steps_seconds_and_tokens() -> None:
    run = made("x", settings(1))
    assert along(run, "steps")[-1] == 11.0
    assert along(run, "seconds")[:2] == [3.0, 5.0] and along(run, "tokens")[:2] == [99.0, 3099.0]


def test_a_band_is_over_seeds_where_all_of_them_have_been() -> None:
    done, axes = grid(lambda e, b, s: 100.0 * (1 + s), {"seed": [0, 1]})
    (point,) = points(done, axes)
    steps, tokens = reward_band(point, "steps", 1), reward_band(point, "tokens", 1)
    assert steps is not None and tokens is not None
    assert steps.x == [float(s) for s in range(1, 12)] and steps.low == steps.high == pytest.approx([0.1 * i for i in range(11)])
    assert (tokens.x[0], tokens.x[-1]) == (400.0, 2200.0), "from where the later begins to where the earlier ends"
    assert (tokens.low[-1], tokens.high[-1]) == pytest.approx((0.45, 1.0)), "the faster has been there earlier in its steps"
    assert tokens.mean[-1] == pytest.approx(0.725)


def test_the_table_has_a_row_per_point() -> None:
    head, rows = table(points(*grid(lambda e, b, s: 1000.0 * e + s, {"engines": [1, 2], "seed": [0, 1]})))
    assert head[:4] == ["engines", "runs", "tokens/s", "per generator"] and len(rows) == 2
    assert rows[1][:4] == ["2", "2", "2,000 ± 1", "1,000 ± 0"]
    assert rows[0][head.index("learner waits")] == "60% ± 0"
    lines = markdown(head, rows).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    single = table(points(*grid(lambda e, b, s: 1000.0, {"engines": [1]})))
    assert "runs" not in single[0] and single[1][0][1] == "1,000"


def test_the_file_of_runs_has_a_line_for_each_with_what_became_of_it() -> None:
    done, axes = grid(lambda e, b, s: 100.0, {"engines": [1, 2]})
    done[1] = Done(done[1].plan, None, "failed")
    rows = list(csv.DictReader(io.StringIO(comma_separated(done, axes))))
    assert [(row["engines"], row["state"], row["steps"]) for row in rows] == [("1", "done", "11"), ("2", "failed", "0")]
    assert float(rows[0]["tokens"]) == pytest.approx(100.0) and rows[1]["tokens"] == ""
