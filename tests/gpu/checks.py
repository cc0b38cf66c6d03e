"""Correctness on this device against float64 on the CPU: packing, log-probabilities, objectives, sharding.

Each check gives (what, the largest error, the largest allowed): errors of log-probabilities in nats, of gradients relative to their norm.
16-bit results are allowed a small multiple of the error that plain transformers makes in the same precision on the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.logprob import chunked_logprobs
from learner.model import local
from learner.objective import grpo_loss
from learner.pack import Answer
from tests.gpu.setting import CHECKED, Size, answers, checkpoint, forward, packed, policy

Found = tuple[str, float, float]
SIZE = Size(CHECKED, (256,), answers=12, mean=30, longest=90, prompt=9, loss_tokens=0, steps=0)

OBJECTIVES = {
    "grpo": dict(loss_agg="seq-mean-token-mean", kl_coef=0.01),
    "dapo": dict(loss_agg="token-mean", clip_high=0.28, entropy_coef=0.01),
    "gspo": dict(ratio_level="sequence", clip=3e-3, clip_high=4e-3, loss_agg="seq-mean-token-mean"),
    "cispo": dict(policy_loss="cispo", clip=1.0, clip_high=0.5),
    "sapo": dict(policy_loss="sapo"),
    "behav": dict(ratio_to="behav", mismatch="none", dual_clip=3.0),
    "tis": dict(mismatch="tis"),
}


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference by the norm of what is wanted."""
    return float((got.double().cpu() - want.double().cpu()).norm() / want.double().norm().cpu())


def alone(folder: Path, given: dict[int, Answer], where: torch.device, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of every answer's tokens and the gradient of their mean, by transformers alone, answer by answer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to(where)
    found, total = [], sum(len(a.tokens_T) for a in given.values())
    for one in given.values():
        ids = torch.tensor(np.concatenate([one.prompt_P, one.tokens_T]), device=where)[None]
        first = len(one.prompt_P)
        logits = model(ids, use_cache=False).logits[0, first - 1 : -1]
        logp = torch.log_softmax(logits.double() if dtype == torch.float64 else logits.float(), -1).gather(-1, ids[0, first:, None])[:, 0]
        (logp.sum() / total).backward()
        found.append(logp.detach())
    return torch.cat(found), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def by_packing(folder: Path, given: dict[int, Answer], where: torch.device, **sharding: object) -> tuple[Tensor, dict[str, Tensor]]:
    """The same through the sharded policy on packed micro-batches; the gradient of each is formed with the log-probabilities."""
    model = policy(folder, where, **sharding)
    total = sum(len(a.tokens_T) for a in given.values())
    pieces: dict[int, Tensor] = {}
    for micro in packed(given, SIZE.budgets[0], model, where):
        even = torch.full((len(micro.target_N),), 1.0 / total, device=where)
        logp, _ = forward(model, micro, upstream=lambda part, *_, even=even: (even[part], None))
        (logp * even).sum().backward()
        for k, answer in enumerate(micro.ids_K):
            pieces[int(answer)] = logp.detach()[micro.answer_N == k]
    grads = {name: local(p.grad) for name, p in model.hf.named_parameters() if p.grad is not None}
    return torch.cat([pieces[a] for a in given]), grads


def check_policy(folder: Path, where: torch.device) -> Iterator[Found]:
    """Packing, sharding and every setting of it."""
    given = answers(SIZE, int(CHECKED["vocab_size"]))
    logp, grads = alone(folder, given, torch.device("cpu"), torch.float64)
    plain_logp, plain_grads = alone(folder, given, where, torch.bfloat16)
    names = sorted(grads)
    want = torch.cat([grads[n].flatten() for n in names])
    near = torch.cat([plain_grads[n].flatten() for n in names])
    allowed = {
        "float32": (1e-5, 1e-5),
        "bfloat16": (3 * float((plain_logp.double().cpu() - logp).abs().max()), 3 * relative(near, want)),
    }
    cases: list[dict[str, Any]] = [
        {},
        {"activation_checkpointing": True},
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"attention": "sdpa"},
        {"compute_dtype": "bfloat16"},
        {"compute_dtype": "bfloat16", "attention": "sdpa"},
        {"compute_dtype": "bfloat16", "activation_checkpointing": True},
    ]
    for case in cases:
        got_logp, got = by_packing(folder, given, where, **case)
        label = ", ".join(f"{k}={v}" for k, v in case.items()) or "defaults"
        most_logp, most_grad = allowed[str(case.get("compute_dtype", "float32"))]
        yield f"packed log-probabilities ({label})", float((got_logp.double().cpu() - logp).abs().max()), most_logp
        yield f"FSDP gradient ({label})", relative(torch.cat([got[n].flatten().cpu() for n in names]), want), most_grad


