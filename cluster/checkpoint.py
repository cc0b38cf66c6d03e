"""A run's checkpoints: the learner's shards and the controller's books as one folder that is there whole or not at all.

RUN/checkpoints/step-000040/
    learner/           weights, optimiser, schedule, random state (learner.checkpoint)
    controller.json    data cursor, buffer, ledger, prompts in flight
    groups.npz         tokens of the groups that were kept and not yet trained (plain arrays, never pickled)
    manifest.json      the step, and size and checksum of the two files above and of the learner's manifest, which has those of its shards
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from cluster.health import on_ranks
from cluster.services import Services
from rollout.errors import UserError
from rollout.records import Completion, Group, Prompt, Span
from verifier.records import ScoredGroup
from verifier.verdict import Verdict

FORMAT = "winnow-checkpoint-2"
CONTROLLER, GROUPS, MANIFEST, LEARNER = "controller.json", "groups.npz", "manifest.json", "learner"
SUMMED = (CONTROLLER, GROUPS, f"{LEARNER}/learner.json")


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds besides the learner's shards."""

    folder: Path
    step: int
    controller: dict[str, Any]
    groups: dict[int, ScoredGroup]

    @property
    def learner(self) -> str:
        """Folder of the learner's part."""
        return str(self.folder / LEARNER)


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def partial_of(run_dir: Path, step: int) -> Path:
    """Where it is written before it is whole."""
    return run_dir / "checkpoints" / f".step-{step:06d}.partial"


def begin(run_dir: Path, step: int) -> Path:
    """A fresh partial folder; returns the place of the learner's part. What a crash left half-written goes."""
    partial = partial_of(run_dir, step)
    _mend(run_dir)
    for left in partial.parent.glob(".step-*.partial"):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial / LEARNER


def _mend(run_dir: Path) -> None:
    """A crash between the two renames of `finish` leaves the checkpoint that was to be replaced under another name: put it back."""
    for before in (run_dir / "checkpoints").glob(".step-*.before"):
        folder = before.with_name(before.name.removeprefix(".").removesuffix(".before"))
        if folder.exists():
            shutil.rmtree(before, ignore_errors=True)
        else:
            os.replace(before, folder)


def fetch(refs: Mapping[int, Any]) -> dict[int, ScoredGroup]:
    """The groups whose data can be had; one that is lost with its node is generated again when the run goes on from here."""
    groups = {}
    for uid, ref in refs.items():
        with contextlib.suppress(ray.exceptions.ObjectLostError):
            groups[uid] = ray.get(ref)
    return groups


