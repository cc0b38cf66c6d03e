"""The one typed tree of settings: every key of a recipe and every flag of the command line is a field of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from learner.config import BufferConfig, CriticConfig, ModelConfig, ObjectiveConfig, OptimConfig
from learner.variants import check_critic, resolve_objective
from rollout.config import DataConfig, RolloutConfig
from rollout.errors import UserError
from verifier.config import VerifyConfig

Positive = Annotated[int, Field(gt=0)]


class EvalConfig(BaseModel):
    """Evaluation on held-out prompts: greedy accuracy, and avg@k, pass@k, maj@k when `eval_samples` > 0."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    eval_every: int = Field(0, ge=0, description="evaluate after every so many steps; 0: only before and after")
    eval_prompts: int = Field(256, ge=0, description="held-out prompts; 0: no evaluation")
    eval_samples: int = Field(0, ge=0, description="sampled answers per held-out prompt for avg@k, pass@k and maj@k (k); 0: greedy only")
    eval_temperature: float = Field(1.0, gt=0, description="temperature of the sampled answers")
    eval_top_p: float = Field(1.0, gt=0, le=1, description="nucleus of the sampled answers")
    eval_max_tokens: int = Field(0, ge=0, description="generation budget in evaluation; 0: max_tokens")
    keep_best: bool = Field(False, description="keep an export of the step with the best held-out greedy accuracy")


class WarmupConfig(BaseModel):
    """A supervised phase before RL, for a model that starts from nothing."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    warmup_steps: int = Field(0, ge=0, description="supervised steps; 0: off")
    warmup_batch: Positive = Field(64, description="examples per supervised step")
    warmup_lr: float = Field(1e-3, gt=0, description="peak learning rate of the supervised phase (cosine to a tenth)")
    warmup_guess_share: float = Field(0.7, ge=0, le=1, description="share of examples that guess instead of working the sum out")
    warmup_guess_right: float = Field(1 / 3, ge=0, le=1, description="share of the guesses that are right")
    warmup_dir: str | None = Field(None, description="folder in which runs with the same warm-up share its result; default: the run's own")
    warmup_seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="seed of the warm-up and of the tiny model; default: seed")


class LogConfig(BaseModel):
    """What a run leaves behind."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    display: Literal["auto", "rich", "plain", "none"] = Field("auto", description="live display; auto: rich on a terminal, else lines")
    wandb: Literal["auto", "online", "offline", "off"] = Field("auto", description="auto: online with a key, offline without")
    wandb_project: str = Field("winnow", description="project in wandb")
    tensorboard: bool = Field(False, description="event files for TensorBoard under RUN/tensorboard (needs the extra `tensorboard`)")
    sample_groups: int = Field(4, ge=0, description="groups of every step that go to samples.jsonl")
    checkpoint_every: int = Field(0, ge=0, description="checkpoint after every so many steps; 0: only at the end and on a stop")
    keep_checkpoints: Positive = Field(2, description="newest checkpoints that are kept")
    export_dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of the Hugging Face export")


