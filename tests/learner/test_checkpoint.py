"""Checkpoints: exact resumption, atomic folders, damage named by file; and the Hugging Face export.

Another number of ranks is in test_step.py, which has two processes at hand.
Not covered: a machine that loses power, file systems without atomic rename, models of several gigabytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from learner.checkpoint import MANIFEST, check_checkpoint
from learner.model import build_tiny
from learner.pack import Answer
from learner.warmup import sft_steps
from rollout.errors import UserError

pytestmark = pytest.mark.usefixtures("one_rank")


def batches(making: ModuleType, count: int) -> list[Any]:
    return [making.make_batch([making.make_group(10 * i + j) for j in range(3)], i) for i in range(count)]


def test_a_resumed_run_is_the_same_run_to_the_bit(tiny: Path, making: ModuleType, tmp_path: Path) -> None:
    flags = dict(optim=dict(lr_schedule="linear", minibatches=2), total_steps=8)
    one, two, three = batches(making, 3)
    straight = making.make_learner(tiny, **flags)
    for batch in (one, two, three):
        last = straight.train_batch(batch)
    first = making.make_learner(tiny, **flags)
    first.train_batch(one)
    first.save(tmp_path / "ck")
    drawn = torch.rand(3)  # what the run would have drawn next
    resumed = making.make_learner(tiny, **flags)
    counters = resumed.load(tmp_path / "ck")
    assert (counters.batches, counters.optimiser_steps, counters.nonfinite_in_a_row) == (1, 2, 0)
    assert torch.equal(torch.rand(3), drawn)
    resumed.train_batch(two)
    again = resumed.train_batch(three)
    assert [s.lr for s in again.steps] == [s.lr for s in last.steps] and again.steps[-1].lr < 1e-3 / 2
    for (name, a), (_, b) in zip(straight.weights(), resumed.weights(), strict=True):
        assert torch.equal(a, b), name


def test_loading_changes_weights_that_a_pass_had_gathered(tiny: Path, making: ModuleType, tmp_path: Path) -> None:
    (batch,) = batches(making, 1)
    trained = making.make_learner(tiny, optim=dict(lr=1e-2))
    trained.train_batch(batch)
    trained.save(tmp_path / "ck")
    answers = [Answer.of(g.group.prompt, c) for g in batch.tokens.values() for c in g.group.completions]
    other = making.make_learner(tiny)
    before = np.concatenate(other.logprobs(answers))
    other.load(tmp_path / "ck")
    after, want = np.concatenate(other.logprobs(answers)), np.concatenate(trained.logprobs(answers))
    assert np.array_equal(after, want) and np.abs(after - before).max() > 1e-2


def test_a_checkpoint_before_any_step_loads(tiny: Path, making: ModuleType, tmp_path: Path) -> None:
    making.make_learner(tiny).save(tmp_path / "ck")
    learner = making.make_learner(tiny)
    assert learner.load(tmp_path / "ck").batches == 0
    (batch,) = batches(making, 1)
    fresh = making.make_learner(tiny)
    learner.train_batch(batch)
    fresh.train_batch(batch)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(learner.weights(), fresh.weights(), strict=True))


def test_writing_again_replaces_the_folder_and_leaves_nothing_beside_it(tiny: Path, making: ModuleType, tmp_path: Path) -> None:
    learner = making.make_learner(tiny)
    (tmp_path / "ck.partial").mkdir()
    (tmp_path / "ck.partial" / "rest of a killed run").touch()
    learner.save(tmp_path / "ck")
    (batch,) = batches(making, 1)
    learner.train_batch(batch)
    learner.save(tmp_path / "ck")
    assert [p.name for p in tmp_path.iterdir()] == ["ck"]
    assert check_checkpoint(tmp_path / "ck")["counters"]["batches"] == 1


def test_a_failed_write_leaves_the_last_checkpoint(tiny: Path, making: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = making.make_learner(tiny)
    learner.save(tmp_path / "ck")
    monkeypatch.setattr("learner.checkpoint._checksum", lambda path: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        learner.save(tmp_path / "ck")
    monkeypatch.undo()
    assert check_checkpoint(tmp_path / "ck")["counters"]["batches"] == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest", "no manifest", "format"])
def test_damage_is_a_sentence_that_names_the_file_and_changes_nothing(tiny: Path, making: ModuleType, tmp_path: Path, damage: str) -> None:
    learner = making.make_learner(tiny, optim=dict(lr=1e-2))
    (batch,) = batches(making, 1)
    learner.train_batch(batch)
    learner.save(tmp_path / "ck")
    shard = tmp_path / "ck" / "__0_0.distcp"
    at_fault = shard
    data = bytearray(shard.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif damage == "cut":
        shard.write_bytes(data[:-1])
    elif damage == "missing":
        shard.unlink()
    else:
        at_fault = tmp_path / "ck" / MANIFEST
        if damage == "manifest":
            at_fault.write_text(at_fault.read_text()[:-20])
        elif damage == "format":
            at_fault.write_text(json.dumps(json.loads(at_fault.read_text()) | {"format": "other-1"}))
        else:
            at_fault.unlink()
    fresh = making.make_learner(tiny)
    before = {n: w.clone() for n, w in fresh.weights()}
    with pytest.raises(UserError) as caught:
        fresh.load(tmp_path / "ck")
    message = str(caught.value)
    assert str(at_fault) in message and "\n" not in message
    assert all(torch.equal(before[n], w) for n, w in fresh.weights())


def test_an_index_that_would_run_code_is_refused_unread(tiny: Path, making: ModuleType, tmp_path: Path) -> None:
    """Whole and with right checksums, as one who forges a checkpoint would leave it."""
    learner, folder = making.make_learner(tiny), tmp_path / "ck"
    learner.save(folder)
    check_checkpoint(folder)

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    manifest = json.loads((folder / MANIFEST).read_text())
    forged = (folder / ".metadata").read_bytes()
    manifest["files"][".metadata"] = {"bytes": len(forged), "sha256": hashlib.sha256(forged).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="not the index of a checkpoint .it names posix.mkdir"):
        learner.load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_another_model_is_refused(tiny: Path, making: ModuleType, tmp_path: Path) -> None:
    making.make_learner(tiny).save(tmp_path / "ck")
    build_tiny(tmp_path / "wide", making.TINY | {"intermediate_size": 96}, seed=0)
    with pytest.raises(UserError, match="another model"):
        making.make_learner(tmp_path / "wide").load(tmp_path / "ck")


@pytest.mark.parametrize("tied", [True, False])
def test_the_export_is_an_ordinary_checkpoint_with_the_learners_logprobs(making: ModuleType, tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    build_tiny(source, making.TINY | {"tie_word_embeddings": tied}, seed=0)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    learner = making.make_learner(source, optim=dict(lr=1e-2))
    (batch,) = batches(making, 1)
    learner.train_batch(batch)
    learner.export(tmp_path / "export", tokenizer_folder=source)
    names = {p.name for p in (tmp_path / "export").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings is tied
    for group in batch.tokens.values():
        for done in group.group.completions:
            ids = torch.tensor(np.concatenate([group.group.prompt.tokens_P, done.tokens_T]).astype(np.int64))[None]
            first = len(group.group.prompt.tokens_P)
            with torch.no_grad():
                logp = torch.log_softmax(model(ids).logits[0], -1)[first - 1 : -1].gather(-1, ids[0, first:, None]).squeeze(-1)
            (own,) = learner.logprobs([Answer.of(group.group.prompt, done)])
            assert np.abs(own - logp.numpy()).max() < 1e-5


def test_a_bfloat16_export_has_half_the_bytes_and_says_its_dtype(tiny: Path, making: ModuleType, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    learner = making.make_learner(tiny)
    for dtype, folder in ((torch.float32, "full"), (torch.bfloat16, "half")):
        learner.export(tmp_path / folder, dtype=dtype)
    full, half = (load_file(tmp_path / f / "model.safetensors") for f in ("full", "half"))
    assert all(torch.equal(half[n], w.to(torch.bfloat16)) for n, w in full.items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    # Exporting leaves the learner's own weights alone.
    assert all(torch.equal(full[n], w) for n, w in learner.weights())


def test_the_supervised_phase_learns_and_leaves_a_fresh_optimiser(tiny: Path, making: ModuleType) -> None:
    learner = making.make_learner(tiny)
    rng = np.random.default_rng(0)
    examples = [(rng.integers(2, 40, 4), rng.integers(2, 40, rng.integers(1, 8))) for _ in range(6)]
    seen: list[Any] = []
    done = sft_steps(learner, iter([examples] * 40), steps=30, lr=1e-2, on_step=seen.append)
    assert done == seen and len(done) == 30 and done[0].tokens == sum(len(c) for _, c in examples)
    assert done[-1].loss < 0.3 * done[0].loss
    logps = learner.logprobs([Answer.example(p, c) for p, c in examples])
    assert -np.concatenate(logps).mean() == pytest.approx(done[-1].loss, rel=0.3)
    assert not learner.optimizer.state and learner.counters.optimiser_steps == 0
    with pytest.raises(AssertionError, match="use_reference"):
        _ = learner.reference
    named = making.make_learner(tiny, reference=str(tiny))
    sft_steps(named, [examples], steps=1, lr=1e-2)
    assert named.reference is not None


def test_the_supervised_loss_is_the_mean_over_target_tokens(tiny: Path, making: ModuleType) -> None:
    learner = making.make_learner(tiny, config=dict(micro_tokens=16))
    rng = np.random.default_rng(1)
    examples = [(rng.integers(2, 40, 4), rng.integers(2, 40, n)) for n in (1, 9, 5)]
    want = -np.concatenate(learner.logprobs([Answer.example(p, c) for p, c in examples])).mean()
    assert sft_steps(learner, [examples], steps=1, lr=1e-3)[0].loss == pytest.approx(want, rel=1e-5)
