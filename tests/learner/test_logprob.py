"""Chunked log-probabilities against full logits: values, gradients, and what is never materialised.

Not covered: 16-bit matrices on a GPU, whose products accumulate in float32 there (tests/gpu).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner.logprob import chunked_logprobs

N, H, V = 23, 8, 37


def make(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, H, generator=gen).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=gen).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (N,), generator=gen)


def full(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, dim=-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 5, N, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_full_logits(chunk: int, temperature: float) -> None:
    hidden, weight, targets = make()
    up_logp, up_entropy = torch.randn(N), torch.randn(N)
    logp, entropy = chunked_logprobs(hidden, weight, targets, temperature=temperature, chunk=chunk)
    want_logp, want_entropy = full(hidden, weight, targets, temperature)
    torch.testing.assert_close(logp, want_logp.float(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropy, want_entropy.float(), rtol=1e-5, atol=2e-6)
    got = torch.autograd.grad((logp * up_logp + entropy * up_entropy).sum(), (hidden, weight))
    want = torch.autograd.grad((want_logp * up_logp + want_entropy * up_entropy).sum(), (hidden, weight))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_each_gradient_alone() -> None:
    hidden, weight, targets = make()
    for pick in (0, 1):
        got = torch.autograd.grad(chunked_logprobs(hidden, weight, targets, chunk=7)[pick].sum(), (hidden, weight))
        want = torch.autograd.grad(full(hidden, weight, targets, 1.0)[pick].sum(), (hidden, weight))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_uniform_distribution_has_known_values() -> None:
    logp, entropy = chunked_logprobs(torch.zeros(3, H), torch.randn(V, H), torch.tensor([0, 5, 36]), chunk=2)
    log_v = torch.log(torch.tensor(float(V)))
    torch.testing.assert_close(logp, (-log_v).expand(3))
    torch.testing.assert_close(entropy, log_v.expand(3))


def test_tied_head_gets_the_gradient_of_both_uses() -> None:
    _, weight, targets = make()
    ids = torch.arange(N) % V
    loss = chunked_logprobs(weight[ids], weight, targets, chunk=6)[0].sum()
    want = full(weight[ids], weight, targets, 1.0)[0].sum()
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], torch.autograd.grad(want, weight)[0], rtol=1e-4, atol=1e-5)


def test_without_entropy_it_is_zero_and_carries_no_gradient() -> None:
    hidden, weight, targets = make()
    logp, entropy = chunked_logprobs(hidden, weight, targets, with_entropy=False)
    assert entropy.abs().sum() == 0 and not entropy.requires_grad and logp.requires_grad


def test_no_tokens_at_all_still_connects_the_graph() -> None:
    hidden, weight, targets = make()
    logp, _ = chunked_logprobs(hidden[:0], weight, targets[:0])
    grads = torch.autograd.grad(logp.sum(), (hidden, weight))
    assert logp.shape == (0,) and all(g.abs().sum() == 0 for g in grads)


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.full((2, H), 1e4).requires_grad_()
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(3)).requires_grad_()
    logp, entropy = chunked_logprobs(hidden, weight, torch.tensor([0, 1]))
    grads = torch.autograd.grad((logp + entropy).sum(), (hidden, weight))
    assert all(torch.isfinite(x).all() for x in (logp, entropy, *grads))


def test_bfloat16_inputs_are_reduced_in_float32() -> None:
    hidden, weight, targets = make(torch.bfloat16)
    logp, _ = chunked_logprobs(hidden, weight, targets)
    torch.testing.assert_close(logp, full(hidden, weight, targets, 1.0)[0].float(), rtol=1e-5, atol=1e-5)
    grad, grad_weight = torch.autograd.grad(logp.sum(), (hidden, weight))
    assert grad.dtype == grad_weight.dtype == torch.bfloat16


class LargestVocabularyTensor(TorchDispatchMode):
    """Rows of the largest tensor with V columns that any operation makes."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == V:
            self.rows = max(self.rows, out.shape[0])
        return out


def test_full_logits_are_never_materialised_in_either_pass() -> None:
    hidden, weight, targets = make()
    with LargestVocabularyTensor() as seen:
        logp, entropy = chunked_logprobs(hidden, weight, targets, chunk=4)
        (logp.sum() + entropy.sum()).backward()
    # The weight's own transpose has H rows and V columns; logits have at most `chunk`.
    assert 0 < seen.rows <= max(4, H) < N
