"""The table of metrics: names, rows, and the way from typed records to them.

Does not cover: whether the numbers in the records are right (tests of the buffer, the ledger and the learner do).
"""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from cluster import metrics
from learner.buffer_records import StepSummary
from learner.diagnostics import ObjectiveStats, ObjectiveSums, finalise
from learner.ledger import BatchTokens, Ledger
from learner.records import Mismatch, OptimiserStep, StepStats

ROOT = Path(__file__).parents[2]
NAN = float("nan")


def summary(**changes: object) -> StepSummary:
    values: dict[str, object] = {}
    for field in fields(StepSummary):
        values[field.name] = {} if "Mapping" in str(field.type) else () if "tuple" in str(field.type) else 0 if field.type == "int" else NAN
    return StepSummary(**{**values, **changes})  # type: ignore[arg-type]


def optimiser_step(**changes: object) -> OptimiserStep:
    values = {"loss": 0.5, "grad_norm": 1.0, "lr": 1e-4, "tokens": 10, "answers": 2, "micro_batches": 1}
    return OptimiserStep(**{**values, **changes})  # type: ignore[arg-type]


def step_stats(steps: tuple[OptimiserStep, ...], **changes: object) -> StepStats:
    values: dict[str, object] = {
        "index": 3, "steps": steps, "mismatch": Mismatch(tokens=20, mean_abs=1e-5, max_abs=2e-4, kl=3e-6), "advantages": {7: np.zeros(2)},
        "tokens": 20, "groups": 4, "nonfinite": 0, "nonfinite_in_a_row": 0, "empty": 0, "failed": (), "masked_tokens": {"overlong": 5},
        "seconds": {"total": 2.0, "forward_backward": 1.5}, "stats": {},
    }  # fmt: skip
    return StepStats(**{**values, **changes})  # type: ignore[arg-type]


def test_the_four_seed_names_stand_alone_at_the_top_and_all_others_have_a_prefix() -> None:
    assert tuple(m.name for m in metrics.TABLE if "/" not in m.name) == ("reward", "informative", "resp_len", "clipfrac")
    assert metrics.HEADLINE == ("reward", "informative", "resp_len", "clipfrac")


def test_no_field_and_no_name_has_two_rows_and_every_row_says_something() -> None:
    assert len({m.field for m in metrics.TABLE}) == len(metrics.TABLE)
    assert len({m.name for m in metrics.TABLE}) == len(metrics.TABLE)
    for m in metrics.TABLE:
        assert m.meaning and m.unit and m.reduction in metrics.Reduction.__args__, m  # type: ignore[attr-defined]
        assert m.field.endswith(".*") == m.name.endswith("/*"), m
        assert re.fullmatch(r"[a-z0-9_/]+(/\*)?", m.name), m


def test_a_fixed_name_cannot_be_taken_by_a_wildcard_of_another_row() -> None:
    fixed = [m.name for m in metrics.TABLE if "*" not in m.name]
    stars = [m.name[:-1] for m in metrics.TABLE if "*" in m.name]
    assert not [(n, s) for n in fixed for s in stars if n.startswith(s)]
    fields_ = [m.field for m in metrics.TABLE if not m.field.endswith(".*")]
    star_fields = [m.field[:-1] for m in metrics.TABLE if m.field.endswith(".*")]
    assert not [(f, s) for f in fields_ for s in star_fields if f.startswith(s)]


def test_logged_names_what_it_is_given_in_the_tables_order() -> None:
    record = {"train.lr": 0.1, "buffer.reward": 0.25, "buffer.rewards.format": 1.0, "buffer.kept": 3}
    assert list(metrics.logged(record).items()) == [("reward", 0.25), ("reward/format", 1.0), ("buffer/kept", 3), ("train/lr", 0.1)]


def test_a_field_without_a_row_is_refused_by_name() -> None:
    with pytest.raises(AssertionError, match="train.cleverness"):
        metrics.logged({"buffer.reward": 0.5, "train.cleverness": 1.0})


def test_nothing_measured_is_left_out_and_infinity_is_not() -> None:
    record = {"buffer.resp_len_right": NAN, "train.kl_ref": None, "train.grad_norm": math.inf}
    assert metrics.logged(record) == {"train/grad_norm": math.inf}


def test_counts_stay_whole_numbers_and_numpy_becomes_plain() -> None:
    values = metrics.logged({"buffer.kept": np.int64(3), "buffer.reward": np.float32(0.5)})
    assert values == {"buffer/kept": 3, "reward": 0.5} and [type(v) for v in values.values()] == [float, int]


def test_every_number_of_the_buffers_summary_has_a_row() -> None:
    values = {f.name: ({"a": 1} if "Mapping" in str(f.type) else 1) for f in fields(StepSummary)}
    values |= {"staleness": {0: 3, 1: 1}, "resp_len_right": 5.0}
    del values["results"]  # of single prompts
    logged = metrics.logged(metrics.buffer_record(StepSummary(**values, results=())))  # type: ignore[arg-type]
    assert len(logged) == len(values) + 3  # staleness has two bins, a mean and a maximum
    assert (logged["staleness/groups/0"], logged["staleness/groups/1"]) == (3, 1)
    assert (logged["staleness/mean"], logged["staleness/max"]) == (0.25, 1)
    assert logged["resp_len/right"] == 5.0 and logged["source/reward/a"] == 1


def test_an_empty_summary_logs_counts_alone() -> None:
    logged = metrics.logged(metrics.buffer_record(summary(kept=2)))
    assert logged["buffer/kept"] == 2 and "reward" not in logged and "staleness/max" not in logged


