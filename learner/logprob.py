"""Log-probabilities and entropies of chosen tokens, without ever holding all logits.

Shape legend: N tokens, C tokens of a chunk, H hidden size, V vocabulary.
The full logits of a long batch over a large vocabulary are tens of gigabytes. Here the logits of one chunk exist at a time, in one buffer
of fixed size that every step works on in place. Autograd keeps none of them: where the caller can say what gradient each token will
get, it is formed while the logits are there; otherwise the backward pass computes each chunk's logits again, a third more work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TILE_BYTES = 128 * 2**20
"""Float32 logits that exist at once, unless a chunk is given: enough rows for a full-speed product at any vocabulary."""

BLOCK_BYTES = 2**20
"""Logits that log-sum-exp and entropy take at a time on the CPU: their scratch is as large, and fits a cache. On GPUs it is a tile."""

Upstream = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(which tokens, their log-probabilities, their entropies) -> the gradients that the loss will have in them; None: none in the entropy."""


def chunk_for(vocabulary: int, chunk: int = 0) -> int:
    """Tokens of a chunk: `chunk`, or at 0 as many as `TILE_BYTES` hold."""
    return chunk or max(1, TILE_BYTES // (4 * vocabulary))


def chunked_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 0,
    with_entropy: bool = True,
    upstream: Upstream | None = None,
) -> tuple[Tensor, Tensor]:
    """`log softmax(hidden · weightᵀ / temperature)` at the targets, and the entropy of the same distribution.

    Returns `logp_N` and `entropy_N` in float32, nats; entropy is zeros without `with_entropy`. Logits are formed and
    reduced in float32 whatever the dtype of the inputs. Both results are differentiable in `hidden_NH` and
    `weight_VH` (once); the entropy's backward pass costs nothing unless something uses its gradient.

    `upstream` predicts the gradients that will come back, per token, from values alone. It saves the backward pass the logits; if what
    then comes back differs from it, the backward pass does without, so that the gradient is always that of the loss.
    """
    assert temperature > 0 and chunk >= 0
    assert hidden_NH.shape[0] == targets_N.shape[0]
    if not torch.is_grad_enabled():
        upstream = None
    size = chunk_for(weight_VH.shape[0], chunk)
    return _ChunkedLogprobs.apply(hidden_NH, weight_VH, targets_N, float(temperature), size, bool(with_entropy), upstream)


