"""Tiny models after their supervised warm-up, made once under `.bench/`: what reinforcement learning is compared from."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tests.bench.models import FOLDER

ADDITION = ["arithmetic"]
LONG_SOURCES = [{"task": "chain_sum", "options": {"terms": n, "digits": 2}, "verifier": "numeric"} for n in (2, 4, 8)]
LONG = ["arithmetic", "--sources", json.dumps(LONG_SOURCES), "--max_prompt_tokens", "32", "--max_tokens", "256"]
LONG += ["--warmup_steps", "900", "--warmup_guess_share", "0.6", "--warmup_guess_right", "0.25", "--warmup_lr", "2e-3"]


def warmed(flags: list[str]) -> Path:
    """The checkpoint, with tokenizer, that the warm-up of these flags (a recipe and what differs from it) ends in; minutes."""
    from cluster.load import load
    from cluster.prepare import prepare, warmup_examples, warmup_key
    from learner.actor import LearnerRank

    cfg = load(flags[0], [*flags[1:], "--display", "none"])
    folder = FOLDER / f"warm-{warmup_key(cfg)}"
    if (folder / "config.json").is_file():
        return folder
    with tempfile.TemporaryDirectory() as place:
        prepared = prepare(cfg, Path(place))
        rank = LearnerRank(0, 1, prepared.settings, publish_dtype="float32", threads=1)
        rank.start("127.0.0.1", 0)
        rank.warm_up(warmup_examples(cfg, prepared, Path(place)), cfg.warmup.warmup_lr)
        made = Path(place) / "made"
        rank.export(str(made), "float32", prepared.tokenizer_folder)
        rank.stop()
        FOLDER.mkdir(exist_ok=True)
        shutil.move(made, folder)
    return folder


if __name__ == "__main__":
    print(warmed(ADDITION), warmed(LONG))
