"""The supervised phase before RL: plain next-token likelihood of given completions, through the learner's own passes.

Shape legend: N target tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from learner.config import OptimConfig
from learner.optim import gradient_norm, local_gradients, make_adamw, scale_gradients, set_learning_rate
from learner.pack import Answer, build_micro, plan_step
from learner.parts import MicroBatch
from learner.step import Learner

Example = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]


@dataclass(frozen=True)
class WarmupStep:
    """One supervised step, over all ranks: mean negative log-likelihood per target token (nats), gradient norm, rate, targets."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int


def warmup_rate(step: int, steps: int, peak: float) -> float:
    """A linear ramp over the first twentieth, then a cosine to a tenth of the peak."""
    ramp = max(1, steps // 20)
    if step < ramp:
        return peak * (step + 1) / ramp
    done = (step - ramp) / max(1, steps - 1 - ramp)
    return peak * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done))))


def sft_steps(
    learner: Learner,
    batches: Iterable[Sequence[Example]],
    *,
    steps: int,
    lr: float,
    on_step: Callable[[WarmupStep], None] | None = None,
) -> list[WarmupStep]:
    """Train on `steps` batches of (prompt tokens, completion tokens), completions with their stop id.

    Collective: every rank gives the same batches. The temperature is 1, the mean is over all the step's target tokens,
    and the optimiser is its own (AdamW, betas 0.9 and 0.95, no decay, norm clipped at 1), so RL starts with a fresh one.
    Where the settings name no `reference`, the learner has none afterwards: it is to be this phase's result
    (`Learner.use_reference`), not what came before it. Raises RuntimeError when the loss is not finite.
    """
    optimizer = make_adamw(learner.policy, OptimConfig(lr=lr))
    learner.use_reference(learner.settings.reference)
    done = []
    for step, batch in zip(range(steps), batches, strict=False):
        rate = warmup_rate(step, steps, lr)
        loss, norm, tokens = _one_step(learner, optimizer, batch, rate)
        done.append(WarmupStep(step, loss, norm, rate, tokens))
        if not math.isfinite(loss):
            raise RuntimeError(f"the supervised loss is {loss} at step {step}: lower warmup_lr")
        if on_step is not None:
            on_step(done[-1])
    return done


def _one_step(learner: Learner, optimizer: torch.optim.Optimizer, batch: Sequence[Example], rate: float) -> tuple[float, float, int]:
    answers = {i: Answer.example(np.asarray(p), np.asarray(c)) for i, (p, c) in enumerate(batch)}
    tokens = sum(len(a.tokens_T) for a in answers.values())
    plan = plan_step([a.size for a in answers.values()], list(answers), ranks=learner.ranks, settings=learner.packing)
    loss = torch.zeros((), dtype=torch.float64, device=learner.device)
    for rows in plan.micro[learner.rank]:
        micro = MicroBatch.on(learner.device, build_micro(rows, answers))
        logp_N, _ = learner.policy(micro.input_RW, micro.position_RW, micro.flat_N, micro.target_N, 1.0, False)
        share = -logp_N.masked_fill(~micro.mask_N, 0.0).sum() / tokens
        share.backward()
        loss += share.detach().double()
    learner.all_reduce(loss)
    grads = local_gradients(learner.policy.parameters())
    norm = gradient_norm(grads, learner.all_reduce, learner.device, learner.replicas)
    if norm > 1.0 and math.isfinite(norm):
        scale_gradients(grads, 1.0 / norm)
    if math.isfinite(norm):
        set_learning_rate(optimizer, rate)
        optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm, tokens
