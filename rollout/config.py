"""Settings of the prompts and of generation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]


class SourceConfig(BaseModel):
    """One set of prompts: exactly one of `task`, `gym`, `path` and `hub` says where it comes from."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    task: str | None = Field(None, description="a built-in procedural task, e.g. addition")
    gym: str | None = Field(None, description="a reasoning-gym task (needs the extra `gym`)")
    path: str | None = Field(None, description="JSONL or Parquet file, or a glob of them")
    hub: str | None = Field(None, description="a Hugging Face data set by name, or a local folder laid out as one")
    subset: str | None = Field(None, description="the data set's configuration name, e.g. main")
    split: str = Field("train", description="the data set's split")
    options: dict[str, Any] = Field(default_factory=dict, description="settings of a task, e.g. digits = 2")
    prompt_field: str = Field("prompt", description="column with the prompt (text, or a list of chat messages); dots reach into nested columns")
    answer_field: str = Field("answer", description="column with the gold answer; dots reach into nested columns, e.g. reward_model.ground_truth")
    verifier: str = Field("numeric", description="verifier that scores this set's answers")
    verifier_field: str | None = Field(None, description="column that names the verifier row by row")
    meta_fields: list[str] = Field(default_factory=list, description="further columns that the verifier is given, e.g. tests")
    weight: float = Field(1.0, gt=0, description="share of this set among all, by weight")


class DataConfig(BaseModel):
    """Where prompts come from, and how they become tokens."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    sources: list[SourceConfig] = Field(default_factory=lambda: [SourceConfig(task="addition")], description="training prompts, mixed by weight")
    eval_sources: list[SourceConfig] = Field(default_factory=list, description="held-out prompts; empty: a part of the training sources is held out")
    prompt_format: Literal["raw", "chat"] = Field("raw", description="raw: the text as it is; chat: through the tokenizer's chat template")
    system_prompt: str | None = Field(None, description="system message put before every chat prompt")
    template: dict[str, Any] = Field(default_factory=dict, description="settings of the chat template, e.g. enable_thinking = false")
    max_prompt_tokens: Positive = Field(256, description="longest prompt, in tokens")
    overlong_prompts: Literal["drop", "error"] = Field("drop", description="prompts of more than max_prompt_tokens: drop (counted) or error")
    retire_after: int = Field(0, ge=0, description="a prompt whose answers were all right in so many groups in a row is never drawn again; 0: off")
    curriculum: bool = Field(False, description="prompts that were nearly always or nearly never solved are drawn less often")
    curriculum_floor: float = Field(0.1, gt=0, le=1, description="with curriculum: least probability that a prompt is drawn when its turn comes in an epoch")
    shuffle: bool = Field(True, description="shuffle each epoch by the seed")
    heldout_share: float = Field(
        0.1, ge=0, lt=1, description="share of the questions, by a hash of their text, never trained on; not used when eval_sources are data sets"
    )


class RolloutConfig(BaseModel):
    """The engines and how they sample."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    engine: Literal["vllm", "fake"] = Field("vllm", description="fake: a deterministic engine for tests of ordering and faults")
    engines: Positive = Field(1, description="rollout workers, one engine each")
    engine_gpus: float = Field(0, ge=0, description="GPUs per engine (its tensor-parallel size when above 1); 0: CPU")
    engine_cpus: float = Field(0.25, gt=0, description="CPUs that Ray counts per rollout worker")
    engine_threads: Positive = Field(1, description="OpenMP threads of a CPU engine")
    engine_dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="weights in the engine")
    group_size: Positive = Field(8, description="answers per prompt (G)")
    max_tokens: Positive = Field(32, description="generation budget per answer, in tokens (L)")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; log-probabilities are taken at it on both sides")
    top_p: float = Field(1.0, description="refused unless 1: training needs the whole distribution")
    top_k: int = Field(0, description="refused unless 0: training needs the whole distribution")
    min_p: float = Field(0.0, description="refused unless 0: training needs the whole distribution")
    repetition_penalty: float = Field(1.0, description="refused unless 1: training needs the whole distribution")
    stop: list[str] = Field(default_factory=list, description="strings that end an answer; they are part of it")
    max_sequences: Positive = Field(256, description="answers that an engine generates at once")
    max_model_len: int | None = Field(None, description="context of the engine, in tokens; default: max_prompt_tokens + max_tokens")
    memory_utilization: float = Field(0.85, gt=0, le=1, description="share of GPU memory for the engine")
    kv_cache_gb: float = Field(1.0, gt=0, description="key-value cache of a CPU engine, GiB")
    eager: bool = Field(False, description="no compilation and no CUDA graphs (always so on CPU)")
    engine_options: dict[str, Any] = Field(default_factory=dict, description="further arguments of vLLM's AsyncEngineArgs")
    max_staleness: int = Field(0, ge=0, description="batches by which the policy that generates may lag (k); 0: synchronous")
    weight_update: Literal["in_flight", "drained"] = Field(
        "in_flight", description="new weights come in the middle of answers (in_flight), or once an engine has finished those that it has (drained)"
    )
    kv_on_update: Literal["keep", "recompute"] = Field("recompute", description="requests in flight at a weight update: keep their keys and values, or recompute them")
    group_timeout: float = Field(600.0, gt=0, description="seconds for one attempt at generating a group")
    attempts: Positive = Field(3, description="attempts at a group before it is failed(generation)")
    weight_transfer: Literal["auto", "shm", "nccl", "ipc"] = Field("auto", description="shm on CPU, nccl or ipc on GPUs; auto picks by the device")
    colocate: bool = Field(False, description="engine and learner take turns on one device: engines sleep while the learner trains, giving up their weights and cache, and get all weights again when they wake; max_staleness must be 0")
    weight_delta: bool = Field(False, description="engines on other hosts than the learner's are sent only the elements whose bits changed, over shm; the whole where that is no smaller")
    logp_tolerance: float = Field(0.0, ge=0, description="largest mean difference of engine and learner log-probabilities at the start; 0: 1e-4 in float32, 0.05 in 16 bits")
