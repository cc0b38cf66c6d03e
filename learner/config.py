"""Settings of the model, the optimiser, the objective and the sampling buffer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]


class ModelConfig(BaseModel):
    """The policy and how it is sharded."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str = Field("tiny", description="checkpoint folder or hub name; tiny: a small Qwen3 with a character-level tokenizer, made by code")
    tiny_hidden: Positive = Field(128, description="hidden size of the tiny model")
    tiny_layers: Positive = Field(4, description="layers of the tiny model")
    trust_remote_code: bool = Field(False, description="run code that comes with the checkpoint")
    learner_ranks: Positive = Field(1, description="FSDP2 ranks, one actor each")
    learner_gpus: float = Field(0, ge=0, description="GPUs per learner rank; 0: CPU")
    learner_cpus: float = Field(0.25, gt=0, description="CPUs that Ray counts per learner rank")
    learner_threads: Positive = Field(1, description="OpenMP threads of a learner rank")
    compute_dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the forward and backward pass; master weights are float32")
    attention: Literal["auto", "segments", "sdpa", "flash_attention_2"] = Field("auto", description="attention kernel; segments: sequence by sequence, without padding or mask; auto: flash-attention on GPUs where installed, else segments where the model has full causal attention, else sdpa")
    share_prompts: bool = Field(True, description="answers of a group in one micro-batch share the work on their prompt (attention segments on CPU)")
    micro_tokens: Positive = Field(8192, description="token budget of a micro-batch, per rank")
    row_tokens: int = Field(0, ge=0, description="length of a packed row under sdpa; 0: chosen from the batch")
    logit_chunk: int = Field(0, ge=0, description="tokens whose logits exist at once; 0: as many as 128 MiB hold")
    activation_checkpointing: bool = Field(False, description="recompute each layer in the backward pass")
    reshard_after_forward: bool = Field(True, description="FSDP2: free gathered layers after the forward pass; false: only after the backward pass")
    cpu_offload: bool = Field(False, description="keep shards of weights, gradients and optimiser in host memory, and step there")
    learner_replicas: Positive = Field(1, description="HSDP: copies of the model, each sharded over learner_ranks / learner_replicas ranks; one per node saves traffic between nodes")
    lora_rank: int = Field(0, ge=0, description="train low-rank adapters of this rank on all linear layers, merged when published; 0: train all weights")
    lora_alpha: float = Field(32.0, gt=0, description="scale of the adapters, by lora_rank")


