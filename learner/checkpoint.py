"""Checkpoints of the learner, and the export of its weights as an ordinary Hugging Face checkpoint.

A checkpoint is one folder that exists whole or not at all: shards of weights and optimiser as torch's distributed
checkpoint writes them (they load on any number of ranks), and `learner.json` with counters and every file's checksum.
All functions here are collectives: every rank calls them together.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from learner.model import Policy, free_gathered, full_weights
from learner.optim import ensure_state
from rollout.errors import UserError

MANIFEST = "learner.json"
FORMAT = "winnow-learner-1"
# What a Hugging Face folder has beside weights: these are copied into an export where the source has them.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Counters:
    """Where training stands: batches trained (the weight version), optimiser steps gone by, non-finite ones in a row."""

    batches: int = 0
    optimiser_steps: int = 0
    nonfinite_in_a_row: int = 0


def save_checkpoint(policy: Policy, optimizer: torch.optim.AdamW, counters: Counters, folder: Path | str) -> None:
    """Write weights, optimiser, counters and torch's random state to `folder`, in place of what was there.

    Every rank writes and checksums its own shards; the folder appears under its name only when all are on disk.
    Raises OSError on every rank when one cannot write; what was in `folder` is then still there.
    """
    folder = Path(folder)
    partial = _on_rank_0(lambda: _begin(folder))
    ensure_state(optimizer)
    dcp.save(_state(policy, optimizer), checkpoint_id=str(partial))
    sums = _own_checksums(partial)
    steps = [float(s["step"]) for s in optimizer.state.values()]
    manifest = {
        "format": FORMAT,
        "counters": asdict(counters),
        "adam_step": max(steps, default=0.0),
        "weights": {name: list(p.shape) for name, p in policy.hf.named_parameters()},
        "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(sums.items())},
    }

    def finish() -> None:
        with open(partial / MANIFEST, "w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _put_in_place(partial, folder)

    _on_rank_0(finish)


def load_checkpoint(policy: Policy, optimizer: torch.optim.AdamW, folder: Path | str) -> Counters:
    """Load weights, optimiser and random state in place, on any number of ranks, and return the counters.

    Raises UserError, before anything is changed, for a folder that is no checkpoint, has a damaged or missing file, or
    belongs to another model.
    """
    folder = Path(folder)
    manifest = _on_rank_0(lambda: check_checkpoint(folder))
    mine = {name: list(p.shape) for name, p in policy.hf.named_parameters()}
    if manifest["weights"] != mine:
        differing = sorted(set(map(str, manifest["weights"].items())) ^ set(map(str, mine.items())))
        raise UserError(
            f"{folder / MANIFEST} is a checkpoint of another model (they differ in {differing[0]}): resume with the model that wrote it"
        )
    ensure_state(optimizer)
    state = _state(policy, optimizer)
    dcp.load(state, checkpoint_id=str(folder))
    torch.set_rng_state(state["rng"])
    for param_state in optimizer.state.values():
        param_state["step"].fill_(manifest["adam_step"])
    free_gathered(policy)
    return Counters(**manifest["counters"])


def check_checkpoint(folder: Path | str) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there and as they were written; needs no model.

    Raises UserError that names the file at fault.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        files, known = manifest["files"], manifest["format"] == FORMAT
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist, so {folder} is no checkpoint of the learner: give another, or start anew") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged or not a checkpoint's manifest: resume from another checkpoint") from error
    if not known:
        raise UserError(f"{path} has format {manifest['format']!r} and {FORMAT!r} is read here: resume from another checkpoint")
    for name, entry in files.items():
        shard = folder / name
        if not shard.is_file():
            raise UserError(f"{shard} is missing from its checkpoint: resume from another checkpoint")
        if _checksum(shard) != (entry["bytes"], entry["sha256"]):
            raise UserError(f"{shard} is damaged (its checksum differs from the one written with it): resume from another checkpoint")
    return manifest


def export_hf(policy: Policy, folder: Path | str, *, dtype: torch.dtype, tokenizer_folder: Path | str | None = None) -> None:
    """Write the weights as an ordinary Hugging Face checkpoint, in place of what was in `folder`.

    safetensors, config and the tokenizer's files, copied from `tokenizer_folder` (no hub name: resolve it first). A tied
    head is written once, as transformers does. Rank 0 holds all weights in `dtype` in host memory while it writes.
    """
    folder = Path(folder)
    weights: dict[str, Tensor] = {}
    for name, value in full_weights(policy, dtype):
        if _rank() == 0:
            weights[name] = value.to("cpu", copy=True)
    _on_rank_0(lambda: _write_hf(policy, weights, folder, dtype, tokenizer_folder))


def _write_hf(policy: Policy, weights: dict[str, Tensor], folder: Path, dtype: torch.dtype, tokenizer_folder: Path | str | None) -> None:
    partial = _begin(folder)
    policy.hf.save_pretrained(partial, state_dict=weights)
    # transformers writes the dtype of the model in memory, which is float32 whatever is exported.
    settings = json.loads((partial / "config.json").read_text())
    settings["dtype"] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    if tokenizer_folder is not None:
        for name in TOKENIZER_FILES:
            if (Path(tokenizer_folder) / name).is_file():
                shutil.copyfile(Path(tokenizer_folder) / name, partial / name)
    _put_in_place(partial, folder)


def _state(policy: Policy, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """The tensors of a checkpoint by name; loading writes into them."""
    named = dict(policy.hf.named_parameters())
    return {
        "weights": {name: p.detach() for name, p in named.items()},
        "exp_avg": {name: optimizer.state[p]["exp_avg"] for name, p in named.items()},
        "exp_avg_sq": {name: optimizer.state[p]["exp_avg_sq"] for name, p in named.items()},
        "rng": torch.get_rng_state(),
    }


def _checksum(path: Path) -> tuple[int, str]:
    with open(path, "rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename; what was there goes only once the new folder is whole."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _begin(folder: Path) -> Path:
    """An empty folder beside the one to write; it takes that one's place once whole."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _own_checksums(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and checksum of every file; each rank reads what it wrote. Raises on all ranks what one met."""
    found: dict[str, tuple[int, str]] | OSError
    try:
        own = [p for p in sorted(folder.iterdir()) if p.name.startswith(f"__{_rank()}_") or (_rank() == 0 and p.name == ".metadata")]
        found = {p.name: _checksum(p) for p in own}
    except OSError as error:
        found = error
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    for part in parts:
        if isinstance(part, OSError):
            raise part
    return {name: value for part in parts for name, value in part.items()}


def _rank() -> int:
    return dist.get_rank()


def _on_rank_0(work: Callable[[], Any]) -> Any:
    """Rank 0 does it and every rank gets the result, or raises what it raised: none waits for one that failed."""
    box: list[Any] = [None]
    if _rank() == 0:
        try:
            box = [(True, work())]
        except (OSError, ValueError, RuntimeError) as error:
            box = [(False, error)]
    dist.broadcast_object_list(box, src=0)
    done, value = box[0]
    if not done:
        raise value
    return value
