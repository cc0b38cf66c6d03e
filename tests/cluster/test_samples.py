"""What is kept of a run's answers: a group as a line, the weights of its tokens in the loss, the histogram of lengths.

Does not cover the tokens that the mismatch correction takes out of the loss: the learner alone knows them.
"""

from __future__ import annotations

import numpy as np
import pytest

from cluster.samples import TOKENS_KEPT, batch_weights, length_row, sample_row
from learner.config import ObjectiveConfig
from rollout.records import Completion, Group, Prompt, Span
from verifier.records import GroupSummary, ScoredGroup, Verdict, summarise


def scored(uid: int, lengths: list[int], rewards: list[float], cut: tuple[int, ...] = ()) -> ScoredGroup:
    prompt = Prompt(uid, np.array([1, 2], np.int32), "1+2=", "3", "numeric", "addition", "12", epoch=0)
    completions = tuple(
        Completion(np.arange(n, dtype=np.int32), np.zeros(n, np.float32), "length" if i in cut else "stop", (Span(0, n, 4),), "x" * n)
        for i, n in enumerate(lengths)
    )
    verdicts = tuple(Verdict("error", None) if r != r else Verdict("value", r) for r in rewards)
    return ScoredGroup(Group(prompt, 1, completions, 0, 0.1), verdicts, np.array(rewards), np.array([rewards]), ("numeric",))


def summaries(*groups: ScoredGroup) -> list[GroupSummary]:
    return [summarise(group) for group in groups]


def test_a_sample_has_prompt_answers_verdicts_and_advantages() -> None:
    prompt = Prompt(5, np.array([1, 2], np.int32), "1+2=", "3", "numeric", "addition", "12", epoch=0)
    made = [
        Completion(np.array([7, 1], np.int32), np.zeros(2, np.float32), "stop", (Span(0, 2, 4),), "3"),
        Completion(np.array([8], np.int32), np.zeros(1, np.float32), "length", (Span(0, 1, 5),), "ü"),
    ]
    verdicts = (Verdict("value", 1.0, "equal", rewards={"numeric": 1.0}), Verdict("error", None, "broke"))
    group = ScoredGroup(Group(prompt, 1, tuple(made), 0, 0.1), verdicts, np.array([1.0, np.nan]), np.array([[1.0, np.nan]]), ("numeric",))
    row = sample_row(group, np.array([0.5, 0.0]), weights_G=[0.25, 0.0])
    assert {k: v for k, v in row.items() if k != "answers"} == {
        "uid": 5, "source": "addition", "row": "12", "outcome": "trained", "versions": [4, 5], "prompt": "1+2=", "gold": "3",
    }  # fmt: skip
    keys = ("text", "tokens", "finish", "reward", "status", "detail", "rewards", "advantage", "weight", "ids")
    assert [tuple(answer) for answer in row["answers"]] == [keys, keys]
    assert [tuple(answer.values()) for answer in row["answers"]] == [
        ("3", 2, "stop", 1.0, "value", "equal", {"numeric": 1.0}, 0.5, 0.25, [7, 1]),
        ("ü", 1, "length", None, "error", "broke", {}, 0.0, 0.0, [8]),
    ]
    bare = sample_row(group, None, "uninformative")["answers"]
    assert [(a["advantage"], a["weight"]) for a in bare] == [(None, None)] * 2


def test_a_very_long_answer_keeps_its_text_and_its_first_tokens() -> None:
    (answer,) = sample_row(scored(0, [TOKENS_KEPT + 5], [1.0]))["answers"]
    assert (answer["tokens"], len(answer["text"]), answer["ids"][-1]) == (TOKENS_KEPT + 5, TOKENS_KEPT + 5, TOKENS_KEPT - 1)


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        ("token-mean", [1 / 16, 1 / 16], [1 / 16, 1 / 16]),
        ("seq-mean-token-mean", [1 / (4 * 2), 1 / (4 * 6)], [1 / (4 * 4), 1 / (4 * 4)]),
        ("seq-mean-token-sum-norm", [1 / 40, 1 / 40], [1 / 40, 1 / 40]),
        ("prompt-mean", [1 / 16, 1 / 16], [1 / 16, 1 / 16]),
    ],
)
def test_weights_are_those_of_the_optimiser_step(mode: str, first: list[float], second: list[float]) -> None:
    batch = summaries(scored(3, [2, 6], [1.0, 0.0]), scored(9, [4, 4], [0.0, 1.0]))
    found = batch_weights(batch, 0, ObjectiveConfig(loss_agg=mode), 10, 1)
    assert found[3].tolist() == pytest.approx(first) and found[9].tolist() == pytest.approx(second)


def test_each_mini_batch_has_a_mean_of_its_own_and_a_filler_its_place_in_one() -> None:
    batch = summaries(scored(3, [2, 6], [1.0, 0.0]), scored(9, [1, 4], [0.0, 1.0]), scored(11, [5, 5], [0.0, 1.0]))
    found = batch_weights(batch, 1, ObjectiveConfig(), 10, 2)
    assert {uid: w.tolist() for uid, w in found.items() if uid >= 0} == {3: [1 / 13] * 2, 9: [1 / 13] * 2, 11: [0.1] * 2}
    assert found[-1].tolist() == [0.0, 0.0]


def test_an_answer_out_of_the_loss_has_no_weight_and_counts_nowhere() -> None:
    batch = summaries(scored(3, [2, 6, 10, 4], [1.0, 0.0, 0.0, float("nan")], cut=(2,)))
    assert batch_weights(batch, 0, ObjectiveConfig(overlong="mask"), 10, 1)[3].tolist() == [1 / 8, 1 / 8, 0.0, 0.0]
    assert batch_weights(batch, 0, ObjectiveConfig(), 10, 1)[3].tolist() == [1 / 18, 1 / 18, 1 / 18, 0.0]


def test_lengths_are_counted_by_bin_right_ones_apart() -> None:
    batch = summaries(scored(0, [1, 2, 2, 10], [1.0, 0.0, 1.0, 0.5]), scored(1, [0, 3, 3, 3], [float("nan"), 1.0, 1.0, 0.0]))
    assert length_row(batch, 10) == {"width": 1, "right": {"1": 1, "2": 1, "3": 2}, "other": {"2": 1, "3": 1, "10": 1}}
    assert length_row(summaries(scored(0, [127, 128, 255], [1.0, 1.0, 1.0])), 255)["right"] == {"31": 1, "32": 1, "63": 1}, "bins of 4"
    assert length_row(summaries(scored(0, [256], [1.0])), 256) == {"width": 5, "right": {"51": 1}, "other": {}}
