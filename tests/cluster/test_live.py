"""Live gauges: one per row of the table, set once a step by its logged name.

Does not cover Ray's export of them, for which a cluster is needed.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from cluster.live import Live, gauge_name
from cluster.metrics import TABLE, logged, row


class Gauge:
    """Notes what it is told."""

    made: list[Gauge] = []

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self.description, self.tag_keys = name, description, tag_keys
        self.values: dict[tuple[str, ...], float] = {}
        Gauge.made.append(self)

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys)
        self.values[tuple(tags[key] for key in self.tag_keys)] = value


@pytest.fixture
def live() -> Live:
    Gauge.made = []
    return Live("r1", Gauge)


def values() -> dict[str, Any]:
    return {gauge.name: gauge.values for gauge in Gauge.made}


def test_every_row_has_a_gauge_of_its_own_that_prometheus_accepts() -> None:
    names = [gauge_name(metric) for metric in TABLE]
    assert len(set(names)) == len(TABLE) and not [n for n in names if not re.fullmatch(r"winnow_[a-zA-Z0-9_]+", n)]
    assert [gauge_name(row(f)) for f in ("buffer.reward", "train.mismatch.kl", "buffer.rewards.x")] == [
        "winnow_reward", "winnow_mismatch_kl", "winnow_reward_each",
    ]  # fmt: skip


def test_a_step_sets_its_numbers_and_a_star_becomes_a_label(live: Live) -> None:
    live.set(logged({"buffer.reward": 0.25, "buffer.rewards.format": 1.0, "buffer.staleness.0": 30, "buffer.staleness.1": 2}))
    assert values()["winnow_reward"] == {("r1",): 0.25}
    assert values()["winnow_reward_each"] == {("r1", "format"): 1.0}
    assert values()["winnow_staleness_groups_each"] == {("r1", "0"): 30, ("r1", "1"): 2}
    (gauge,) = (g for g in Gauge.made if g.name == "winnow_reward")
    assert "reward of the answers" in gauge.description


def test_what_did_not_happen_is_0_and_what_was_not_measured_stays(live: Live) -> None:
    live.set(logged({"train.nonfinite": 2, "ledger.tokens_surplus": 7, "eval.greedy": 0.5}))
    live.set(logged({"buffer.reward": 0.5}))
    assert values()["winnow_train_nonfinite"] == {("r1",): 0}
    assert values()["winnow_ledger_tokens_surplus"] == {("r1",): 7}, "a total since the run began"
    assert values()["winnow_ledger_tokens_failed"] == {("r1",): 0}
    assert values()["winnow_eval_greedy"] == {("r1",): 0.5}
    assert "winnow_train_loss" not in values()


def test_before_the_first_step_what_is_counted_is_0(live: Live) -> None:
    live.begin(["train.nonfinite", "ledger.tokens_failed", "buffer.staleness.0", "train.entropy", "eval.greedy"])
    assert values()["winnow_train_nonfinite"] == values()["winnow_ledger_tokens_failed"] == {("r1",): 0}
    assert values()["winnow_staleness_groups_each"] == {("r1", "0"): 0}
    assert not {"winnow_train_entropy", "winnow_eval_greedy"} & values().keys()


def test_what_comes_between_two_steps_changes_nothing_else(live: Live) -> None:
    live.set(logged({"train.nonfinite": 2, "ledger.tokens_surplus": 7}))
    live.also(logged({"eval.greedy": 0.5}))
    assert values()["winnow_train_nonfinite"] == {("r1",): 2} and values()["winnow_eval_greedy"] == {("r1",): 0.5}


def test_what_was_set_is_set_again_until_the_end(live: Live) -> None:
    """Between two steps of minutes Ray would forget it."""
    live.begin(["train.nonfinite"], every=0.01)
    live.set(logged({"buffer.reward": 0.25, "train.nonfinite": 3}))
    for gauge in list(Gauge.made):
        gauge.values.clear()
    deadline = time.monotonic() + 10
    while values()["winnow_reward"] != {("r1",): 0.25} or values()["winnow_train_nonfinite"] != {("r1",): 3}:
        assert time.monotonic() < deadline, values()
        time.sleep(0.01)
    live.close()
    for gauge in list(Gauge.made):
        gauge.values.clear()
    time.sleep(0.05)
    assert not any(values().values())


def test_labels_are_ascii_which_is_all_that_ray_takes() -> None:
    Gauge.made = []
    Live("läuft", Gauge).set(logged({"buffer.rewards.größe": 1.0}))
    assert values()["winnow_reward_each"] == {("l?uft", "gr??e"): 1.0}
    assert all(gauge.description.isascii() for gauge in Gauge.made)


def test_gauges_that_break_end_with_a_line() -> None:
    notes: list[str] = []

    class Broken(Gauge):
        def set(self, value: float, tags: dict[str, str]) -> None:
            raise RuntimeError("no agent\nfar down")

    live = Live("r1", Broken, notes.append)
    for _ in range(3):
        live.set(logged({"buffer.reward": 0.5}))
    assert notes == ["live metrics are off from here on: RuntimeError: no agent"]


def test_a_name_without_a_row_is_refused(live: Live) -> None:
    with pytest.raises(AssertionError, match="cleverness"):
        live.set({"cleverness": 1.0})
