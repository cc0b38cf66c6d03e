"""Speed and memory on this device: tokens/s of whole learner steps, packed and padded, and the loss at a large vocabulary."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from learner.logprob import chunked_logprobs
from tests.gpu.setting import Size, answers, checkpoint, forward, packed, padded, policy


def wait(where: torch.device) -> None:
    """Until the device has done what it was given."""
    if where.type == "cuda":
        torch.cuda.synchronize()


def product_rate(where: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product: the peak that a share refers to."""
    size = 8192 if where.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=where, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(8):
        wait(where)
        begun = time.perf_counter()
        a @ b
        wait(where)
        times.append(time.perf_counter() - begun)
    return 2.0 * size**3 / median(times[2:])


def peak_memory(where: torch.device) -> int:
    """Bytes at the peak since the last reset; 0 on a CPU, where tests/bench measures it."""
    return torch.cuda.max_memory_allocated() if where.type == "cuda" else 0


def reset_memory(where: torch.device) -> int:
    """Starts the peak anew; bytes in use."""
    if where.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def step_flop(model: Any, tokens: int, predicted: int, attended: float) -> float:
    """FLOP of a forward and backward pass: 6 per weight and token of the layers, per weight and predicted token of the head; attention."""
    config = model.hf.config
    layers = sum(p.numel() for p in model.hf.get_decoder().layers.parameters() if p.ndim == 2)
    head = config.vocab_size * config.hidden_size
    width = config.num_attention_heads * config.head_dim
    return 6.0 * (layers * tokens + head * predicted) + 12.0 * config.num_hidden_layers * width * attended


def learner_rates(size: Size, where: torch.device, folder: Path) -> list[dict[str, Any]]:
    """Forward, loss, backward and AdamW over the same answers: packed at each budget, then padded at the same budget."""
    dtype = "bfloat16" if where.type == "cuda" else "float32"
    peak = product_rate(where, torch.bfloat16 if where.type == "cuda" else torch.float32)
    given = answers(size, int(size.model["vocab_size"]))
    tokens = sum(a.size for a in given.values())
    predicted = sum(len(a.tokens_T) for a in given.values())
    model = policy(checkpoint(size.model, folder / "random"), where, compute_dtype=dtype)
    flop = step_flop(model, tokens, predicted, sum(a.size**2 / 2 for a in given.values()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rows = []
    for budget in size.budgets:
        for name, batches in (("packed", packed(given, budget, model, where)), ("padded", padded(given, budget, where))):
            times = []
            reset_memory(where)
            for _ in range(1 + size.steps):
                wait(where)
                begun = time.perf_counter()
                for micro in batches:
                    even = torch.full((len(micro.target_N),), 1.0 / predicted, device=where)
                    logp, _ = forward(model, micro, upstream=lambda part, *_, even=even: (even[part], None))
                    (logp * even).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                wait(where)
                times.append(time.perf_counter() - begun)
            seconds = median(times[1:])
            rows.append(
                {
                    "name": f"learner step, {name}, {budget} tokens a micro-batch",
                    "tokens_per_s": tokens / seconds,
                    "share_of_peak": flop / seconds / peak,
                    "peak_flops": peak,
                    "memory_gb": peak_memory(where) / 1e9,
                    "attention": model.hf.config._attn_implementation,
                    "dtype": dtype,
                }
            )
    return rows


def loss_rates(size: Size, where: torch.device) -> list[dict[str, Any]]:
    """Log-probabilities and their gradients from hidden states: ours with and without the gradient in advance, and full logits."""
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    count, hidden, vocabulary = size.loss_tokens, int(size.model["hidden_size"]), int(size.model["vocab_size"])
    h = torch.randn(count, hidden, device=where, dtype=dtype).requires_grad_()
    w = (torch.randn(vocabulary, hidden, device=where, dtype=dtype) * hidden**-0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (count,), device=where)
    up = torch.randn(count, device=where) / count

    def ours() -> Tensor:
        return chunked_logprobs(h, w, targets, upstream=lambda part, *_: (up[part], None))[0]

    def recomputed() -> Tensor:
        return chunked_logprobs(h, w, targets)[0]

    def full() -> Tensor:
        return torch.log_softmax((h @ w.t()).float(), -1).gather(-1, targets[:, None])[:, 0]

    rows = []
    for name, logp in (("gradient in advance", ours), ("logits recomputed", recomputed), ("full logits", full)):
        times, base = [], reset_memory(where)
        for _ in range(1 + size.steps):
            h.grad = w.grad = None
            wait(where)
            begun = time.perf_counter()
            (logp() * up).sum().backward()
            wait(where)
            times.append(time.perf_counter() - begun)
        gradients = sum(x.numel() * x.element_size() for x in (h, w))
        growth = max(0, peak_memory(where) - base - gradients) / 1e9
        rows.append({"name": f"loss, {name}, {count} tokens", "seconds": median(times[1:]), "memory_gb": growth, "dtype": str(dtype)})
    return rows
