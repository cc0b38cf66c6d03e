"""AdamW over the shards, its learning-rate schedule, and the gradient's norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from learner.model import local

if TYPE_CHECKING:
    from learner.config import OptimConfig


def learning_rate(step: int, total: int, config: OptimConfig) -> float:
    """The rate of optimiser step `step` (from 0) of `total`: a linear ramp to `lr`, then the schedule's shape down to `lr_min`.

    The ramp's first step already moves (lr / lr_warmup_steps), and the last step of all ends at `lr_min` under
    `linear` and `cosine`. Steps past `total` stay at the end value.
    """
    ramp = config.lr_warmup_steps
    if step < ramp:
        return config.lr * (step + 1) / ramp
    if config.lr_schedule == "constant":
        return config.lr
    done = min(1.0, (step - ramp) / max(1, total - 1 - ramp))
    shape = 1.0 - done if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr_min + (config.lr - config.lr_min) * shape


def make_adamw(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101): weight decay on matrices, none on vectors (norms and biases). One fused kernel for all shards."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The same rate for every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def local_gradients(params: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shards of all gradients, without the empty ones."""
    grads = (local(p.grad) for p in params if p.grad is not None)
    return [g for g in grads if g.numel()]


def gradient_norm(grads: list[Tensor], all_reduce: Callable[[Tensor], None], device: torch.device, replicas: int = 1) -> float:
    """The L2 norm of the whole gradient. `all_reduce` sums a tensor over ranks in place; all ranks get the same number.

    Each shard is on `replicas` of the ranks.
    """
    square = torch.zeros((), dtype=torch.float64, device=device)
    if grads:
        norms = torch._foreach_norm(grads)
        square += torch.stack([n.double() for n in norms]).square().sum().to(device)
    all_reduce(square)
    square /= replicas
    return math.sqrt(value) if math.isfinite(value := square.item()) else math.inf


@dataclass(frozen=True)
class Update:
    """One model's part of an optimiser step, not yet taken: its loss and gradient norm over all ranks, and the rate to step with."""

    optimizer: torch.optim.Optimizer
    grads: list[Tensor]
    loss: float
    norm: float
    lr: float

    @property
    def finite(self) -> bool:
        """Whether it may be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    def take(self, clip: float) -> None:
        """Step, with gradients scaled to a norm of `clip` where they exceed it (0: not)."""
        if clip and self.norm > clip:
            scale_gradients(self.grads, clip / self.norm)
        set_learning_rate(self.optimizer, self.lr)
        self.optimizer.step()


def scale_gradients(grads: list[Tensor], factor: float) -> None:
    """Multiply in place."""
    if grads:
        torch._foreach_mul_(grads, factor)


def ensure_state(optimizer: torch.optim.AdamW) -> None:
    """Give every parameter the state that AdamW would make at its first step: zeros. Checkpoints always have it."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