def test_optimiser_steps_reduce_as_the_table_says() -> None:
    steps = (
        optimiser_step(loss=0.2, grad_norm=1.0, lr=1e-4),
        optimiser_step(loss=NAN, grad_norm=math.inf, lr=2e-4, skipped="nonfinite"),
        optimiser_step(loss=0.4, grad_norm=3.0, lr=3e-4, micro_batches=2),
        optimiser_step(loss=0.0, grad_norm=0.0, lr=4e-4, micro_batches=0, skipped="empty"),
    )
    stats = {"policy_loss": 0.6, "kl_loss": 0.0, "entropy_loss": 0.0, "clipfrac": 0.125, "kl_ref": None, "loss": 0.6, "tokens": 20}
    logged = metrics.logged(metrics.train_record(step_stats(steps, stats=stats, nonfinite=1, empty=1, failed=(7, 9))))
    assert logged["train/loss"] == pytest.approx(0.3) and logged["train/policy_loss"] == pytest.approx(0.3)
    assert (logged["train/grad_norm"], logged["train/grad_norm_max"], logged["train/lr"]) == (2.0, 3.0, 4e-4)
    assert (logged["train/optimiser_steps"], logged["train/micro_batches"], logged["train/groups_failed"]) == (4, 4, 2)
    assert (logged["train/nonfinite"], logged["train/empty"], logged["clipfrac"]) == (1, 1, 0.125)
    assert (logged["tokens/trained"], logged["tokens/masked/overlong"]) == (20, 5)
    assert (logged["mismatch/mean"], logged["mismatch/max"], logged["time/train_total"]) == (1e-5, 2e-4, 2.0)
    assert "train/kl_ref" not in logged


def test_a_batch_without_a_step_taken_logs_no_loss() -> None:
    logged = metrics.logged(metrics.train_record(step_stats((optimiser_step(loss=NAN, skipped="nonfinite"),), mismatch=Mismatch())))
    assert not {"train/loss", "train/grad_norm", "mismatch/mean"} & set(logged)


def test_every_statistic_of_the_objective_has_a_row_or_is_told_elsewhere() -> None:
    stats = {f.name: 1.0 for f in fields(ObjectiveStats)}
    logged = metrics.logged(metrics.train_record(step_stats((optimiser_step(),), stats=stats)))
    for key, said in {"clipfrac_low": "clip/low", "ratio_max": "ratio/max", "entropy": "train/entropy", "kl_old": "train/kl_old"}.items():
        assert stats[key] == logged[said]
    empty = finalise(ObjectiveSums.zeros())
    assert set(vars(empty)) == set(stats)


def test_what_a_critic_measures_has_rows_and_reduces_over_the_steps_taken() -> None:
    each = [{"loss": x, "grad_norm": 2 * x, "lr": x, "clipfrac": 0.0, "nll": n, "nll_share": 0.5} for x, n in ((0.25, None), (0.75, 2.0))]
    steps = (
        optimiser_step(skipped="frozen", critic=each[0]),
        optimiser_step(critic=each[1]),
        optimiser_step(skipped="nonfinite", critic={"loss": NAN}),
        optimiser_step(skipped="empty"),
    )
    names = ["value_mean", "return_mean", "return_std", "explained_variance", "lambda", "frozen"]
    seen = {name: 0.125 for name in (*names, *(f"advantage_{end}" for end in ("mean", "std", "min", "max")))}
    logged = metrics.logged(metrics.train_record(step_stats(steps, critic=seen | {"explained_variance": None})))
    assert (logged["critic/loss"], logged["critic/grad_norm"], logged["critic/lr"], logged["nll/loss"]) == (0.5, 1.0, 0.75, 2.0)
    assert (logged["nll/share"], logged["advantage/lambda"], logged["critic/frozen"]) == (0.5, 0.125, 0.125)
    assert "critic/explained_variance" not in logged and logged["advantage/max"] == 0.125


def test_the_books_are_logged_whole() -> None:
    ledger = Ledger()
    for uid in range(4):
        ledger.open(uid)
        ledger.move(uid, "generating")
        ledger.move(uid, "verifying")
    ledger.keep(0, 10)
    ledger.keep(1, 20)
    ledger.close(2, "uninformative", "all_right", 5)
    ledger.book("lost_attempt", 3)
    ledger.commit({0: ""}, [], BatchTokens(trained=6, overlong=4))
    logged = metrics.logged(metrics.ledger_record(ledger))
    groups = ("trained", "uninformative", "failed", "surplus", "kept", "in_flight")
    assert [logged[f"ledger/groups_{g}"] for g in groups] == [1, 1, 0, 0, 1, 1]
    assert logged["ledger/groups_dispatched"] == sum(logged[f"ledger/groups_{g}"] for g in groups)
    accounts = {k: v for k, v in logged.items() if k.startswith("ledger/tokens_") and k != "ledger/tokens_received"}
    assert accounts == {
        "ledger/tokens_trained": 6, "ledger/tokens_masked_overlong": 4, "ledger/tokens_uninformative": 5,
        "ledger/tokens_lost_attempt": 3, "ledger/tokens_held": 20,
    }  # fmt: skip
    assert logged["ledger/tokens_received"] == sum(accounts.values()) == 38


def test_docs_metrics_md_is_the_table_as_it_is() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics.document(), "run: python -m cluster.metrics > docs/metrics.md"
    assert metrics.document().count("\n| `") == len(metrics.TABLE)