class OptimConfig(BaseModel):
    """AdamW and its schedule."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

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

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    batch_size: Positive = Field(32, description="groups per batch (B)")
    refill_limit: int = Field(0, ge=0, description="groups resolved without being kept since the last batch, before refilling stops; 0: 10 · batch_size")
    on_refill_limit: Literal["raise", "short", "relax"] = Field("raise", description="a batch that cannot be filled: stop, train on what there is, or fill up with masked groups")
    overprovision: float = Field(0.0, ge=0, description="at max_staleness 0: share of extra groups to dispatch beyond the admission rule; their surplus is never trained")
    max_failed_groups: int = Field(100, ge=0, description="groups that may end as failed before the run stops")


LossAgg = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "seq-mean-token-sum", "token-sum", "prompt-mean"]


class ObjectiveConfig(BaseModel):
    """The objective: advantages, the loss per token, and how it is averaged. docs/objectives.md has the papers."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    ratio_to: Literal["old", "behav"] | None = Field(
        None,
        description="denominator of the ratio: the policy when the batch began (old) or the one that sampled (behav); "
        "default: behav when max_staleness > 0 and minibatches · epochs = 1, else old",
    )
    baseline: Literal["group", "loo", "batch", "critic"] = Field(
        "group", description="what is subtracted from the reward: the mean of the group, of its other answers, of the batch; or a value"
    )
    adv_norm: Literal["std", "none", "batch"] = Field(
        "std", description="divide advantages by the group's std, not at all, or by their std over the batch"
    )
    std_ddof: Literal[0, 1] = Field(0, description="0: population std; 1: sample std")
    std_eps: float = Field(0.0, ge=0, description="added to the std")
    spread_tol: float = Field(1e-6, ge=0, description="a group whose raw rewards span no more than this is not informative")
    reward_norm: Literal["sum", "gdpo"] = Field(
        "sum", description="several rewards: weighted sum first, or normalise each within its group first (GDPO)"
    )
    policy_loss: Literal["clip", "cispo", "sapo", "reinforce"] = Field(
        "clip", description="the policy term per token; reinforce has no ratio"
    )
    clip: float = Field(0.2, ge=0, le=1, description="the ratio is kept above 1 - clip")
    clip_high: float | None = Field(None, ge=0, description="the ratio is kept below 1 + clip_high; default: clip")
    dual_clip: float | None = Field(None, gt=1, description="at a negative advantage the term is at most this times |A|; default: off")
    ratio_level: Literal["token", "sequence"] = Field(
        "token", description="one ratio per token, or one per answer: the geometric mean of its tokens' (GSPO)"
    )
    tau_pos: float = Field(1.0, gt=0, description="temperature of SAPO's gate at positive advantages")
    tau_neg: float = Field(1.05, gt=0, description="temperature of SAPO's gate at negative advantages")
    kl_coef: float = Field(0.001, ge=0, description="weight of the KL term; 0: the reference model is never loaded")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the KL; kl_in = reward takes k1")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="where the KL goes: into the loss per token, or off the reward before the baseline"
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy over the full vocabulary, which is raised")
    overlong: Literal["score", "mask", "penalty"] = Field(
        "score", description="answers cut off at max_tokens: scored as any, left out of the loss, or a soft penalty by length"
    )
    overlong_cache: int = Field(0, ge=0, description="width of the soft penalty's warning zone, in tokens")
    filter_groups: bool = Field(
        False, description="dynamic sampling: groups without reward spread do not train, the buffer refills until the batch is full"
    )
    mismatch: Literal["none", "tis", "mis", "icepop", "seq-tis", "seq-mis", "geo-mask"] = Field(
        "none",
        description="correction of old against the sampling policy by a weight: truncated, masked above, masked on both sides; "
        "seq-: over the answer",
    )
    mismatch_cap: float = Field(2.0, gt=0, description="highest weight of the mismatch correction")
    mismatch_low: float = Field(0.5, ge=0, description="lowest weight that icepop and geo-mask keep")
    loss_agg: LossAgg = Field("token-mean", description="how the terms of all tokens become one loss")


class CriticConfig(BaseModel):
    """The value model of `--baseline critic`: how it is trained, and how advantages follow from it (VC-PPO, VAPO)."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    value_model: str | None = Field(None, description="checkpoint folder or hub name that the value model starts from, of the policy's architecture; default: what the policy starts from")
    value_pretrain: int = Field(0, ge=0, description="batches on which the value model alone is trained, with Monte-Carlo returns, before the policy moves for --steps more")
    value_lr: float | None = Field(None, gt=0, description="learning rate of the value model, constant after lr_warmup_steps; default: 10 · lr")
    value_epochs: Positive = Field(3, description="passes of the value model over each batch; those beyond epochs come after the policy's steps and move the value model alone")
    value_coef: float = Field(1.0, gt=0, description="weight of the value's loss, ½ (V - R)² averaged over all tokens of the step")
    value_clip: float | None = Field(None, gt=0, description="a value counts as moved by at most this within a batch; default: off")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="lambda of the policy's advantages")
    gae_lambda_value: float = Field(1.0, ge=0, le=1, description="lambda of the value's targets; 1: the Monte-Carlo return")
    gae_length_alpha: float | None = Field(None, gt=0, description="lambda of the policy's advantages by length, 1 - 1 / (alpha · tokens of the answer), in place of gae_lambda; default: off")
    positive_nll: float = Field(0.0, ge=0, description="weight of the negative log-likelihood of right answers, averaged over their tokens, in the policy's loss")
