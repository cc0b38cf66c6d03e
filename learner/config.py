"""Settings of the model, the optimiser, the objective and the sampling buffer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]


class ModelConfig(BaseModel):
    """The policy and how it is sharded."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field("tiny", description="checkpoint folder or hub name; tiny: a small Qwen3 with a character-level tokenizer, made by code")
    tiny_hidden: Positive = Field(128, description="hidden size of the tiny model")
    tiny_layers: Positive = Field(4, description="layers of the tiny model")
    trust_remote_code: bool = Field(False, description="run code that comes with the checkpoint")
    learner_ranks: Positive = Field(1, description="FSDP2 ranks, one actor each")
    learner_gpus: float = Field(0, ge=0, description="GPUs per learner rank; 0: CPU")
    learner_cpus: float = Field(0.25, gt=0, description="CPUs that Ray counts per learner rank")
    learner_threads: Positive = Field(1, description="OpenMP threads of a learner rank")
    compute_dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the forward and backward pass; master weights are float32")
    attention: Literal["auto", "sdpa", "flash_attention_2"] = Field("auto", description="attention kernel; auto: flash-attention on GPUs where installed, else sdpa")
    micro_tokens: Positive = Field(8192, description="token budget of a micro-batch, per rank")
    row_tokens: int = Field(0, ge=0, description="length of a packed row under sdpa; 0: chosen from the batch")
    logit_chunk: Positive = Field(2048, description="tokens whose logits exist at once")
    activation_checkpointing: bool = Field(False, description="recompute each layer in the backward pass")
    reshard_after_forward: bool = Field(True, description="FSDP2: free gathered layers after the forward pass")


class OptimConfig(BaseModel):
    """AdamW and its schedule."""

    model_config = ConfigDict(extra="forbid")

    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after the warm-up, over --steps")
    lr_warmup_steps: int = Field(0, ge=0, description="optimiser steps of linear ramp")
    lr_min: float = Field(0.0, ge=0, description="learning rate that linear and cosine end at")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay, on matrices")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW")
    eps: float = Field(1e-8, gt=0, description="AdamW")
    grad_clip: float = Field(1.0, ge=0, description="largest gradient norm; 0: off")
    minibatches: Positive = Field(1, description="parts that a batch is cut into, groups whole (M)")
    epochs: Positive = Field(1, description="passes over each batch (E)")
    max_nonfinite_steps: Positive = Field(3, description="skipped non-finite optimiser steps in a row that stop the run")


class BufferConfig(BaseModel):
    """Dynamic sampling."""

    model_config = ConfigDict(extra="forbid")

    batch_size: Positive = Field(32, description="groups per batch (B)")
    refill_limit: int = Field(0, ge=0, description="groups resolved without being kept since the last batch, before refilling stops; 0: 10 · batch_size")
    on_refill_limit: Literal["raise", "short", "relax"] = Field("raise", description="a batch that cannot be filled: stop, train on what there is, or fill up with masked groups")
    overprovision: float = Field(0.0, ge=0, description="at max_staleness 0: share of extra groups to dispatch beyond the admission rule; their surplus is never trained")
    max_failed_groups: int = Field(100, ge=0, description="groups that may end as failed before the run stops")
