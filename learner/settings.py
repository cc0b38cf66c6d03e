"""What a learner is told. Numbers and names only: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class LearnerSettings:
    """All that a learner is told. `ratio_to` is resolved; `max_tokens` is the generation budget L.

    `reference` is the checkpoint of the reference model (default: `model`), loaded only where a KL term has a weight.
    `critic` is used with `objective.baseline` critic alone; the value model starts from `critic.value_model`, else as the reference does.
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
