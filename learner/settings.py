"""What a learner is told. Numbers and names only: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from learner.config import CriticConfig, ModelConfig, ObjectiveConfig, OptimConfig

LOSS_FLAGS = (
    "policy_loss",
    "clip",
    "clip_high",
    "dual_clip",
    "ratio_level",
    "tau_pos",
    "tau_neg",
    "kl_coef",
    "kl_estimator",
    "kl_in",
    "entropy_coef",
    "mismatch",
    "mismatch_cap",
    "mismatch_low",
    "loss_agg",
)

SAME_SHAPE = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers",
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip


def other_shape(value_model: str, value: Mapping[str, Any], policy: Mapping[str, Any]) -> str:
    """One sentence on the first setting of SAME_SHAPE in which both are known and differ; empty where there is none."""
    for name in SAME_SHAPE:
        here, there = value.get(name), policy.get(name)
        if here is not None and there is not None and here != there:
            return (
                f"value_model = {value_model!r} has {name} = {here} and the policy {there}: give a checkpoint of the policy's "
                "architecture, or leave value_model out"
            )
    return ""


@dataclass(frozen=True)
class LearnerSettings:
    """All that a learner is told. `ratio_to` is resolved; `max_tokens` is the generation budget L.

    `reference` is the checkpoint of the reference model (default: `model`), loaded only where a KL term has a weight.
    `critic` is used with `objective.baseline` critic alone; the value model starts from `critic.value_model`, else as the reference does.
    `seed` is that of torch's random numbers (dropout), which are otherwise other ones in every process.
    `total_steps` counts the policy's optimiser steps of the whole run, for the schedule.
    """

    model: str
    config: ModelConfig
    optim: OptimConfig
    objective: ObjectiveConfig
    temperature: float
    max_tokens: int
    total_steps: int
    ratio_to: str = "old"
    reference: str | None = None
    reward_weights: tuple[float, ...] | None = None
    critic: CriticConfig = field(default_factory=CriticConfig)
    seed: int = 0
