"""The critic's formulas against a plain reference, in closed form, and at the golden numbers of the two papers.

Not covered: the values that a model gives, whitening over ranks and denominators (test_critic.py).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.gae import gae, length_adaptive_lambda, push_size, token_rewards, value_terms


def plain_gae(rewards: list[float], values: list[float], lam: float) -> list[float]:
    """The definition, term by term: A_t = Σ_k lambda^k · delta_{t+k}."""
    after = [*values[1:], 0.0]
    delta = [r + b - v for r, b, v in zip(rewards, after, values, strict=True)]
    return [sum(lam**k * d for k, d in enumerate(delta[t:])) for t in range(len(delta))]


@st.composite
def packed(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(rewards [N], values [N], answer [N], lambdas [K]) of answers of random lengths, one after another."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    lam = draw(st.lists(st.sampled_from([0.0, 0.3, 0.95, 1.0]), min_size=len(lengths), max_size=len(lengths)))
    return rng.normal(size=sum(lengths)), rng.normal(size=sum(lengths)), np.repeat(np.arange(len(lengths)), lengths), np.array(lam)


@settings(max_examples=150, deadline=None)
@given(packed())
def test_packed_is_the_plain_reference_per_answer(row: tuple[np.ndarray, ...]) -> None:
    reward, value, answer, lam = row
    found = gae(reward, value, answer, lam)
    want = [plain_gae(list(reward[answer == k]), list(value[answer == k]), lam[k]) for k in range(len(lam))]
    np.testing.assert_allclose(found, np.concatenate(want), rtol=1e-12, atol=1e-12)
    # One lambda for all is the same as that lambda for each.
    np.testing.assert_array_equal(gae(reward, value, answer, 0.9), gae(reward, value, answer, np.full(len(lam), 0.9)))


def test_golden_lambda_1_and_0() -> None:
    answer, value = np.array([0, 0, 0, 1, 2, 2]), np.array([0.5, -0.25, 1.0, 0.75, 0.0, 2.0])
    reward = token_rewards(np.array([1.0, 0.0, -2.0]), answer)
    assert reward.tolist() == [0, 0, 1, 0, 0, -2]
    # R − V_t for every t; and delta_t = r_t + V_{t+1} − V_t, with V = 0 after the last token.
    assert gae(reward, value, answer, 1.0) == pytest.approx([0.5, 1.25, 0.0, -0.75, -2.0, -4.0])
    assert gae(reward, value, answer, 0.0).tolist() == [-0.75, 1.25, 0.0, -0.75, 2.0, -4.0]


def test_golden_constant_value() -> None:
    answer = np.zeros(7, dtype=np.int64)
    assert gae(token_rewards(np.array([1.0]), answer), np.full(7, 0.3), answer, 1.0) == pytest.approx(np.full(7, 0.7))


def test_golden_lambda_by_length() -> None:
    assert length_adaptive_lambda(np.array([100, 20, 10, 1, 1000]), 0.05) == pytest.approx([0.8, 0.0, 0.0, 0.0, 0.98])


def test_a_reward_fades_by_lambda_with_the_distance_to_the_end() -> None:
    """Why VC-PPO keeps lambda at 1 for the targets: at 0.95 a reward after 200 tokens has all but vanished at the first."""
    answer = np.zeros(200, dtype=np.int64)
    target = gae(token_rewards(np.array([1.0]), answer), np.zeros(200), answer, 0.95)
    assert target[-1] == 1.0 and target[0] == pytest.approx(0.95**199) and target[0] < 1e-4


def test_kl_is_taken_from_the_reward_of_each_token() -> None:
    answer, k1 = np.array([0, 0, 1]), np.array([0.1, -0.2, 0.4])
    assert token_rewards(np.array([1.0, 0.5]), answer, k1, 0.5) == pytest.approx([-0.05, 1.1, 0.3])


def test_value_terms_in_closed_form_and_their_gradient() -> None:
    value = torch.tensor([0.5, 0.5, -0.5, 0.05], dtype=torch.float64, requires_grad=True)
    old, back = torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    terms, clipped = value_terms(value, old, back, None)
    assert terms.tolist() == pytest.approx([0.125, 0.125, 1.125, 0.45125]) and not clipped.any()
    # With a clip of 0.1: gone too far towards R, the clipped term is the larger and has no gradient; gone away from R, it must come back.
    terms, clipped = value_terms(value, old, back, 0.1)
    assert terms.tolist() == pytest.approx([0.5 * 0.9**2, 0.125, 1.125, 0.45125]) and clipped.tolist() == [True, False, False, False]
    terms.sum().backward()
    assert value.grad is not None and value.grad.tolist() == pytest.approx([0.0, 0.5, -1.5, -0.95])


def test_value_terms_send_nothing_to_targets_or_old_values() -> None:
    tensors = [torch.rand(3, requires_grad=True) for _ in range(3)]
    value, old, back = tensors
    value_terms(value, old.detach(), back.detach(), 0.2)[0].sum().backward()
    assert value.grad is not None and old.grad is None and back.grad is None


def test_push_size_reads_unmasked_tokens_only() -> None:
    grad = torch.tensor([0.5, -1.5, torch.nan])
    assert push_size(grad, torch.tensor([True, True, False])).item() == 2.0


def test_an_answer_without_a_token_is_an_error_of_ours() -> None:
    with pytest.raises(AssertionError, match="no place for its reward"):
        token_rewards(np.array([1.0, 0.0]), np.array([0, 0]))
