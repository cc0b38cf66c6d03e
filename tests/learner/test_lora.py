"""Adapters: the model is the same until they are trained, only they are, and what is published has them merged.

Two ranks are in test_step.py (case `adapters`). Not covered: how well adapters learn.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("one_rank")


def test_only_adapters_train_and_what_is_published_is_merged(tiny: Path, making: ModuleType, tmp_path: Path) -> None:
    learner = making.make_learner(tiny, config=dict(lora_rank=4, lora_alpha=8), objective=dict(kl_coef=0), optim=dict(lr=1e-2))
    saved = load_file(tiny / "model.safetensors")
    before = dict(learner.weights())
    assert sorted(before) == sorted(saved) and all(torch.equal(before[n], saved[n]) for n in saved)
    groups = [making.make_group(i) for i in range(3)]
    learner.train_batch(making.make_batch(groups))
    after = dict(learner.weights())
    moved = {n for n in saved if not torch.equal(after[n], saved[n])}
    assert moved == {n for n in saved if "_proj." in n}
    for name in moved:
        assert torch.linalg.matrix_rank((after[name] - saved[name]).double(), rtol=1e-4) <= 4

    learner.export(tmp_path / "export")
    plain = making.make_learner(tmp_path / "export", objective=dict(kl_coef=0))
    answers = [making.make_group(9)]
    from learner.pack import Answer

    given = [Answer.of(answers[0].group.prompt, c) for c in answers[0].group.completions]
    untrained = making.make_learner(tiny, objective=dict(kl_coef=0))
    for mine, theirs, first in zip(learner.logprobs(given), plain.logprobs(given), untrained.logprobs(given), strict=True):
        # x W + x A B and x (W + A B) are summed in other orders, by processor: some last places of a float32 of 4 to 8.
        assert abs(mine - theirs).max() < 8 * np.finfo(np.float32).eps * 8
        assert abs(mine - first).max() > 1e-3, "without the adapters it would be seen"


def test_a_checkpoint_holds_the_adapters_and_goes_on_from_them(tiny: Path, making: ModuleType, tmp_path: Path) -> None:
    settings = dict(config=dict(lora_rank=2), objective=dict(kl_coef=0), optim=dict(lr=1e-2))
    batches = [making.make_batch([making.make_group(10 * i + j) for j in range(3)], i) for i in range(2)]
    one = making.make_learner(tiny, **settings)
    one.train_batch(batches[0])
    one.save(tmp_path / "checkpoint")
    one.train_batch(batches[1])
    other = making.make_learner(tiny, **settings)
    other.load(tmp_path / "checkpoint")
    other.train_batch(batches[1])
    for (name, mine), (_, theirs) in zip(one.weights(), other.weights(), strict=True):
        assert torch.equal(mine, theirs), name
    kept = json.loads((tmp_path / "checkpoint" / "learner.json").read_text())["weights"]
    assert kept and all(".lora_" in name for name in kept)
