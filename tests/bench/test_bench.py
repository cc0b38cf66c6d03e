"""The framework of the benchmarks: how figures become rows, and that one benchmark's failure is a row. What the benchmarks measure is not
tested here, nor how long they take."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest

from tests.bench import __main__ as runner
from tests.bench.measure import interleave
from tests.bench.registry import BENCHMARKS, Benchmark
from tests.bench.rows import Row, compare, table, to_json

KEYS = {"name", "unit", "ours", "peer", "ratio", "limit", "share_of_limit", "spread"}


def test_a_rate_is_compared_pair_by_pair() -> None:
    row = compare("x", "tokens/s", [10.0, 30.0, 20.0], [10.0, 10.0, 10.0], limit=40.0, least_ratio=2.0, least_share=0.6)
    assert (row.ours, row.peer, row.ratio, row.limit, row.share_of_limit, row.spread) == (20.0, 10.0, 2.0, 40.0, 0.5, 1.0)
    assert row.met is False and row.bar == "ratio ≥ 2.0, share ≥ 0.6"


def test_a_time_is_better_when_it_is_smaller() -> None:
    row = compare("x", "s", [1.0, 2.0], [4.0, 4.0], limit=0.75, higher_is_better=False, least_ratio=2.0)
    assert row.ratio == 3.0 and row.share_of_limit == 0.5 and row.met is True


def test_a_bar_for_the_figure_itself_and_none() -> None:
    assert compare("x", "GB", 0.31, most=0.3).met is False
    plain = compare("x", "GB", 0.31)
    assert (plain.met, plain.bar, plain.ratio, plain.spread) == (None, "", None, None)


def test_pairs_are_taken_in_the_order_abba() -> None:
    order: list[str] = []
    interleave(lambda: order.append("a") or 1.0, lambda: order.append("b") or 1.0, pairs=4, warm=False)
    assert "".join(order) == "abbaabba"


def test_json_has_the_keys_and_no_number_that_json_lacks() -> None:
    (row,) = to_json([compare("x", "s", 1.0, 0.0)])
    assert set(row) >= KEYS and row["ratio"] is None
    assert "inf" not in json.dumps(row)


def test_the_table_marks_what_is_missed() -> None:
    text = table([compare("a/b", "GB", 0.5, most=0.3, note="of the peak"), compare("c", "1/s", 12345.6, 2.0)])
    assert "≤ 0.3 GB: NO" in text and "12,346" in text and "a/b: of the peak" in text


def test_every_benchmark_is_a_module() -> None:
    assert len({b.name for b in BENCHMARKS}) == len(BENCHMARKS)
    assert all(importlib.util.find_spec(b.module) for b in BENCHMARKS)


@pytest.mark.parametrize(("source", "reason"), [("raise SystemExit(1)", "exit status 1"), ("import time; time.sleep(60)", "not done")])
def test_a_benchmark_that_fails_or_hangs_is_a_row(tmp_path, monkeypatch, source, reason) -> None:
    (tmp_path / "tests" / "bench").mkdir(parents=True)
    (tmp_path / "tests" / "bench" / "one.py").write_text(source)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    (row,) = runner.measure(Benchmark("x", "x", "", threads=1, timeout=1.0), {0})
    assert math.isnan(row.ours) and row.met is False and reason in row.note


def test_the_runner_prints_and_writes(tmp_path, monkeypatch, capsys) -> None:
    rows = {"machine": [Row("machine", "s", 1.0, met=True)], "verifiers": [Row("verifiers", "s", 2.0, met=False)]}
    monkeypatch.setattr(runner, "measure", lambda benchmark, cores: rows[benchmark.name])
    assert runner.main(["--only", "machine", "--out", str(tmp_path / "one.json")]) == 0
    assert runner.main(["--only", "machine,verifiers", "--out", str(tmp_path / "both.json")]) == 1
    assert [row["name"] for row in json.loads((tmp_path / "both.json").read_text())] == ["machine", "verifiers"]
    assert runner.main(["--only", "nothing"]) == 2
    assert "ONLY=nothing is not a benchmark" in capsys.readouterr().err
