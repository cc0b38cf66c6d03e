"""Attention by segments against one dense mask in float64: values and gradients, with prefixes, grouped heads and padding in buckets.

Not covered: the kernel that a GPU uses (tests/gpu); that models pass the segments on is in test_model.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from learner.attention import Segments, attend, is_plain

HEADS, SIZE, SCALE = 4, 8, 0.3
CPU = torch.device("cpu")


def table_of(groups: list[tuple[int, list[int]]]) -> np.ndarray:
    """Segments of (prompt, own tokens of each answer); without answers a sequence of its own."""
    rows: list[tuple[int, int, int]] = []
    at = 0
    for prompt, answers in groups:
        head = len(rows)
        for i, size in enumerate([prompt, *answers]):
            rows.append((at, at + size, -1 if i == 0 else head))
            at += size
    return np.array(rows)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: np.ndarray) -> torch.Tensor:
    allowed = torch.zeros(q.shape[1], q.shape[1], dtype=torch.bool)
    for start, stop, prefix in table:
        allowed[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        if prefix >= 0:
            allowed[start:stop, table[prefix][0] : table[prefix][1]] = True
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    return (q @ k.transpose(1, 2) * SCALE).masked_fill(~allowed, -math.inf).softmax(-1) @ v


def compare(table: np.ndarray, dtype: torch.dtype, heads: int, tolerance: float) -> None:
    length = int(table[-1][1])
    rng = torch.Generator().manual_seed(length)
    shapes = [(HEADS, length, SIZE), (heads, length, SIZE), (heads, length, SIZE)]
    given = [torch.randn(*s, generator=rng, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in given]
    up = torch.randn(*shapes[0], generator=rng, dtype=torch.float64)
    got = attend(given[0], given[1], given[2], Segments.of(table, CPU), SCALE)
    want = dense(exact[0], exact[1], exact[2], table)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)
    grads = zip(torch.autograd.grad(got, given, up.to(dtype)), torch.autograd.grad(want, exact, up), strict=True)
    for mine, theirs in grads:
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=10 * tolerance)


GROUPS = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 13), max_size=5)), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(GROUPS, st.sampled_from([1, 2, HEADS]))
def test_any_layout_is_the_dense_mask(groups: list[tuple[int, list[int]]], heads: int) -> None:
    compare(table_of(groups), torch.float64, heads, 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
def test_narrow_dtypes_are_merged_in_float32(dtype: torch.dtype, tolerance: float) -> None:
    compare(table_of([(40, [70, 66, 3, 0, 1]), (7, []), (33, [50])]), dtype, 2, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
def test_narrow_dtypes_where_prompts_are_one_call(dtype: torch.dtype, tolerance: float) -> None:
    compare(table_of([(6, [5, 3]), (6, [9]), (6, [4, 2])]), dtype, 2, tolerance)


def test_answers_of_a_prompt_are_one_call_and_similar_lengths_one_bucket() -> None:
    found = Segments.of(table_of([(10, [5, 0, 5]), (10, []), (9, [1])]), CPU)
    runs = [(s.answers.start, s.answers.length, s.prompts.start, s.prompts.length) for s in found.prefixes]
    assert runs == [(39, 1, 30, 9), (10, 10, 0, 10)]
    assert sorted((b.count, b.length) for b in found.buckets) == [(1, 1), (2, 5), (3, 10)]
    padding = [b.count * b.length - len(b.real) for b in found.buckets if b.real is not None]
    assert sorted(padding) == [0, 1]


def test_prompts_of_one_length_are_one_call_but_for_answers_of_other_lengths() -> None:
    table = table_of([(6, [5, 3]), (6, [40]), (6, [9]), (7, [8])])
    found = Segments.of(table, CPU)
    calls = [(s.answers.count, s.answers.length, s.prompts.count, s.prompts.length) for s in found.prefixes]
    assert calls == [(1, 40, 1, 6), (2, 9, 2, 6), (1, 8, 1, 7)]
    compare(table, torch.float64, 2, 1e-12)


def test_runs_of_one_prompt_that_lie_apart_all_count_in_its_gradient() -> None:
    """Two runs of answers in one call that read the same keys."""
    rows = [(0, 4, -1), (4, 8, 0), (8, 12, -1), (12, 15, 2), (15, 19, 0)]
    compare(np.array(rows), torch.float64, HEADS, 1e-12)


def test_positions_that_restart_are_sequences() -> None:
    found = Segments.of_positions(torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]]))
    assert found.bounds.tolist() == [0, 3, 4, 6, 8] and found.longest == 3 and not found.prefixes


def test_only_full_causal_attention_is_plain() -> None:
    assert is_plain(Qwen3Config()) and is_plain(LlamaConfig())
    assert is_plain(MistralConfig(sliding_window=None)) and not is_plain(MistralConfig(sliding_window=128))
    assert not is_plain(Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=8))
