"""Chunked log-probabilities against full logits: values, gradients, and what is never materialised.

Not covered: 16-bit matrices on a GPU, whose products accumulate in float32 there (tests/gpu).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner.logprob import TILE_BYTES, chunk_for, chunked_logprobs

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


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("through_entropy", [False, True])
def test_a_gradient_formed_in_advance_is_that_of_full_logits(temperature: float, through_entropy: bool) -> None:
    hidden, weight, targets = make()
    ups = torch.randn(2, N, generator=torch.Generator().manual_seed(2))
    seen: list[torch.Tensor] = []

    def upstream(part: slice, logp_C: torch.Tensor, entropy_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        seen.append(logp_C.clone())
        return ups[0][part], ups[1][part] if through_entropy else None

    with Products() as products:
        logp, entropy = chunked_logprobs(hidden, weight, targets, temperature=temperature, chunk=5, upstream=upstream)
        loss = (logp * ups[0]).sum() + ((entropy * ups[1]).sum() if through_entropy else 0.0)
        got = torch.autograd.grad(loss, (hidden, weight))
    assert products.count == 3 * 5  # no logits in the backward pass
    torch.testing.assert_close(torch.cat(seen), logp)
    want_logp, want_entropy = full(hidden, weight, targets, temperature)
    want = torch.autograd.grad((want_logp * ups[0]).sum() + ((want_entropy * ups[1]).sum() if through_entropy else 0.0), (hidden, weight))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def given(up: torch.Tensor, part: slice, logp_C: torch.Tensor, entropy_C: torch.Tensor) -> tuple[torch.Tensor, None]:
    return up[part], None


def test_a_wrong_prediction_changes_no_gradient() -> None:
    hidden, weight, targets = make()
    up = torch.ones(N)
    for wrong in (up * 0.999, torch.where(torch.arange(N) == 7, 2.0, up), up * float("nan")):
        logp, _ = chunked_logprobs(hidden, weight, targets, chunk=5, upstream=partial(given, wrong))
        got = torch.autograd.grad(logp.sum(), (hidden, weight))
        want = torch.autograd.grad(full(hidden, weight, targets, 1.0)[0].sum(), (hidden, weight))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_nothing_is_formed_without_gradient() -> None:
    hidden, weight, targets = make()

    def never(*_: Any) -> Any:
        raise AssertionError

    with torch.no_grad():
        chunked_logprobs(hidden, weight, targets, upstream=never)


def test_a_chunk_is_as_many_tokens_as_the_tile_holds() -> None:
    assert chunk_for(151_936) * 151_936 * 4 <= TILE_BYTES < (chunk_for(151_936) + 1) * 151_936 * 4
    assert chunk_for(10**9) == 1 and chunk_for(50_000, 7) == 7


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).split(".")[1] in ("mm", "addmm", "addmm_")
        return func(*args, **(kwargs or {}))
