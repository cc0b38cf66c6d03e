"""Checkpoints of the learner, and the export of its weights as an ordinary Hugging Face checkpoint.

A checkpoint is one folder that exists whole or not at all: shards of weights and optimiser as torch's distributed
checkpoint writes them (they load on any number of ranks), and `learner.json` with counters and every file's checksum.
All functions here are collectives: every rank calls them together.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from learner.model import Policy, free_gathered, full_weights
from learner.optim import ensure_state
from rollout.errors import UserError

MANIFEST = "learner.json"
INDEX = ".metadata"  # torch's name for it
FORMAT = "winnow-learner-1"
VALUE = "value"  # what a value model is called here
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
    """Where training stands: batches trained (the weight version), optimiser steps gone by, non-finite ones in a row, the value's steps."""

    batches: int = 0
    optimiser_steps: int = 0
    nonfinite_in_a_row: int = 0
    value_steps: int = 0


@dataclass(frozen=True)
class Trained:
    """A model that is trained, its parameters by name, and its optimiser. The policy's `kind` is "", another's stands before its keys."""

    kind: str
    model: nn.Module
    params: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shape of each parameter, whole."""
        return {name: list(p.shape) for name, p in self.params.items()}

    @property
    def adam_step(self) -> float:
        """Steps that its optimiser has taken."""
        return max((float(s["step"]) for s in self.optimizer.state.values()), default=0.0)

    def state(self) -> dict[str, Any]:
        """Its tensors by name; loading writes into them."""
        lead, state = f"{self.kind}_" if self.kind else "", self.optimizer.state
        return {
            f"{lead}weights": {name: p.detach() for name, p in self.params.items()},
            f"{lead}exp_avg": {name: state[p]["exp_avg"] for name, p in self.params.items()},
            f"{lead}exp_avg_sq": {name: state[p]["exp_avg_sq"] for name, p in self.params.items()},
        }


def save_checkpoint(trained: Sequence[Trained], counters: Counters, folder: Path | str) -> None:
    """Write weights, optimisers, counters and torch's random state to `folder`, in place of what was there. The policy comes first.

    Every rank writes and checksums its own shards; the folder appears under its name only when all are on disk.
    Raises OSError on every rank when one cannot write; what was in `folder` is then still there.
    """
    folder = Path(folder)
    partial = _on_rank_0(lambda: _begin(folder))
    for one in trained:
        ensure_state(one.optimizer)
    dcp.save(_state(trained), checkpoint_id=str(partial))
    sums = _own_checksums(partial)
    policy, *others = trained
    manifest = {
        "format": FORMAT,
        "counters": asdict(counters),
        "adam_step": policy.adam_step,
        "weights": policy.shapes,
        "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(sums.items())},
        **{one.kind: {"adam_step": one.adam_step, "weights": one.shapes} for one in others},
    }

    def finish() -> None:
        with open(partial / MANIFEST, "w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _put_in_place(partial, folder)

    _on_rank_0(finish)


def load_checkpoint(trained: Sequence[Trained], folder: Path | str) -> Counters:
    """Load weights, optimisers and random state in place, on any number of ranks, and return the counters.

    Raises UserError, before anything is changed, for a folder that is no checkpoint, has a damaged or missing file, or
    belongs to another model, or to a run with a value model where this one has none (or the other way round).
    """
    folder = Path(folder)
    manifest = _on_rank_0(lambda: check_checkpoint(folder))
    if (VALUE in manifest) != any(one.kind == VALUE for one in trained):
        holds = "holds a value model, which this run has not" if VALUE in manifest else "holds no value model, and this run has one"
        raise UserError(f"{folder / MANIFEST} {holds}: resume with the baseline of the run that wrote it")
    for one in trained:
        _same_model(manifest[one.kind] if one.kind else manifest, one, folder)
    for one in trained:
        ensure_state(one.optimizer)
    state = _state(trained)
    dcp.load(state, checkpoint_id=str(folder))
    torch.set_rng_state(state["rng"])
    for one in trained:
        for param_state in one.optimizer.state.values():
            param_state["step"].fill_((manifest[one.kind] if one.kind else manifest)["adam_step"])
        free_gathered(one.model)
    return Counters(**manifest["counters"])


class _IndexUnpickler(pickle.Unpickler):
    """Reads what an index consists of and refuses every other name, so that a folder from elsewhere cannot run code here."""

    KNOWN = {
        "torch.distributed.checkpoint.metadata": (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        "torch": ("Size", "float32", "float16", "bfloat16", "int64", "int32", "uint8"),
        "pathlib": ("Path", "PosixPath"),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name, if it is one of an index."""
        if name not in self.KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _check_index(path: Path) -> None:
    """Look through the index, which torch pickles, before torch reads it. Raises UserError when it holds anything but one."""
    try:
        with open(path, "rb") as file:
            _IndexUnpickler(file).load()
    except FileNotFoundError:
        raise UserError(f"{path} is missing from its checkpoint: resume from another checkpoint") from None
    except (pickle.UnpicklingError, EOFError) as error:
        raise UserError(f"{path} is not the index of a checkpoint ({error}): resume from a folder that a run has written") from None


def _same_model(told: dict[str, Any], one: Trained, folder: Path) -> None:
    if told["weights"] != one.shapes:
        differing = sorted(set(map(str, told["weights"].items())) ^ set(map(str, one.shapes.items())))
        raise UserError(
            f"{folder / MANIFEST} is a checkpoint of another model (they differ in {differing[0]}): resume with the model that wrote it"
        )


def check_checkpoint(folder: Path | str) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there and as they were written; needs no model.

    Raises UserError that names the file at fault.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        files, known = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}, manifest["format"] == FORMAT
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist, so {folder} is no checkpoint of the learner: give another, or start anew") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): resume from another checkpoint") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged or not a checkpoint's manifest: resume from another checkpoint") from error
    if not known:
        raise UserError(f"{path} has format {manifest['format']!r} and {FORMAT!r} is read here: resume from another checkpoint")
    for name, expected in files.items():
        shard = folder / name
        if not shard.is_file():
            raise UserError(f"{shard} is missing from its checkpoint: resume from another checkpoint")
        try:
            whole = _checksum(shard) == expected
        except OSError as error:
            raise UserError(f"{shard} cannot be read ({error.strerror}): resume from another checkpoint") from error
        if not whole:
            raise UserError(f"{shard} is damaged (its checksum differs from the one written with it): resume from another checkpoint")
    _check_index(folder / INDEX)
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


def _state(trained: Sequence[Trained]) -> dict[str, Any]:
    """The tensors of a checkpoint by name; loading writes into them."""
    return {"rng": torch.get_rng_state()} | {key: tensors for one in trained for key, tensors in one.state().items()}


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
