"""Log-probabilities and entropies of chosen tokens, without ever holding all logits.

Shape legend: N tokens, C tokens of a chunk, H hidden size, V vocabulary.
The full logits of a long batch over a large vocabulary are tens of gigabytes. Here the logits of one chunk exist at a
time; the backward pass computes each chunk's again and forms its gradient at once, so autograd keeps none of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def chunked_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, *, temperature: float = 1.0, chunk: int = 2048, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """`log softmax(hidden · weightᵀ / temperature)` at the targets, and the entropy of the same distribution.

    Returns `logp_N` and `entropy_N` in float32, nats; entropy is zeros without `with_entropy`. Logits are formed and
    reduced in float32 whatever the dtype of the inputs. Both results are differentiable in `hidden_NH` and
    `weight_VH` (once); the entropy's backward pass costs nothing unless something uses its gradient.
    """
    assert temperature > 0 and chunk > 0
    assert hidden_NH.shape[0] == targets_N.shape[0]
    return _ChunkedLogprobs.apply(hidden_NH, weight_VH, targets_N, float(temperature), int(chunk), bool(with_entropy))


def _logits_CV(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    if hidden_CH.dtype == torch.float32:
        logits = hidden_CH @ weight_VH.t()
    elif hidden_CH.is_cuda:
        # Tensor cores multiply in 16 bits and accumulate in 32; without out_dtype the sum would be rounded to 16 again.
        logits = torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits = hidden_CH.float() @ weight_VH.t().float()
    return logits if temperature == 1.0 else logits.div_(temperature)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float, chunk: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        count = hidden_NH.shape[0]
        logp_N = hidden_NH.new_zeros(count, dtype=torch.float32)
        lse_N = torch.zeros_like(logp_N)
        entropy_N = torch.zeros_like(logp_N)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits_CV = _logits_CV(hidden_NH[part], weight_VH, temperature)
            lse_C = torch.logsumexp(logits_CV, dim=-1)
            logp_N[part] = logits_CV.gather(-1, targets_N[part, None]).squeeze(-1) - lse_C
            lse_N[part] = lse_C
            if with_entropy:
                # H = lse - sum p·z; p·z with z = -inf (p = 0) would be NaN, but logits of a linear head are finite.
                probs_CV = torch.softmax(logits_CV, dim=-1)
                entropy_N[part] = lse_C - (probs_CV * logits_CV).sum(-1)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, lse_N, entropy_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_logp_N, grad_entropy_N = grads
        hidden_NH, weight_VH, targets_N, lse_N, entropy_N = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden_NH) if ctx.needs_input_grad[0] else None
        # The weight's gradient is a sum over all tokens: it accumulates in float32 whatever the compute dtype.
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden_NH.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden_CH = hidden_NH[part]
            logits_CV = _logits_CV(hidden_CH, weight_VH, ctx.temperature)
            logprobs_CV = logits_CV.sub_(lse_N[part, None])
            probs_CV = logprobs_CV.exp()
            grad_CV = torch.zeros_like(probs_CV)
            if grad_entropy_N is not None:
                # dH/dz_j = -p_j (log p_j + H)
                grad_CV = -probs_CV * (logprobs_CV + entropy_N[part, None]) * grad_entropy_N[part, None]
            if grad_logp_N is not None:
                # dlogp/dz_j = [j = target] - p_j
                grad_C1 = grad_logp_N[part, None]
                grad_CV.addcmul_(probs_CV, grad_C1, value=-1.0)
                grad_CV.scatter_add_(-1, targets_N[part, None], grad_C1)
            if ctx.temperature != 1.0:
                grad_CV.div_(ctx.temperature)
            if grad_hidden is not None:
                grad_hidden[part] = grad_CV.to(weight_VH.dtype) @ weight_VH
            if grad_weight is not None:
                grad_weight += (grad_CV.to(hidden_CH.dtype).t() @ hidden_CH).float()
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_VH.dtype), None, None, None, None