def check_logprobs(where: torch.device) -> Iterator[Found]:
    """Chunks against full logits in float64, with and without the gradient formed in advance, in both precisions."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 64, generator=rng)
    weight, targets = torch.randn(1000, 64, generator=rng) / 8, torch.randint(0, 1000, (200,), generator=rng)
    ups = torch.randn(2, 200, generator=rng)
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        h, w = (x.to(dtype).to(where).requires_grad_() for x in (hidden, weight))
        h64, w64 = (x.detach().double().cpu().requires_grad_() for x in (h, w))
        full = torch.log_softmax(h64 @ w64.t() / 0.7, -1)
        want = (full.gather(-1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1))
        want_grad = torch.autograd.grad((want[0] * ups[0].double() + want[1] * ups[1].double()).sum(), (h64, w64))
        up = ups.to(where)
        for name, before in (("formed in advance", lambda part, *_, up=up: (up[0][part], up[1][part])), ("recomputed", None)):
            got = chunked_logprobs(h, w, targets.to(where), temperature=0.7, chunk=64, upstream=before)
            grad = torch.autograd.grad((got[0] * up[0] + got[1] * up[1]).sum(), (h, w))
            label = f"{str(dtype).split('.')[1]}, {name}"
            worst = max(float((a.detach().double().cpu() - b.detach()).abs().max()) for a, b in zip(got, want, strict=True))
            yield f"log-probabilities and entropies ({label})", worst, 2e-5
            yield f"their gradients ({label})", max(relative(a, b) for a, b in zip(grad, want_grad, strict=True)), most


def check_objectives(where: torch.device) -> Iterator[Found]:
    """Losses relative to Σ|terms|, and gradients."""
    rng = torch.Generator().manual_seed(0)
    count, longest = 12, 40
    lengths = torch.randint(1, longest + 1, (count,), generator=rng)
    mask = torch.arange(longest)[None] < lengths[:, None]
    new = -2 + torch.randn(count, longest, generator=rng, dtype=torch.float64)
    others = {k: new + 0.2 * torch.randn(count, longest, generator=rng, dtype=torch.float64) for k in ("old", "behav", "ref")}
    entropy, advantage = torch.rand(count, longest, generator=rng, dtype=torch.float64), torch.randn(count, generator=rng)
    for name, flags in OBJECTIVES.items():
        results = []
        for dtype, at in ((torch.float64, torch.device("cpu")), (torch.float32, where)):
            x = new.to(dtype).to(at).clone().requires_grad_()
            old, behav, ref = (others[k].to(dtype).to(at) for k in ("old", "behav", "ref"))
            rest = dict(logp_behav=behav, logp_ref=ref, entropy=entropy.to(dtype).to(at), max_len=longest)
            out = grpo_loss(x, old, advantage.to(dtype).to(at), mask.to(at), **rest, **flags)
            out.loss.backward()
            results.append((out.loss.item(), x.grad, out.sums.abs_terms.item()))
        (want, want_grad, terms), (got, got_grad, _) = results
        yield f"objective {name}", abs(got - want) / terms, 1e-5
        yield f"objective {name}, gradient", relative(got_grad, want_grad), 1e-5


def run_all(where: torch.device, folder: Path) -> list[Found]:
    """Every check."""
    place = checkpoint(CHECKED, folder / "checked")
    return [*check_logprobs(where), *check_objectives(where), *check_policy(place, where)]
