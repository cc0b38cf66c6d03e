"""The schedule's values, what decays, and the gradient's norm.

Not covered: AdamW's own arithmetic, which is torch's.
"""

from __future__ import annotations

import math

import pytest
import torch

from learner.config import OptimConfig
from learner.optim import gradient_norm, learning_rate, make_adamw


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("constant", {0: 0.25, 3: 1.0, 4: 1.0, 11: 1.0, 50: 1.0}),
        ("linear", {0: 0.25, 3: 1.0, 4: 1.0, 7: 0.1 + 0.9 * 4 / 7, 11: 0.1, 50: 0.1}),
        ("cosine", {0: 0.25, 3: 1.0, 4: 1.0, 7: 0.1 + 0.45 * (1 + math.cos(3 * math.pi / 7)), 11: 0.1, 50: 0.1}),
    ],
)
def test_the_schedule(schedule: str, values: dict[int, float]) -> None:
    config = OptimConfig(lr=1.0, lr_schedule=schedule, lr_warmup_steps=4, lr_min=0.1)
    for step, want in values.items():
        assert learning_rate(step, 12, config) == pytest.approx(want), step


def test_a_run_of_one_step_has_the_peak() -> None:
    assert learning_rate(0, 1, OptimConfig(lr=1.0, lr_schedule="linear")) == 1.0


def test_decay_is_on_matrices_only() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optimizer = make_adamw(model, OptimConfig(lr=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    factors = [1 - 0.1 * 0.5 if p.ndim == 2 else 1.0 for p in before]
    for p, b, f in zip(model.parameters(), before, factors, strict=True):
        torch.testing.assert_close(p.detach(), b * f)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_has_an_infinite_norm(bad: float) -> None:
    cpu = torch.device("cpu")
    assert gradient_norm([torch.tensor([3.0]), torch.tensor([4.0])], lambda t: None, cpu) == pytest.approx(5.0)
    assert gradient_norm([torch.tensor([3.0, bad])], lambda t: None, cpu) == math.inf
    assert gradient_norm([], lambda t: None, cpu) == 0.0
    assert gradient_norm([torch.tensor([3.0])], lambda t: t.mul_(4), cpu) == pytest.approx(6.0), "ranks add squares"
