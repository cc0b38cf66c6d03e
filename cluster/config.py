"""The one typed tree of settings: every key of a recipe and every flag of the command line is a field of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from learner.config import BufferConfig, ModelConfig, OptimConfig
from rollout.config import DataConfig, RolloutConfig
from verifier.config import VerifyConfig

Positive = Annotated[int, Field(gt=0)]


class EvalConfig(BaseModel):
    """Evaluation on held-out prompts: greedy accuracy, and avg@k, pass@k, maj@k when `eval_samples` > 0."""

    model_config = ConfigDict(extra="forbid")

    eval_every: int = Field(0, ge=0, description="evaluate after every so many steps; 0: only before and after")
    eval_prompts: int = Field(256, ge=0, description="held-out prompts; 0: no evaluation")
    eval_samples: int = Field(0, ge=0, description="sampled answers per held-out prompt for avg@k, pass@k and maj@k (k); 0: greedy only")
    eval_temperature: float = Field(1.0, gt=0, description="temperature of the sampled answers")
    eval_top_p: float = Field(1.0, gt=0, le=1, description="nucleus of the sampled answers")
    eval_max_tokens: int = Field(0, ge=0, description="generation budget in evaluation; 0: max_tokens")
    keep_best: bool = Field(False, description="keep an export of the step with the best held-out greedy accuracy")


class WarmupConfig(BaseModel):
    """A supervised phase before RL, for a model that starts from nothing (or `warmup_file` of examples)."""

    model_config = ConfigDict(extra="forbid")

    warmup_steps: int = Field(0, ge=0, description="supervised steps; 0: off")
    warmup_batch: Positive = Field(64, description="examples per supervised step")
    warmup_lr: float = Field(1e-3, gt=0, description="peak learning rate of the supervised phase (cosine to a tenth)")
    warmup_guess_share: float = Field(0.7, ge=0, le=1, description="share of examples that guess instead of working the sum out")
    warmup_guess_right: float = Field(1 / 3, ge=0, le=1, description="share of the guesses that are right")
    warmup_seed: int | None = Field(None, description="seed of the warm-up and of the tiny model; default: seed")


class LogConfig(BaseModel):
    """What a run leaves behind."""

    model_config = ConfigDict(extra="forbid")

    display: Literal["auto", "rich", "plain", "none"] = Field("auto", description="live display; auto: rich on a terminal, else plain lines")
    wandb: Literal["auto", "online", "offline", "off"] = Field("auto", description="auto: online with a key, offline without")
    wandb_project: str = Field("winnow", description="project in wandb")
    sample_groups: int = Field(4, ge=0, description="groups of every step that go to samples.jsonl")
    checkpoint_every: int = Field(0, ge=0, description="checkpoint after every so many steps; 0: only at the end and on a stop")
    keep_checkpoints: Positive = Field(2, description="newest checkpoints that are kept")
    export_dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of the Hugging Face export")


class ClusterConfig(BaseModel):
    """Where the actors run."""

    model_config = ConfigDict(extra="forbid")

    ray_address: str | None = Field(None, description="Ray cluster to join; default: RAY_ADDRESS, or a private one on this machine")
    placement_timeout: float = Field(60.0, gt=0, description="seconds to wait for the actors' places")
    start_timeout: float = Field(600.0, gt=0, description="seconds to wait for the actors' start")


class RunConfig(BaseModel):
    """A run: steps of reinforcement learning on verifiable rewards."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("run", description="name of the run")
    steps: int = Field(100, ge=0, description="batches to train on")
    seed: int = Field(0, description="seed of prompts, sampling and initial weights")
    run_dir: str | None = Field(None, description="run folder; default: runs/NAME-TIME")
    resume: bool = Field(False, description="go on from the newest good checkpoint in run_dir")
    variant: str | None = Field(None, description="preset of objective flags: grpo, grpo-paper, dr_grpo, dapo, gspo, …")
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    verify: VerifyConfig = Field(default_factory=VerifyConfig)
    buffer: BufferConfig = Field(default_factory=BufferConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    warmup: WarmupConfig = Field(default_factory=WarmupConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