def finish(run_dir: Path, step: int, controller: Mapping[str, Any], groups: Mapping[int, ScoredGroup], keep: int) -> Path:
    """Write the controller's part, put the whole in place, and remove all but the newest `keep` up to this step.

    A later one was passed over as damaged, or the run would not have come to this step again: it takes nobody's place.
    """
    partial, folder = partial_of(run_dir, step), folder_of(run_dir, step)
    _write(partial / CONTROLLER, json.dumps(controller, indent=1).encode())
    with open(partial / GROUPS, "wb") as file:
        np.savez(file, **arrays_of(groups))  # type: ignore[arg-type]  # names are ours, none is `allow_pickle`
        file.flush()
        os.fsync(file.fileno())
    sums = {name: _checksum(partial / name) for name in SUMMED}
    _write(partial / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": sums}, indent=1).encode())
    before = folder.with_name(f".{folder.name}.before")
    if folder.exists():
        os.replace(folder, before)
    os.replace(partial, folder)
    _sync_folder(folder.parent)
    shutil.rmtree(before, ignore_errors=True)
    for old in [s for s in steps_in(run_dir) if s <= step][:-keep]:
        shutil.rmtree(folder_of(run_dir, old))
    return folder


def steps_in(run_dir: Path) -> list[int]:
    """Steps that have a checkpoint, ascending."""
    names = [p.name.removeprefix("step-") for p in (run_dir / "checkpoints").glob("step-*")]
    return sorted(int(n) for n in names if n.isascii() and n.isdigit())


def newest_good(run_dir: Path, say: Any = print, below: int | None = None) -> Saved | None:
    """The newest checkpoint that is whole, of a step `below` that one if given; each that is not is named. None when there is none at all.

    Raises UserError when there are checkpoints and every one is damaged.
    """
    problem: UserError | None = None
    _mend(run_dir)
    for step in reversed([s for s in steps_in(run_dir) if below is None or s < below]):
        try:
            return read(folder_of(run_dir, step))
        except UserError as error:
            problem = error
            say(f"{error}; trying the one before")
    if problem is not None:
        raise UserError(f"{problem}; run_dir = {str(run_dir)!r} has no checkpoint that is whole: start a new run")
    return None


def read(folder: Path) -> Saved:
    """Read and check a checkpoint. Raises UserError that names the file at fault."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise UserError(f"{folder / MANIFEST} is of format {manifest['format']!r}, not {FORMAT!r}")
        sums, step = manifest["files"], manifest["step"]
        files = {name: sums[name] for name in (CONTROLLER, GROUPS)}
        files |= {name: sums[name] for name in SUMMED if name in sums}  # the learner's manifest had no sum at first
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder / MANIFEST} is missing, damaged, or not of a winnow checkpoint") from error
    if type(step) is not int or folder != folder_of(folder.parent.parent, step):
        raise UserError(f"{folder / MANIFEST} is of step {step!r}, which is not the step of its folder")
    for name, expected in files.items():
        try:
            whole = _checksum(folder / name) == expected
        except OSError as error:
            raise UserError(f"{folder / name} cannot be read ({error.strerror})") from error
        if not whole:
            raise UserError(f"{folder / name} is damaged (its checksum differs from the one written with it)")
    from learner.checkpoint import check_checkpoint  # here: it brings torch, which a fresh run's controller does without

    check_checkpoint(folder / LEARNER)
    controller = json.loads((folder / CONTROLLER).read_text())
    with np.load(folder / GROUPS, allow_pickle=False) as arrays:
        groups = groups_of(arrays)
    return Saved(folder, step, controller, groups)


async def load(services: Services, saved: Saved, run_dir: Path, say: Any = print) -> Saved:
    """A checkpoint into the ranks: `saved`, or the newest before it that is of this run's model, which only they can tell.

    Raises the UserError of the first when there is none.
    """
    refused: UserError | None = None
    while True:
        try:
            await on_ranks(services, "load", saved.learner)
            return saved
        except (UserError, ray.exceptions.RayTaskError) as error:
            cause = getattr(error, "cause", None) or error
            if not isinstance(cause, UserError):
                raise
        refused, before = refused or UserError(str(cause)), None
        with contextlib.suppress(UserError):  # every one before it is damaged, and named
            before = newest_good(run_dir, say, below=saved.step)
        if before is None:
            raise refused
        say(f"{cause}; trying the one before")
        saved = before


# -- groups as plain arrays -------------------------------------------------------------------------------------------


def arrays_of(groups: Mapping[int, ScoredGroup]) -> dict[str, np.ndarray]:
    """Scored groups as named arrays and one JSON header, for `numpy.savez`."""
    header, arrays = [], {}
    for uid, scored in groups.items():
        group = scored.group
        header.append(
            {
                "uid": uid,
                "prompt": prompt_json(group.prompt),
                "attempt": group.attempt,
                "engine": group.engine,
                "seconds": group.seconds,
                "names": list(scored.names),
                "verdicts": [{**asdict(v), "rewards": dict(v.rewards)} for v in scored.verdicts],
                "completions": [
                    {"finish": c.finish, "text": c.text, "spans": [list(asdict(s).values()) for s in c.spans]} for c in group.completions
                ],
            }
        )
        arrays[f"{uid}/prompt"] = group.prompt.tokens_P
        arrays[f"{uid}/rewards_G"] = scored.rewards_G
        arrays[f"{uid}/rewards_RG"] = scored.rewards_RG
        for i, completion in enumerate(group.completions):
            arrays[f"{uid}/{i}/tokens"] = completion.tokens_T
            arrays[f"{uid}/{i}/logp"] = completion.logp_T
    # JSON escapes whatever Python's str may hold (lone surrogates too), so the header is ASCII bytes.
    return {"header": np.frombuffer(json.dumps(header).encode("ascii"), dtype=np.uint8), **arrays}


def groups_of(arrays: Any) -> dict[int, ScoredGroup]:
    """The inverse of `arrays_of`."""
    out = {}
    for row in json.loads(bytes(arrays["header"]).decode("ascii")):
        uid = row["uid"]
        completions = tuple(
            Completion(arrays[f"{uid}/{i}/tokens"], arrays[f"{uid}/{i}/logp"], c["finish"], tuple(Span(*s) for s in c["spans"]), c["text"])
            for i, c in enumerate(row["completions"])
        )
        prompt = prompt_from_json(row["prompt"], arrays[f"{uid}/prompt"])
        group = Group(prompt, row["attempt"], completions, row["engine"], row["seconds"])
        verdicts = tuple(Verdict(**v) for v in row["verdicts"])
        out[uid] = ScoredGroup(group, verdicts, arrays[f"{uid}/rewards_G"], arrays[f"{uid}/rewards_RG"], tuple(row["names"]))
    return out


def prompt_json(prompt: Prompt) -> dict[str, Any]:
    """A prompt for JSON."""
    fields = ("uid", "text", "answer", "verifier", "source", "row", "epoch")
    return {**{name: getattr(prompt, name) for name in fields}, "meta": dict(prompt.meta), "tokens": prompt.tokens_P.tolist()}


def prompt_from_json(data: Mapping[str, Any], tokens_P: np.ndarray | None = None) -> Prompt:
    """The inverse of `prompt_json`."""
    rest = {k: v for k, v in data.items() if k != "tokens"}
    return Prompt(tokens_P=np.array(data["tokens"], dtype=np.int32) if tokens_P is None else tokens_P, **rest)


# -- files ------------------------------------------------------------------------------------------------------------


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _checksum(path: Path) -> list[Any]:
    with open(path, "rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