class ClusterConfig(BaseModel):
    """Where the actors run."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    ray_address: str | None = Field(None, description="Ray cluster to join; default: RAY_ADDRESS, or a private one on this machine")
    placement_timeout: float = Field(600.0, gt=0, description="seconds to wait for the actors' places, where they may still come")
    autoscaling: bool = Field(False, description="the cluster adds nodes by itself: wait for them where it lacks what the run needs")
    start_timeout: float = Field(600.0, gt=0, description="seconds to wait for the actors' start")
    watchdog_seconds: float = Field(60.0, gt=0, description="a wait of the loop that takes so long is said in a line, again at twice, four times … that")
    max_restarts: int = Field(
        20, ge=0, description="engines, verifiers and learners that may be made again after a fault before the run stops"
    )


class RunConfig(BaseModel):
    """A run: steps of reinforcement learning on verifiable rewards."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field("run", description="name of the run")
    steps: int = Field(100, ge=0, description="batches to train on; those of --value_pretrain come before them")
    seed: int = Field(0, ge=-(2**63), le=2**63 - 1, description="seed of prompts, sampling and initial weights")
    run_dir: str | None = Field(None, description="run folder; default: runs/NAME-TIME")
    resume: bool | Literal["auto"] = Field(
        False, description="go on from the newest good checkpoint in run_dir; auto: if run_dir holds a run"
    )
    variant: str | None = Field(None, description="preset of objective flags: grpo, grpo-paper, dr_grpo, dapo, gspo, …")
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    verify: VerifyConfig = Field(default_factory=VerifyConfig)
    buffer: BufferConfig = Field(default_factory=BufferConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    warmup: WarmupConfig = Field(default_factory=WarmupConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)

    @property
    def batches(self) -> int:
        """Batches of the whole run: those that pre-train a value model, then `steps` that move the policy."""
        return self.steps + (self.critic.value_pretrain if self.objective.baseline == "critic" else 0)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for sentence in cross_checks(self):
            raise UserError(sentence)
        return self


@cache
def fields() -> dict[str, FieldInfo]:
    """Every leaf of the tree by its dotted name, in order."""
    return dict(_leaves(RunConfig, ""))


def _leaves(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _leaves(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, info


@cache
def flag_names() -> dict[str, str]:
    """Flag, without its dashes -> dotted key: every key by its dotted name and by its bare last part."""
    return {name: key for key in fields() for name in (key.rsplit(".", 1)[-1], key)}


def cross_checks(cfg: RunConfig) -> Iterator[str]:
    """Everything that is wrong between two settings each of which is right, one sentence for each, that names key, value and remedy."""
    yield from _check_run(cfg)
    yield from _check_sources(cfg)
    yield from _check_sampling(cfg)
    yield from _check_batches(cfg)
    yield from _check_objective(cfg)
    yield from _check_devices(cfg)
    yield from _check_eval(cfg)


def _check_run(cfg: RunConfig) -> Iterator[str]:
    if cfg.resume and cfg.run_dir is None:
        yield f"resume = {toml_like(cfg.resume)} says nothing of which run to go on with: add --run_dir PATH"
    if cfg.optim.lr_min > cfg.optim.lr:
        yield f"optim.lr_min = {cfg.optim.lr_min} lies above optim.lr = {cfg.optim.lr}, where the schedule starts: lower it"


def _check_sources(cfg: RunConfig) -> Iterator[str]:
    data = cfg.data
    if data.curriculum_floor != DataConfig().curriculum_floor and not data.curriculum:
        yield f"data.curriculum_floor = {data.curriculum_floor} means nothing with data.curriculum = false: set curriculum to true"
    if not data.sources:
        yield 'data.sources = [] leaves nothing to train on: give at least one source, such as task = "addition"'
    for key, sources in (("data.sources", data.sources), ("data.eval_sources", data.eval_sources)):
        for i, source in enumerate(sources):
            given = [k for k in ("task", "gym", "path", "hub") if getattr(source, k) is not None]
            if len(given) != 1:
                said = "gives none" if not given else "gives " + " and ".join(f"{k} = {getattr(source, k)!r}" for k in given)
                yield f"{key}[{i}] {said} of task, gym, path and hub: give exactly one of them"
            elif source.options and given[0] in ("path", "hub"):
                yield f"{key}[{i}].options = {source.options} are settings of a task, not of a data set: remove them"
    if data.prompt_format == "raw" and data.system_prompt is not None:
        yield f'data.system_prompt = {data.system_prompt!r} needs a chat template: set data.prompt_format = "chat" or remove it'
    if data.prompt_format == "raw" and data.template:
        yield f'data.template = {data.template} needs a chat template: set data.prompt_format = "chat" or remove it'


def _check_sampling(cfg: RunConfig) -> Iterator[str]:
    roll = cfg.rollout
    for key, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        value = getattr(roll, key)
        if value != neutral and not (key == "top_k" and value == -1):
            yield (
                f"rollout.{key} = {value} cuts the distribution that the loss is taken under: "
                f"set it to {neutral} (evaluation has eval_temperature and eval_top_p of its own)"
            )
    need = cfg.data.max_prompt_tokens + roll.max_tokens
    if roll.max_model_len is not None and need > roll.max_model_len:
        yield (
            f"rollout.max_model_len = {roll.max_model_len} holds no prompt of data.max_prompt_tokens = {cfg.data.max_prompt_tokens} "
            f"with an answer of rollout.max_tokens = {roll.max_tokens}: raise it to {need} or lower one of the two"
        )
    if roll.weight_update == "drained" and roll.max_staleness == 0:
        yield (
            "rollout.weight_update = 'drained' means nothing with rollout.max_staleness = 0, where no answer is under way at an update: "
            "set weight_update to in_flight or max_staleness to 1"
        )
    if roll.weight_update == "drained" and roll.kv_on_update == "keep":
        yield (
            "rollout.kv_on_update = 'keep' means nothing with rollout.weight_update = 'drained', where no answer is under way at an update: "
            "remove one of the two"
        )
    if roll.max_staleness > 0 and cfg.buffer.overprovision > 0:
        yield (
            f"buffer.overprovision = {cfg.buffer.overprovision} means nothing with rollout.max_staleness = {roll.max_staleness}, "
            "whose engines never run dry: set overprovision to 0 or max_staleness to 0"
        )


def _check_batches(cfg: RunConfig) -> Iterator[str]:
    groups, parts = cfg.buffer.batch_size, cfg.optim.minibatches
    if groups % parts:
        best = max(m for m in range(1, parts + 1) if groups % m == 0)
        yield f"optim.minibatches = {parts} does not divide buffer.batch_size = {groups}: take {best}, or another batch_size"
    answers = groups // parts * cfg.rollout.group_size
    if cfg.model.learner_ranks > answers:
        ranks = cfg.model.learner_ranks
        yield f"model.learner_ranks = {ranks} is more than the {answers} answers of a mini-batch: lower it or raise batch_size"


def resolved_objective(cfg: RunConfig) -> ObjectiveConfig:
    """The objective with every default filled in that depends on another setting. Raises UserError where it has no meaning."""
    return resolve_objective(
        cfg.objective,
        max_staleness=cfg.rollout.max_staleness,
        minibatches=cfg.optim.minibatches,
        epochs=cfg.optim.epochs,
        variant=cfg.variant,
        group_size=cfg.rollout.group_size,
        max_tokens=cfg.rollout.max_tokens,
    )


def _check_objective(cfg: RunConfig) -> Iterator[str]:
    try:
        check_critic(cfg.critic, resolved_objective(cfg), cfg.variant, cfg.optim.epochs)
    except UserError as error:
        yield str(error)


def _check_devices(cfg: RunConfig) -> Iterator[str]:
    roll, model = cfg.rollout, cfg.model
    if roll.engine_gpus > 1 and roll.engine_gpus % 1:
        yield f"rollout.engine_gpus = {roll.engine_gpus} is no whole number of GPUs: take a share below 1, or a whole number such as 2"
    if model.learner_gpus > 1:
        yield f"model.learner_gpus = {model.learner_gpus} is more than a rank can use: set it to 1 and raise learner_ranks"
    if roll.weight_transfer in ("nccl", "ipc"):
        for key, gpus in (("rollout.engine_gpus", roll.engine_gpus), ("model.learner_gpus", model.learner_gpus)):
            if gpus == 0:
                yield f"rollout.weight_transfer = {roll.weight_transfer!r} needs GPUs on both sides and {key} is 0: set it to auto or shm"
                break
    if model.learner_ranks % model.learner_replicas:
        yield (
            f"model.learner_replicas = {model.learner_replicas} does not divide learner_ranks = {model.learner_ranks}: "
            "give a divisor, such as the number of nodes"
        )
    if model.lora_alpha != ModelConfig.model_fields["lora_alpha"].default and not model.lora_rank:
        yield f"model.lora_alpha = {model.lora_alpha:g} scales adapters and model.lora_rank is 0: set that, such as 16, or drop lora_alpha"
    if model.cpu_offload and not model.learner_gpus:
        yield "model.cpu_offload = true moves nothing where learner_gpus = 0: leave it out, or give the learner GPUs"
    if model.attention == "segments" and model.learner_gpus and model.compute_dtype == "float32":
        yield "model.attention = 'segments' has no float32 kernel on GPUs: set model.compute_dtype to bfloat16 or attention to sdpa"
    yield from _check_colocation(cfg)
    if roll.weight_delta and (roll.weight_transfer in ("nccl", "ipc") or roll.weight_transfer == "auto" and roll.engine_gpus):
        yield f"rollout.weight_delta = true works over shm and rollout.weight_transfer is {roll.weight_transfer!r}: set that to shm"
    if model.attention == "flash_attention_2":
        if model.learner_gpus == 0:
            yield "model.attention = 'flash_attention_2' runs on GPUs and model.learner_gpus is 0: set it to auto or sdpa"
        elif model.compute_dtype == "float32":
            yield "model.attention = 'flash_attention_2' has no float32 kernel: set model.compute_dtype to bfloat16 or attention to sdpa"


def _check_colocation(cfg: RunConfig) -> Iterator[str]:
    roll, model = cfg.rollout, cfg.model
    if not roll.colocate:
        return
    if roll.max_staleness:
        yield f"rollout.colocate = true takes turns and rollout.max_staleness = {roll.max_staleness} does not wait for them: set it to 0"
    if roll.weight_transfer in ("nccl", "ipc"):
        yield f"rollout.colocate = true sends all weights over shm and rollout.weight_transfer is {roll.weight_transfer!r}: set that to auto"
    if (roll.engine_gpus > 0) != (model.learner_gpus > 0):
        here = f"rollout.engine_gpus = {roll.engine_gpus:g} and model.learner_gpus = {model.learner_gpus:g}"
        yield f"rollout.colocate = true shares a device and {here} do not: give each a share of one GPU, such as 0.5, or none"
    elif (shares := roll.engines * roll.engine_gpus + model.learner_ranks * model.learner_gpus) > 1:
        yield (
            f"rollout.colocate = true shares one GPU, and rollout.engine_gpus = {roll.engine_gpus:g} for {roll.engines} engines and "
            f"model.learner_gpus = {model.learner_gpus:g} for {model.learner_ranks} ranks come to {shares:g}: take 0.5 each of one engine and one rank"
        )


def _check_eval(cfg: RunConfig) -> Iterator[str]:
    ev, roll = cfg.eval, cfg.rollout
    if ev.eval_prompts == 0:
        for key in ("eval_every", "eval_samples", "keep_best"):
            if getattr(ev, key):
                yield f"eval.{key} = {toml_like(getattr(ev, key))} needs held-out prompts and eval.eval_prompts is 0: raise that"
    elif ev.keep_best and ev.eval_every == 0:
        yield "eval.keep_best = true has nothing to choose from with eval.eval_every = 0: set eval_every"
    need = cfg.data.max_prompt_tokens + ev.eval_max_tokens
    if roll.max_model_len is not None and need > roll.max_model_len:
        yield (
            f"eval.eval_max_tokens = {ev.eval_max_tokens} with data.max_prompt_tokens = {cfg.data.max_prompt_tokens} does not fit into "
            f"rollout.max_model_len = {roll.max_model_len}: raise max_model_len to {need} or lower eval_max_tokens"
        )


def toml_like(value: object) -> str:
    """A value as a recipe would spell it, for messages."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
