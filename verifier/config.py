"""Settings of the verifiers and their pool."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]


class VerifyConfig(BaseModel):
    """The verifier pool: Ray actors with killable processes."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    verifier_actors: Positive = Field(1, description="verifier actors")
    verifier_processes: Positive = Field(1, description="killable processes per verifier actor")
    verifier_cpus: float = Field(0.1, gt=0, description="CPUs that Ray counts per verifier actor")
    verify_timeout: float = Field(10.0, gt=0, description="seconds per answer, from the moment a process starts on it")
    verify_memory_mb: Positive = Field(2048, description="memory of one verifier process, MiB")
    on_verifier_error: Literal["drop", "score_without"] = Field(
        "drop", description="a group with an answer that has no reward: drop it whole, or score it without that answer"
    )
    verifier_error_rate: float = Field(
        0.05, gt=0, le=1, description="share of answers without a reward, by a fault of ours, that raises an alarm"
    )
    verifier_options: dict[str, dict[str, Any]] = Field(default_factory=dict, description="settings by verifier name")
    reward_weights: dict[str, float] = Field(
        default_factory=dict,
        description="several verifiers on every answer, by name and weight (`row`: the row's own); empty: the row's alone",
    )
