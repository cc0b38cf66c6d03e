"""Evaluation and export without training: of a model by itself, or of a run's checkpoint."""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from cluster import checkpoint, load, placement
from cluster.config import RunConfig
from cluster.evaluate import Evaluator
from cluster.health import Health, Restarts
from cluster.prepare import Prepared, prepare
from cluster.services import Maker, verifier_names
from learner.actor import LearnerRank
from rollout.errors import UserError


def evaluate(cfg: RunConfig) -> int:
    """`winnow eval`: accuracy on held-out prompts, as one line of JSON.

    Of a run folder the newest whole checkpoint is evaluated; of a recipe, the model that it names.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(cfg.run_dir).absolute() if cfg.run_dir else None
        saved = checkpoint.newest_good(run_dir) if run_dir is not None else None
        prepared = prepare(cfg, run_dir if saved is not None and run_dir is not None else Path(scratch))
        if saved is not None:
            folder = Path(scratch) / "export"
            export_saved(cfg, prepared, saved, folder, cfg.rollout.engine_dtype)
            prepared = replace(prepared, facts=replace(prepared.facts, folder=str(folder)))
        found = asyncio.run(_evaluate(cfg, prepared))
    print(json.dumps({"step": saved.step if saved else 0, **found}))
    return 0


async def _evaluate(cfg: RunConfig, prepared: Prepared) -> dict[str, object]:
    placement.join(cfg)
    places = placement.reserve(cfg, learner=False)
    services = Maker(cfg, None, prepared.facts, places, verifier_names(cfg)).all()
    try:
        await services.each(services.verifiers, "ready")
        await services.each(services.engines, "start")
        health = Health(services, Restarts(0), cfg.cluster.start_timeout, print)
        return asdict(await Evaluator(cfg, services, health, prepared.stream.heldout(cfg.eval.eval_prompts)).run())
    finally:
        await services.stop()
        placement.give_back(places)
        placement.leave()


def export(run_dir: Path, *, step: int | None, dtype: str | None, out: Path | None) -> int:
    """`winnow export`: a checkpoint of a run as a Hugging Face folder, whose path is the last line. Needs no GPU."""
    cfg = load.load(str(run_dir))
    if step is None:
        saved = checkpoint.newest_good(run_dir)
    else:
        steps = checkpoint.steps_in(run_dir)
        if step not in steps:
            raise UserError(f"step = {step} has no checkpoint in {run_dir}: choose one of {', '.join(map(str, steps)) or 'none'}")
        saved = checkpoint.read(checkpoint.folder_of(run_dir, step))
    if saved is None:
        raise UserError(f"{run_dir} has no checkpoint to export: let the run reach one, or set checkpoint_every")
    folder = out or run_dir / "exports" / f"step-{saved.step:06d}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    export_saved(cfg, prepare(cfg, run_dir), saved, folder, dtype or cfg.log.export_dtype)
    print(folder)
    return 0


def export_saved(cfg: RunConfig, prepared: Prepared, saved: checkpoint.Saved, folder: Path, dtype: str) -> None:
    """The checkpoint's weights through a learner of one rank, in this process, on the CPU."""
    settings = replace(prepared.settings, config=cfg.model.model_copy(update={"learner_gpus": 0, "compute_dtype": "float32"}))
    rank = LearnerRank(0, 1, settings, publish_dtype="float32", threads=cfg.model.learner_threads)
    try:
        rank.start("", 0)
        rank.load(saved.learner)
        rank.export(str(folder), dtype, prepared.tokenizer_folder)
    finally:
        rank.stop()
