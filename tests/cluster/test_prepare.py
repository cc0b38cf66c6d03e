"""Where the result of a warm-up is kept, and what its name depends on.

Does not cover the model and the tokenizer, which the end-to-end tests prepare and use.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.load import resolve
from cluster.prepare import warmup_folder


def test_a_warm_up_is_kept_in_the_run_unless_a_folder_is_shared(tmp_path: Path) -> None:
    own, shared = resolve("arithmetic", {}), resolve("arithmetic", {"warmup.warmup_dir": str(tmp_path / "warm")})
    assert warmup_folder(own, tmp_path / "run").parent == tmp_path / "run"
    assert warmup_folder(shared, tmp_path / "run").parent == tmp_path / "warm"
    assert warmup_folder(own, tmp_path).name == warmup_folder(shared, tmp_path).name, "where it is kept is no part of what it is"


@pytest.mark.parametrize(
    ("flag", "value", "same"),
    [
        ("rollout.engines", 2, True), ("rollout.max_staleness", 1, True), ("variant", "grpo", True), ("steps", 3, True),
        ("seed", 1, False), ("warmup.warmup_steps", 10, False), ("model.tiny_layers", 1, False),
    ],
)  # fmt: skip
def test_runs_share_a_warm_up_that_would_come_out_the_same(tmp_path: Path, flag: str, value: object, same: bool) -> None:
    one, other = resolve("arithmetic", {}), resolve("arithmetic", {flag: value})
    assert (warmup_folder(one, tmp_path) == warmup_folder(other, tmp_path)) is same
