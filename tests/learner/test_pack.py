"""Packing: every answer once, within budget, the same number of micro-batches on every rank, and arrays that say what they must.

Not covered: that a model keeps packed sequences apart (test_model.py), and how fast a width is.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.pack import DEFAULT_ROW, Answer, Groups, PackSettings, build_micro, plan_step
from rollout.records import Completion, Prompt, Span

ANSWERS = st.lists(st.integers(1, 40), min_size=1, max_size=6)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 200), st.integers(0, 90), st.booleans())
def test_any_plan_is_complete_within_budget_and_even(lengths: list[int], ranks: int, micro: int, row: int, single: bool) -> None:
    wanted = PackSettings(micro, row, single, hidden=16)
    ids = [i for i in range(len(lengths)) if i % 5 != 3]
    plan = plan_step(lengths, ids, ranks=ranks, settings=wanted)
    assert sorted(a for r in range(ranks) for a in plan.answers_of(r)) == ids
    assert len({len(m) for m in plan.micro}) == 1
    longest = max(lengths[i] for i in ids)
    for rows in (m for rank in plan.micro for m in rank):
        assert all(sum(lengths[a] for a in r) <= plan.width for r in rows)
        assert len(rows) * plan.width <= max(micro, longest) or len(rows) == 1
        assert not single or len(rows) <= 1
    assert plan == plan_step(lengths, ids[::-1], ranks=ranks, settings=wanted)


def test_ranks_get_nearly_equal_work() -> None:
    lengths = np.random.default_rng(0).integers(50, 500, 256)
    plan = plan_step(lengths, np.arange(256), ranks=4, settings=PackSettings(8192))
    work = [sum(lengths[a] for a in plan.answers_of(r)) for r in range(4)]
    assert max(work) - min(work) < 0.01 * max(work)


def test_long_answers_weigh_more_than_their_tokens() -> None:
    # One answer of 400 against eight of 50: by tokens even, but attention makes the long one dearer at this width.
    lengths = [400] + [50] * 8
    shares = [plan_step(lengths, range(9), ranks=2, settings=PackSettings(8192, hidden=h)).answers_of(0) for h in (10**9, 4)]
    assert shares == [[0], [0]]
    uneven = [400] + [50] * 10
    by_tokens, by_cost = (plan_step(uneven, range(11), ranks=2, settings=PackSettings(8192, hidden=h)).answers_of(0) for h in (10**9, 4))
    assert len(by_tokens) == 2 and by_cost == [0]


def test_rows_are_filled_well() -> None:
    lengths = np.random.default_rng(1).integers(14, 26, 256)
    plan = plan_step(lengths, np.arange(256), ranks=1, settings=PackSettings(8192))
    rows = [row for micro in plan.micro[0] for row in micro]
    assert plan.width == DEFAULT_ROW and lengths.sum() / (len(rows) * plan.width) > 0.93


def test_a_rank_without_rows_gets_dummies_and_no_answers_no_micro_batches() -> None:
    plan = plan_step([5, 9], [1], ranks=3, settings=PackSettings(64))
    assert plan.micro == ((((1,),),), ((),), ((),))
    assert plan_step([5, 9], [], ranks=2, settings=PackSettings(64)).micro == ((), ())
    dummy = build_micro((), {})
    assert dummy.ids_K.tolist() == [-1] and dummy.mask_N.tolist() == [False] and dummy.input_RW.shape == (1, 2)


def test_arrays_of_two_rows() -> None:
    answers = {
        4: Answer.example(np.array([10, 11]), np.array([12, 13, 14])),
        7: Answer.example(np.array([20]), np.array([21])),
        9: Answer.example(np.array([30, 31, 32]), np.array([33])),
    }
    micro = build_micro([[4, 7], [9]], answers)
    assert micro.input_RW.tolist() == [[10, 11, 12, 13, 20], [30, 31, 32, 0, 0]]
    assert micro.position_RW.tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]
    assert micro.flat_N.tolist() == [1, 2, 3, 4, 7]
    assert micro.target_N.tolist() == [12, 13, 14, 21, 33]
    assert micro.answer_N.tolist() == [0, 0, 0, 1, 2] and micro.ids_K.tolist() == [4, 7, 9]
    assert micro.mask_N.all() and micro.behav_N.dtype == np.float32


def test_tokens_that_the_policy_did_not_write_are_read_and_never_predicted() -> None:
    spans = (Span(0, 2, 3), Span(2, 4, 3, by_policy=False), Span(4, 5, 4))
    done = Completion(np.array([5, 6, 7, 8, 9], dtype=np.int32), np.array([-1, -2, 0, 0, -5], dtype=np.float32), "stop", spans, "")
    answer = Answer.of(Prompt(0, np.array([2, 3], dtype=np.int32), "", "", "", "", ""), done)
    micro = build_micro([[0]], {0: answer})
    assert micro.input_RW.tolist() == [[2, 3, 5, 6, 7, 8]]
    assert micro.target_N.tolist() == [5, 6, 9] and micro.flat_N.tolist() == [1, 2, 5]
    assert micro.behav_N.tolist() == [-1, -2, -5]


def test_a_sequence_without_prompt_is_refused(making: ModuleType) -> None:
    with pytest.raises(AssertionError, match="needs a prompt"):
        build_micro([[0]], {0: Answer.example(np.array([], dtype=np.int64), np.array([3]))})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), ANSWERS), min_size=1, max_size=8), st.integers(1, 3), st.integers(1, 150))
def test_a_shared_plan_is_complete_and_within_budget(shape: list[tuple[int, list[int]]], ranks: int, micro: int) -> None:
    flat = [(g, p, t) for g, (p, sizes) in enumerate(shape) for t in sizes]
    rng = np.random.default_rng(0)
    prompts = {g: rng.integers(2, 9, p) for g, (p, _) in enumerate(shape)}
    answers = {i: Answer(prompts[g], rng.integers(2, 9, t), np.zeros(t, np.float32), np.arange(t), g) for i, (g, _, t) in enumerate(flat)}
    sizes, ids = [answers[i].size for i in answers], list(answers)
    groups = Groups([g for g, _, _ in flat], [p for _, p, _ in flat])
    plan = plan_step(sizes, ids, ranks=ranks, settings=PackSettings(micro, single_row=True, share=True, hidden=16), groups=groups)
    assert sorted(a for r in range(ranks) for a in plan.answers_of(r)) == ids
    for rows in (m for rank in plan.micro for m in rank):
        made = build_micro(rows, answers, share=True)
        assert made.input_RW.size <= max(micro, max(sizes), 2)
        assert made.segments_S3[0, 0] == 0 and made.segments_S3[-1, 1] == made.input_RW.size
        assert (made.segments_S3[1:, 0] == made.segments_S3[:-1, 1]).all()


def test_arrays_of_a_shared_prompt() -> None:
    def answer(prompt: list[int], tokens: list[int], group: int) -> Answer:
        return Answer(np.array(prompt), np.array(tokens), np.zeros(len(tokens), np.float32), np.arange(len(tokens)), group)

    answers = {3: answer([10, 11], [12, 13, 14], 0), 5: answer([20], [21], 1), 8: answer([10, 11], [15], 0)}
    answers[9] = answer([10, 11], [16, 17], 0)
    micro = build_micro([[3, 5, 8, 9]], answers, share=True)
    assert micro.ids_K.tolist() == [3, 8, 9, 5]
    assert micro.input_RW.tolist() == [[10, 11, 12, 13, 16, 20]]
    assert micro.position_RW.tolist() == [[0, 1, 2, 3, 2, 0]]
    assert micro.flat_N.tolist() == [1, 2, 3, 1, 1, 4, 5]
    assert micro.target_N.tolist() == [12, 13, 14, 15, 16, 17, 21]
    assert micro.segments_S3.tolist() == [[0, 2, -1], [2, 4, 0], [4, 4, 0], [4, 5, 0], [5, 6, -1], [6, 6, 4]]


def test_sharing_saves_the_prompts() -> None:
    lengths, groups = [100 + 50] * 16, Groups(np.repeat([0, 1], 8), [100] * 16)
    one = plan_step(lengths, range(16), ranks=1, settings=PackSettings(500, single_row=True, share=True), groups=groups)
    assert len(one.micro[0]) == 2 and all(len(row) == 8 for micro in one.micro[0] for row in micro)
    two = plan_step(lengths, range(16), ranks=4, settings=PackSettings(8192, single_row=True, share=True), groups=groups)
    assert {len(two.answers_of(r)) for r in range(4)} == {4}  # a group is cut where ranks would stand idle
