"""What a run needs before its actors: the model's folder, the tokenizer, the objective, examples for the warm-up."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.config import RunConfig, resolved_objective
from cluster.services import ModelFacts
from learner.config import ObjectiveConfig
from learner.settings import LearnerSettings
from learner.variants import inert_clip
from rollout import chat, tiny
from rollout.engine import context_length
from rollout.errors import UserError
from rollout.prompts import PromptStream

if TYPE_CHECKING:
    from learner.warmup import Example

TINY = "tiny"


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before Ray starts. `warm_folder` is where the warm-up's result is kept."""

    facts: ModelFacts
    settings: LearnerSettings
    tokenizer: Any
    tokenizer_folder: str
    stream: PromptStream
    warm_folder: Path
    notes: tuple[str, ...]


def transfer_backend(cfg: RunConfig) -> str:
    """`shm`, `nccl` or `ipc`: `auto` is nccl where the engines have GPUs of their own."""
    chosen = cfg.rollout.weight_transfer
    if chosen != "auto":
        return chosen
    return "nccl" if cfg.rollout.engine_gpus and not cfg.rollout.colocate else "shm"


def prepare(cfg: RunConfig, run_dir: Path) -> Prepared:
    """Build or find the model, and load what describes it. Raises UserError for what the user gave wrongly."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar for files that take milliseconds
    objective = resolved_objective(cfg)
    folder = tiny_model(cfg, run_dir) if cfg.model.model == TINY else whole_path(cfg.model.model)
    value_model = cfg.critic.value_model and whole_path(cfg.critic.value_model)
    tokenizer = chat.load_tokenizer(folder, cfg.model.trust_remote_code)
    tokenizer_folder = run_dir / "tokenizer"
    tokenizer.save_pretrained(tokenizer_folder)
    stops = chat.stop_token_ids(tokenizer, chat.generation_eos(folder), chat=cfg.data.prompt_format == "chat")
    context = context_length(cfg.rollout, cfg.data.max_prompt_tokens, cfg.eval.eval_max_tokens)
    backend = transfer_backend(cfg)
    # vLLM knows its own transfers by name, and ours by the name under which rollout.receive registers it.
    facts = ModelFacts(folder, tuple(stops), context, "winnow_shm" if backend == "shm" else backend)
    warm_folder = warmup_folder(cfg, run_dir)
    settings = LearnerSettings(
        model=str(warm_folder) if (warm_folder / "config.json").is_file() else folder,
        config=cfg.model,
        optim=cfg.optim,
        objective=objective,
        temperature=cfg.rollout.temperature,
        max_tokens=cfg.rollout.max_tokens,
        total_steps=cfg.steps * cfg.optim.minibatches * cfg.optim.epochs,
        ratio_to=objective.ratio_to or "old",
        # The reference is what RL starts from, which after a warm-up is its result.
        reference=str(warm_folder) if cfg.warmup.warmup_steps else folder,
        reward_weights=tuple(cfg.verify.reward_weights.values()) or None,
        critic=cfg.critic.model_copy(update={"value_model": value_model}),
        seed=cfg.seed,
    )
    if objective.baseline == "critic" and value_model is not None:
        from learner.model import check_value_model

        check_value_model(value_model, folder, cfg.model.trust_remote_code)
    stream = PromptStream(cfg.data, tokenizer, cfg.seed, run_dir)
    return Prepared(facts, settings, tokenizer, str(tokenizer_folder), stream, warm_folder, notes_of(cfg, objective))


def whole_path(name: str) -> str:
    """A checkpoint folder's absolute path, since actors have another working directory; the name of what is on a hub as it is."""
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def notes_of(cfg: RunConfig, objective: ObjectiveConfig) -> tuple[str, ...]:
    """What the user should know of the resolved flags."""
    flags = {k: v for k, v in objective.model_dump().items() if v is not None}
    notes = [f"objective {cfg.variant or 'grpo'}: " + " ".join(f"--{k} {v}" for k, v in flags.items())]
    if objective.baseline == "critic":
        inert = "gae_lambda" if cfg.critic.gae_length_alpha is not None else ""
        flags = {k: v for k, v in cfg.critic.model_dump().items() if v is not None and k != inert}
        frozen = f": the policy stays as it is for the first {cfg.critic.value_pretrain} batches, and moves in {cfg.steps} more"
        notes.append("critic " + " ".join(f"--{k} {v}" for k, v in flags.items()) + (frozen if cfg.critic.value_pretrain else ""))
    if inert_clip(objective, cfg.optim.minibatches, cfg.optim.epochs):
        notes.append("one optimiser step a batch, with the ratio to the policy that began it: every ratio is 1, and no clip can bind")
    return tuple(notes)


def tiny_model(cfg: RunConfig, run_dir: Path) -> str:
    """Make the tiny model's checkpoint: character-level tokenizer, random weights by the seed."""
    from learner.model import build_tiny

    folder = run_dir / "model"
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = tiny.build_tokenizer(folder)
        build_tiny(folder, tiny.tiny_model_config(tokenizer, cfg.model.tiny_hidden, cfg.model.tiny_layers), warm_seed(cfg))
    there = json.loads((folder / "config.json").read_text())
    for key, name in (("tiny_hidden", "hidden_size"), ("tiny_layers", "num_hidden_layers")):
        if there[name] != (given := getattr(cfg.model, key)):
            raise UserError(f"{key} = {given} is not the {key} = {there[name]} of the model in {folder}: leave it as it was, or start anew")
    return str(folder)


def warm_seed(cfg: RunConfig) -> int:
    """The seed of the initial weights and the warm-up."""
    return cfg.seed if cfg.warmup.warmup_seed is None else cfg.warmup.warmup_seed


def warmup_folder(cfg: RunConfig, run_dir: Path) -> Path:
    """Where the warm-up's result is, or will be, kept."""
    return Path(cfg.warmup.warmup_dir or run_dir).absolute() / f"warmup-{warmup_key(cfg)}"


def warmup_key(cfg: RunConfig) -> str:
    """Names all that the warm-up's result depends on."""
    parts = {
        "warmup": cfg.warmup.model_dump(exclude={"warmup_dir"}),
        "seed": warm_seed(cfg),
        "data": cfg.data.model_dump(),
        "model": {k: getattr(cfg.model, k) for k in ("model", "tiny_hidden", "tiny_layers", "compute_dtype")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def warmup_examples(cfg: RunConfig, prepared: Prepared, run_dir: Path) -> list[list[Example]]:
    """Token ids of every supervised batch; a completion ends with its stop id."""
    settings = cfg.warmup
    stream = PromptStream(cfg.data, prepared.tokenizer, warm_seed(cfg) + 1, run_dir)
    batches = tiny.warmup_batches(stream, warm_seed(cfg), settings.warmup_batch, settings.warmup_guess_share, settings.warmup_guess_right)
    texts = [next(batches) for _ in range(settings.warmup_steps)]
    flat = [text for batch in texts for pair in batch for text in pair]
    ids = [np.array(i, dtype=np.int32) for i in prepared.tokenizer(flat, add_special_tokens=False)["input_ids"]]
    end = np.array(prepared.facts.stop_token_ids[:1], dtype=np.int32)
    pairs: list[Example] = [(ids[i], np.concatenate([ids[i + 1], end])) for i in range(0, len(ids), 2)]
    size = settings.warmup_batch
    return [pairs[i : i + size] for i in range(0, len(pairs), size)]
