"""Every aggregation against its definition, the golden pushes, and shares that add up to the whole.

Not covered: the property tests over random splits (test_invariance), and the objective's terms themselves (test_objective).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.aggregate import aggregate_token_loss, answer_weights
from learner.denominators import MODES
from rollout.errors import UserError

LENGTHS, PROMPT, L = [2, 0, 4, 3], [0, 0, 1, 1], 8
TERMS = torch.tensor(
    [[1.0, 2.0, 99.0, 99.0], [99.0, 99.0, 99.0, 99.0], [1.0, 1.0, 1.0, 5.0], [0.0, 3.0, 3.0, 99.0]], dtype=torch.float64
)
MASK = torch.arange(4)[None] < torch.tensor(LENGTHS)[:, None]
VALUES = {
    "token-mean": 17 / 9,
    "seq-mean-token-mean": (3 / 2 + 8 / 4 + 6 / 3) / 3,
    "seq-mean-token-sum-norm": (3 + 8 + 6) / 8 / 3,
    "seq-mean-token-sum": (3 + 8 + 6) / 3,
    "token-sum": 17.0,
    "prompt-mean": (3 / 2 + (8 + 6) / 7) / 2,
}


def test_every_mode_has_a_value_here() -> None:
    assert set(VALUES) == set(MODES)


@pytest.mark.parametrize("mode", MODES)
def test_value(mode: str) -> None:
    """A fully masked answer counts in no denominator."""
    got = aggregate_token_loss(TERMS, MASK, mode=mode, prompt=PROMPT, max_len=L)
    assert got.item() == pytest.approx(VALUES[mode], rel=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_packed_equals_padded(mode: str) -> None:
    answer = torch.arange(4)[:, None].expand(4, 4)
    keep = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    chosen = MASK | keep  # some padding comes along in the packed row
    got = aggregate_token_loss(TERMS[chosen], MASK[chosen], mode=mode, answer=answer[chosen], prompt=PROMPT, max_len=L)
    assert got.item() == pytest.approx(VALUES[mode], rel=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_shares_add_up(mode: str) -> None:
    """One answer a micro-batch, with the whole step's weights."""
    weights = answer_weights(LENGTHS, PROMPT, mode=mode, max_len=L)
    shares = [aggregate_token_loss(TERMS[i : i + 1], MASK[i : i + 1], weights=weights[i : i + 1]).item() for i in range(4)]
    assert shares[1] == 0.0
    assert sum(shares) == pytest.approx(VALUES[mode], rel=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_the_weight_and_nothing_at_masked_tokens(mode: str) -> None:
    terms = TERMS.clone().requires_grad_()
    aggregate_token_loss(terms, MASK, mode=mode, prompt=PROMPT, max_len=L).backward()
    weights = torch.tensor(answer_weights(LENGTHS, PROMPT, mode=mode, max_len=L))
    assert terms.grad is not None
    torch.testing.assert_close(terms.grad, weights[:, None] * MASK)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_unmasked_is_zero_with_a_gradient(mode: str) -> None:
    """Every rank can run its backward pass."""
    terms = torch.full((2, 3), torch.nan, requires_grad=True)
    loss = aggregate_token_loss(terms, torch.zeros(2, 3, dtype=torch.bool), mode=mode, prompt=[0, 1], max_len=L)
    loss.backward()
    assert loss.item() == 0.0
    assert terms.grad is not None and terms.grad.abs().sum() == 0
    assert answer_weights([0, 0], [0, 1], mode=mode, max_len=L).tolist() == [0.0, 0.0]


def test_an_empty_micro_batch_is_zero() -> None:
    terms = torch.zeros(0, requires_grad=True)
    loss = aggregate_token_loss(terms, torch.zeros(0, dtype=torch.bool), answer=torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0.0


@pytest.mark.parametrize(
    ("mode", "ratio", "whole"),
    [("seq-mean-token-mean", 6.0, (0.5, -0.5)), ("token-mean", 1.0, None), ("seq-mean-token-sum-norm", 1.0, None)],
)
def test_golden_pushes(mode: str, ratio: float, whole: tuple[float, float] | None) -> None:
    """Golden number 1: lengths 200 and 1200, advantages +1 and −1."""
    lengths, advantages = np.array([200, 1200]), np.array([1.0, -1.0])
    push = advantages * answer_weights(lengths, mode=mode, max_len=1200)
    assert push[0] / -push[1] == pytest.approx(ratio, rel=1e-14)
    if whole is not None:
        np.testing.assert_allclose(push * lengths, whole, rtol=1e-14)


def test_what_a_mode_needs_is_asked_for() -> None:
    with pytest.raises(UserError, match="max_len"):
        answer_weights([1], mode="seq-mean-token-sum-norm")
    with pytest.raises(UserError, match="prompt"):
        answer_weights([1], mode="prompt-mean")


def test_dtype_of_the_loss() -> None:
    """At least float32: a bf16 sum of a step would lose the small terms."""
    for given, got in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        assert aggregate_token_loss(torch.ones(1, 2, dtype=given), torch.ones(1, 2)).dtype == got