def _logits_CV(hidden_CH: Tensor, weight_VH: Tensor, temperature: float, tile: Tensor | None) -> Tensor:
    """Into `tile` (float32, at least C rows) where there is one."""
    out = None if tile is None else tile[: len(hidden_CH)]
    if hidden_CH.dtype == torch.float32:
        logits = torch.mm(hidden_CH, weight_VH.t(), out=out)
    elif hidden_CH.is_cuda:
        # Tensor cores multiply in 16 bits and accumulate in 32; without out_dtype the sum would be rounded to 16 again.
        logits = torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden_CH.float(), weight_VH.t().float(), out=out)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _lse_entropy_C(logits_CV: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """lse = m + log Σ e^(z − m) and H = log Σ e^(z − m) − Σ p·(z − m), with m the largest logit; zeros for H without `with_entropy`.

    In blocks of rows, whose scratch stays in a cache. p·z with z = −inf (p = 0) would be NaN, but logits of a linear head are finite.
    """
    lse_C, entropy_C = logits_CV.new_empty(len(logits_CV)), logits_CV.new_zeros(len(logits_CV))
    rows = max(1, (TILE_BYTES if logits_CV.is_cuda else BLOCK_BYTES) // (4 * logits_CV.shape[1]))
    for start in range(0, len(lse_C), rows):
        part = slice(start, start + rows)
        top = logits_CV[part].amax(-1, keepdim=True)
        shifted = logits_CV[part] - top
        powers = shifted.exp()
        total = powers.sum(-1)
        log_total = total.log()
        lse_C[part] = log_total + top[:, 0]
        if with_entropy:
            entropy_C[part] = log_total - torch.einsum("cv,cv->c", powers, shifted) / total
    return lse_C, entropy_C


class _Gradients:
    """The two gradients, added to chunk by chunk. The weight's is a sum over all tokens: float32 whatever the compute dtype."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, wanted: tuple[bool, bool]) -> None:
        self.hidden = torch.empty_like(hidden_NH) if wanted[0] else None
        self.weight = torch.empty_like(weight_VH, dtype=torch.float32) if wanted[1] else None
        self.started = False  # whether `weight` holds a sum yet
        self.weight_VH, self.dtype = weight_VH, hidden_NH.dtype

    def add(self, part: slice, hidden_CH: Tensor, logits_CV: Tensor, stats: tuple[Tensor, ...], temperature: float) -> None:
        """`stats`: targets, log-sum-exp, entropy and the two upstream gradients of the chunk (or None). The logits are used up."""
        targets_C, lse_C, entropy_C, up_logp_C, up_entropy_C = stats
        logprobs_CV = logits_CV.sub_(lse_C[:, None])
        if up_entropy_C is None:
            # dlogp/dz_j = [j = target] - p_j
            grad_CV = logprobs_CV.exp_()
            grad_CV.mul_(-up_logp_C[:, None] if temperature == 1.0 else up_logp_C[:, None] / -temperature)
        else:
            # dH/dz_j = -p_j (log p_j + H)
            probs_CV = logprobs_CV.exp()
            grad_CV = logprobs_CV.add_(entropy_C[:, None]).mul_(up_entropy_C[:, None])
            if up_logp_C is not None:
                grad_CV.add_(up_logp_C[:, None])
            grad_CV.mul_(probs_CV).div_(-temperature)
        if up_logp_C is not None:
            grad_CV.scatter_add_(-1, targets_C[:, None], up_logp_C[:, None] / temperature)
        grad_CV = grad_CV.to(self.dtype)
        if self.hidden is not None:
            self.hidden[part] = grad_CV @ self.weight_VH
        if self.weight is not None:
            beta = 1.0 if self.started else 0.0  # at 0 what memory holds is not read
            if grad_CV.is_cuda and self.dtype != torch.float32:
                torch.addmm(self.weight, grad_CV.t(), hidden_CH, beta=beta, out_dtype=torch.float32, out=self.weight)
            else:
                self.weight.addmm_(grad_CV.t().float(), hidden_CH.float(), beta=beta)
            self.started = True

    def cast(self) -> tuple[Tensor | None, Tensor | None]:
        """In the dtypes of what they are gradients of."""
        if self.weight is not None and not self.started:
            self.weight.zero_()
        return self.hidden, None if self.weight is None else self.weight.to(self.weight_VH.dtype)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
        upstream: Upstream | None,
    ) -> tuple[Tensor, Tensor]:
        count, vocabulary = hidden_NH.shape[0], weight_VH.shape[0]
        logp_N = hidden_NH.new_zeros(count, dtype=torch.float32)
        lse_N, entropy_N = torch.zeros_like(logp_N), torch.zeros_like(logp_N)
        tile = None if hidden_NH.is_cuda else logp_N.new_empty(min(chunk, count), vocabulary)
        formed, ups = None, (torch.zeros_like(logp_N), torch.zeros_like(logp_N))
        if upstream is not None:
            formed = _Gradients(hidden_NH, weight_VH, ctx.needs_input_grad[:2])
        through_entropy = False
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            hidden_CH, targets_C = hidden_NH[part], targets_N[part]
            logits_CV = _logits_CV(hidden_CH, weight_VH, temperature, tile)
            lse_C, entropy_N[part] = _lse_entropy_C(logits_CV, with_entropy)
            lse_N[part] = lse_C
            logp_N[part] = logits_CV.gather(-1, targets_C[:, None]).squeeze(-1) - lse_C
            if upstream is not None and formed is not None:
                up_logp_C, up_entropy_C = upstream(part, logp_N[part], entropy_N[part])
                ups[0][part] = up_logp_C
                if up_entropy_C is not None:
                    ups[1][part], through_entropy = up_entropy_C, True
                formed.add(part, hidden_CH, logits_CV, (targets_C, lse_C, entropy_N[part], up_logp_C, up_entropy_C), temperature)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, lse_N, entropy_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.formed, ctx.ups, ctx.through_entropy = formed, ups, through_entropy
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        hidden_NH, weight_VH, targets_N, lse_N, entropy_N = ctx.saved_tensors
        formed, ctx.formed = ctx.formed, None  # given once: what is added up later must not change what was given
        if formed is None or not _as_predicted(grads, ctx.ups, ctx.through_entropy):
            formed = _Gradients(hidden_NH, weight_VH, ctx.needs_input_grad[:2])
            tile = None if hidden_NH.is_cuda else lse_N.new_empty(min(ctx.chunk, len(lse_N)), weight_VH.shape[0])
            for start in range(0, len(lse_N), ctx.chunk):
                part = slice(start, start + ctx.chunk)
                logits_CV = _logits_CV(hidden_NH[part], weight_VH, ctx.temperature, tile)
                ups = (None if grad is None else grad[part] for grad in grads)
                formed.add(part, hidden_NH[part], logits_CV, (targets_N[part], lse_N[part], entropy_N[part], *ups), ctx.temperature)
        return *formed.cast(), None, None, None, None, None


def _as_predicted(grads: tuple[Tensor | None, ...], ups: tuple[Tensor, Tensor], through_entropy: bool) -> bool:
    """Whether what came back is what was predicted, but for the rounding of a different order of operations."""
    if grads[0] is None or (grads[1] is not None) != through_entropy:
        return False
    pairs = [(grads[0], ups[0]), *([(grads[1], ups[1])] if grads[1] is not None else [])]
    return all(bool(torch.isfinite(b).all()) and bool(torch.allclose(a, b, rtol=1e-5, atol=1e-30)) for a, b in pairs)
