"""Run folders as training leaves them, small and made up, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from cluster.ledger import append_snapshot
from cluster.metrics import ledger_record, logged
from learner.ledger import BatchTokens, Ledger

CONFIG = """\
name = "made-up"
steps = {steps}
seed = {seed}
variant = "{variant}"

[rollout]
max_tokens = 24

[objective]
loss_agg = "{loss_agg}"
"""


def make_run(
    folder: Path,
    steps: int = 12,
    *,
    seed: int = 0,
    variant: str = "dapo",
    loss_agg: str = "token-mean",
    text: str = "8+3=11 91",
    answers: int = 4,
    groups: int = 2,
    tokenizer: bool = True,
) -> Path:
    """A run of so many steps: reward 0.3 rising by 0.4, an evaluation every fifth step, half of the answers right."""
    folder.mkdir(parents=True)
    rng, ledger = np.random.default_rng(seed), Ledger()
    rows: dict[str, list[dict[str, Any]]] = {"metrics": [], "samples": [], "lengths": []}
    for step in range(1, steps + 1):
        for uid in range(2 * step - 2, 2 * step):
            ledger.open(uid)
            ledger.move(uid, "generating")
            ledger.move(uid, "verifying")
        ledger.keep(2 * step - 2, 30)
        ledger.close(2 * step - 1, "uninformative", "all_right", 10)
        ledger.commit({2 * step - 2: ""}, [], BatchTokens(trained=25, overlong=5))
        append_snapshot(folder, ledger)
        rows["metrics"].append({"step": step, **logged(_fields(step, steps, rng) | ledger_record(ledger))})
        rows["samples"] += [_sample(step, uid, text, answers) for uid in range(groups * (step - 1), groups * step)]
        rows["lengths"].append({"step": step, "width": 1, "right": {"18": 3}, "other": {"3": 5 if step < steps / 2 else 1}})
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.toml").write_text(CONFIG.format(steps=steps, seed=seed, variant=variant, loss_agg=loss_agg))
    (folder / "summary.json").write_text(json.dumps({"accuracy_before": 0.25, "accuracy_after": 0.75}))
    if tokenizer:
        (folder / "tokenizer").mkdir()
        character_tokenizer().save(str(folder / "tokenizer" / "tokenizer.json"))
    return folder


def character_tokenizer() -> Tokenizer:
    """A token per character; 0 ends an answer."""
    made = Tokenizer(models.WordLevel({"<eos>": 0, **{chr(c): c for c in range(1, 127)}}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<eos>"])
    return made


def _fields(step: int, steps: int, rng: np.random.Generator) -> dict[str, float]:
    part = step / steps
    found = {
        "buffer.reward": 0.3 + 0.4 * part,
        "buffer.informative": 0.9,
        "buffer.resp_len": 8 + 9 * part,
        "train.clipfrac": 0.01,
        "buffer.tokens": 3000,
        "buffer.staleness.0": 24,
        "buffer.staleness.1": 8,
        "train.entropy": 0.5 - 0.3 * part + 0.01 * rng.random(),
        "tokens_per_second": 1500.0,
        "seconds_step": 2.0,
        "seconds_generate_wait": 1.0,
        "seconds_engines_idle": 0.5,
        "seconds_train": 0.6,
        "seconds_sync": 0.1,
        "seconds_eval": 0.0,
        "seconds_checkpoint": 0.0,
    }
    return found | ({"eval.greedy": 0.3 + 0.5 * part, "seconds_eval": 0.3} if step % 5 == 0 else {})


def _sample(step: int, uid: int, text: str, answers: int) -> dict[str, Any]:
    made = []
    for i in range(answers):
        said = text if i % 2 == 0 else text[: max(len(text) // 2, 1)]
        right = i % 2 == 0
        made.append(
            {
                "text": said, "tokens": len(said) + 1, "finish": "stop", "reward": float(right), "status": "value", "detail": said[-2:],
                "rewards": {}, "advantage": 1.0 if right else -1.0, "weight": 1 / 128, "ids": [*(ord(c) for c in said), 0],
            }
        )  # fmt: skip
    return {
        "step": step, "uid": uid, "source": "addition", "row": str(uid), "outcome": "trained", "versions": [step - 1, step - 1],
        "prompt": "78+13=", "gold": "91", "answers": made,
    }  # fmt: skip
