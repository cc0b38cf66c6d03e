"""A run's checkpoints on disk: whole or not at all, and groups that come back bit by bit.

Does not cover: the learner's shards, which tests/learner/test_checkpoint.py does; here they are a folder with a manifest.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from cluster import checkpoint
from learner.checkpoint import FORMAT, INDEX, MANIFEST
from rollout.errors import UserError
from rollout.records import Completion, Group, Prompt, Span
from verifier.records import ScoredGroup
from verifier.verdict import Verdict


def scored(uid: int, text: str = "85", reward: float = 1.0) -> ScoredGroup:
    """A group of two answers, one of which has no reward."""
    prompt = Prompt(uid, np.array([4, 7], dtype=np.int32), "4+", "7", "numeric", "addition", "12", 3, {"level": 2})
    completion = Completion(
        np.array([1, 2, 3], dtype=np.int32), np.array([-0.1, -2.0, -1e-7], dtype=np.float32), "stop", (Span(0, 2, 4), Span(2, 3, 5)), text
    )
    verdicts = (Verdict("value", reward, "ok", 0.5, {"numeric": reward}), Verdict("error", None, "gold"))
    rewards = np.array([reward, np.nan])
    return ScoredGroup(Group(prompt, 1, (completion, completion), 0, 1.5), verdicts, rewards, rewards[None], ("numeric",))


def write(run_dir: Path, step: int, keep: int = 2) -> Path:
    """A checkpoint whose learner part is an empty manifest."""
    learner = checkpoint.begin(run_dir, step)
    learner.mkdir()
    (learner / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": {}, "counters": {}}))
    (learner / INDEX).write_bytes(pickle.dumps(Metadata(state_dict_metadata={})))
    return checkpoint.finish(run_dir, step, {"step": step, "seed": 7}, {3: scored(3), 9: scored(9, "x", 0.0)}, keep)


@settings(deadline=None, max_examples=50)
@given(text=st.text(st.characters()), reward=st.floats(allow_nan=False))
def test_groups_come_back_bit_by_bit(text: str, reward: float) -> None:
    before = scored(5, text, reward)
    after = checkpoint.groups_of(checkpoint.arrays_of({5: before}))[5]
    assert after.group.prompt.tokens_P.tolist() == [4, 7] and after.group.prompt.meta == {"level": 2}
    assert after.verdicts == before.verdicts and after.names == before.names
    np.testing.assert_array_equal(after.rewards_G, before.rewards_G)
    for a, b in zip(after.group.completions, before.group.completions, strict=True):
        assert a.text == b.text and a.spans == b.spans and a.finish == b.finish
        assert a.logp_T.tobytes() == b.logp_T.tobytes() and a.tokens_T.tobytes() == b.tokens_T.tobytes()


def test_what_is_written_is_read_and_old_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    assert checkpoint.steps_in(tmp_path) == [2, 3]
    saved = checkpoint.newest_good(tmp_path)
    assert saved is not None and saved.step == 3 and saved.controller == {"step": 3, "seed": 7}
    assert sorted(saved.groups) == [3, 9]


def test_a_crash_while_writing_leaves_the_previous_one(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (checkpoint.begin(tmp_path, 2)).mkdir()  # and no more: the process is gone
    saved = checkpoint.newest_good(tmp_path)
    assert saved is not None and saved.step == 1


def test_a_crash_while_one_takes_the_place_of_another_loses_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, keep=1)
    replace = os.replace

    def crash(old: Path, new: Path) -> None:
        if ".partial" in str(old):
            raise KeyboardInterrupt  # the process is gone, between the two renames
        replace(old, new)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 1, keep=1)
    assert checkpoint.steps_in(tmp_path) == []
    monkeypatch.undo()
    saved = checkpoint.newest_good(tmp_path)
    assert saved is not None and saved.step == 1
    write(tmp_path, 2, keep=1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000002"], "nothing half-written is left"


@pytest.mark.parametrize("name", [checkpoint.CONTROLLER, checkpoint.GROUPS, checkpoint.MANIFEST, f"{checkpoint.LEARNER}/{MANIFEST}"])
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    write(tmp_path, 1)
    file = write(tmp_path, 2) / name
    file.write_bytes(file.read_bytes()[:-3])
    said: list[str] = []
    saved = checkpoint.newest_good(tmp_path, said.append)
    assert saved is not None and saved.step == 1
    assert len(said) == 1 and str(file) in said[0]


def test_a_damaged_later_one_takes_no_place_of_a_good_one(tmp_path: Path) -> None:
    """The run has gone on from before it: what it writes then is the newest, whatever the others are called."""
    for step in (1, 2):
        write(tmp_path, step)
    (write(tmp_path, 4) / checkpoint.GROUPS).unlink()
    for name in ("step-000099", "step-²"):
        (tmp_path / "checkpoints" / name).mkdir()
    write(tmp_path, 3, keep=1)
    assert checkpoint.steps_in(tmp_path) == [3, 4, 99]
    said: list[str] = []
    saved = checkpoint.newest_good(tmp_path, said.append)
    assert saved is not None and saved.step == 3 and len(said) == 2


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (f"{checkpoint.LEARNER}/{MANIFEST}", '"counters"', '"counterz"'),
        (checkpoint.MANIFEST, '"step"', '"stfp"'),
        (checkpoint.MANIFEST, '"step": 2', '"step": 3'),
        (checkpoint.MANIFEST, '"step": 2', '"step": 2.0'),
        (checkpoint.MANIFEST, '"files"', '"filez"'),
    ],
)
def test_a_changed_manifest_is_named_and_the_one_before_is_used(tmp_path: Path, name: str, old: str, new: str) -> None:
    write(tmp_path, 1)
    file = write(tmp_path, 2) / name
    file.write_text(file.read_text().replace(old, new))
    said: list[str] = []
    saved = checkpoint.newest_good(tmp_path, said.append)
    assert saved is not None and saved.step == 1 and str(file) in said[0]


@pytest.mark.parametrize("name", [checkpoint.CONTROLLER, checkpoint.MANIFEST, f"{checkpoint.LEARNER}/{MANIFEST}"])
def test_what_cannot_be_read_is_named_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    """A folder in a file's place, which nobody may open as one."""
    write(tmp_path, 1)
    file = write(tmp_path, 2) / name
    file.unlink()
    file.mkdir()
    said: list[str] = []
    saved = checkpoint.newest_good(tmp_path, said.append)
    assert saved is not None and saved.step == 1 and str(file) in said[0]


def test_a_renamed_checkpoint_is_not_that_of_the_new_name(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2).rename(tmp_path / "checkpoints" / "step-000060")
    said: list[str] = []
    saved = checkpoint.newest_good(tmp_path, said.append)
    assert saved is not None and saved.step == 1 and "step-000060" in said[0]


def test_nothing_but_damage_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    (write(tmp_path, 1) / checkpoint.GROUPS).unlink()
    with pytest.raises(UserError, match="no checkpoint that is whole"):
        checkpoint.newest_good(tmp_path, lambda line: None)


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert checkpoint.newest_good(tmp_path) is None
