"""What the GPU script works on: a random model of a size, the settings that a rank would be given, and one process group of one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from learner.attention import NAME as SEGMENTS
from learner.model import Policy, build_tiny, load_policy, make_mesh
from learner.pack import Answer, PackSettings, build_micro, plan_step
from learner.parts import MicroBatch


@dataclass(frozen=True)
class Sharding:
    """The fields of `ModelConfig` that loading and sharding read, without pydantic, which a bare machine has not."""

    compute_dtype: str = "float32"
    attention: str = "auto"
    trust_remote_code: bool = False
    activation_checkpointing: bool = False
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    replicas: int = 1
    lora_rank: int = 0
    logit_chunk: int = 0


@dataclass(frozen=True)
class Size:
    """A Qwen3 of random weights and what is measured on it."""

    model: Mapping[str, Any]
    budgets: tuple[int, ...]
    answers: int
    mean: int
    longest: int
    prompt: int
    loss_tokens: int
    steps: int


def qwen3(hidden: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    """Settings of a model with tied head, two query heads per key head."""
    return dict(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 2, head_dim=hidden // heads if hidden < 1024 else 128, tie_word_embeddings=True,
        max_position_embeddings=32768, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip


SMALL = Size(qwen3(32, 2, 2, 96), budgets=(64,), answers=6, mean=10, longest=24, prompt=6, loss_tokens=48, steps=1)
FULL = Size(qwen3(1024, 28, 16, 151_936), (4096, 16384), answers=64, mean=500, longest=2048, prompt=100, loss_tokens=4096, steps=3)
CHECKED = qwen3(64, 3, 4, 512)
"""The model of the checks against float64: as small as they need, on any machine."""


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def start(where: torch.device) -> None:
    """The process group of this one rank, unless there is one."""
    if not dist.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo", init_method=f"file://{store}", rank=0, world_size=1)


def checkpoint(model: Mapping[str, Any], folder: Path) -> Path:
    """The random model as a folder, made once."""
    if not (folder / "config.json").exists():
        build_tiny(folder, dict(model), seed=0)
    return folder


def policy(folder: Path, where: torch.device, **sharding: Any) -> Policy:
    """Loaded and sharded over the one rank."""
    config: Any = Sharding(**sharding)
    return load_policy(str(folder), config, mesh=make_mesh(where), device=where)


def answers(size: Size, vocabulary: int, seed: int = 0) -> dict[int, Answer]:
    """Random tokens; log-normal lengths of the size's mean, prompts all of one length."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(np.log(size.mean) - 0.32, 0.8, size.answers)).round(), 2, size.longest).astype(int)
    done = [Answer.example(rng.integers(2, vocabulary, size.prompt), rng.integers(2, vocabulary, n)) for n in lengths]
    return dict(enumerate(done))


def packed(given: Mapping[int, Answer], budget: int, model: Policy, where: torch.device) -> list[MicroBatch]:
    """Micro-batches as the learner packs them for this model's attention."""
    single = model.hf.config._attn_implementation in (SEGMENTS, "flash_attention_2")
    plan = plan_step([a.size for a in given.values()], list(given), ranks=1, settings=PackSettings(budget, single_row=single))
    return [MicroBatch.on(where, build_micro(rows, given)) for rows in plan.micro[0]]


def padded(given: Mapping[int, Answer], budget: int, where: torch.device) -> list[MicroBatch]:
    """A row per answer, each as wide as the longest of all: what a trainer without packing computes."""
    longest = max(a.size for a in given.values())
    rows = max(1, budget // longest)
    order: Sequence[int] = list(given)
    batches = []
    for at in range(0, len(order), rows):
        micro = build_micro([[a] for a in order[at : at + rows]], given)
        batches.append(MicroBatch.on(where, widen(micro, longest)))
    return batches


def widen(micro: Any, width: int) -> Any:
    """Rows padded to a width; a row's tail is a sequence of its own."""
    from dataclasses import replace

    rows, old = micro.input_RW.shape
    more = width - old
    flat = micro.flat_N // old * width + micro.flat_N % old
    grown = np.pad(micro.input_RW, ((0, 0), (0, more)))
    places = np.concatenate([micro.position_RW, np.tile(np.arange(more), (rows, 1))], axis=1)
    starts = np.flatnonzero(places.ravel() == 0)
    table = np.stack([starts, np.append(starts[1:], places.size), np.full(len(starts), -1)], axis=1)
    return replace(micro, input_RW=grown, position_RW=places, flat_N=flat, segments_S3=table)


def forward(model: Policy, micro: MicroBatch, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of a micro-batch."""
    return model(micro.input_RW, micro.position_RW, micro.flat_N, micro.target_N, 1.0, True, micro.segments, **given)
