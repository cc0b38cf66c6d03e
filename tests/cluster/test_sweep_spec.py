"""The spec of a sweep: its grid, and every mistake in it as one sentence.

Does not cover what a run needs of the machine and the data, which `winnow check` looks at (tests/cluster/test_check.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.load import parse_flags, resolve
from cluster.sweep_spec import Spec, arguments, builtin_specs, read_spec
from rollout.errors import UserError


def spec(tmp_path: Path, text: str) -> Spec:
    (tmp_path / "s.toml").write_text(text)
    return read_spec(str(tmp_path / "s.toml"))


GRID = """
recipe = "arithmetic"
[flags]
steps = 10
optim.lr = 3e-4
[axes]
engines = [1, 2]
max_staleness = [0, 1]
seed = [0, 1, 2]
"""


def test_a_grid_is_every_combination_in_the_axes_order(tmp_path: Path) -> None:
    found = spec(tmp_path, GRID)
    assert (found.name, found.axes, len(found.runs)) == ("s", ("engines", "max_staleness", "seed"), 12)
    assert [run.name for run in found.runs][:4] == [
        "engines=1,max_staleness=0,seed=0", "engines=1,max_staleness=0,seed=1", "engines=1,max_staleness=0,seed=2",
        "engines=1,max_staleness=1,seed=0",
    ]  # fmt: skip
    last = found.runs[-1]
    assert dict(last.values) == {"engines": "2", "max_staleness": "1", "seed": "2"}
    cfg = last.config
    assert (cfg.rollout.engines, cfg.rollout.max_staleness, cfg.seed, cfg.steps, cfg.optim.lr) == (2, 1, 2, 10, 3e-4)


def test_a_run_that_writes_no_checkpoints_writes_some(tmp_path: Path) -> None:
    assert {run.config.log.checkpoint_every for run in spec(tmp_path, GRID).runs} == {2}
    given = GRID.replace("steps = 10", "steps = 10\ncheckpoint_every = 7")
    assert {run.config.log.checkpoint_every for run in spec(tmp_path, given).runs} == {7}


def test_the_arguments_of_a_run_mean_its_config(tmp_path: Path) -> None:
    text = """
    recipe = "arithmetic"
    [axes]
    variant = ["dr_grpo", "gspo"]
    filter_groups = [true, false]
    stop = [["x"], ["\\n", "y"]]
    """
    runs = spec(tmp_path, text).runs
    assert len(runs) == 8 and [run.name for run in runs][1] == "variant=dr_grpo,filter_groups=true,stop=no2"
    for run in runs:
        flags, rest = parse_flags(arguments(run))
        assert not rest and resolve("arithmetic", flags) == run.config


def test_flags_that_vary_together_are_an_axis_with_a_name_of_its_own(tmp_path: Path) -> None:
    text = 'recipe = "arithmetic"\n[axes]\nload = [{engines = 1, batch_size = 16}, {engines = 2, batch_size = 32}]\nseed = [0, 1]'
    found = spec(tmp_path, text)
    assert [(r.config.rollout.engines, r.config.buffer.batch_size, r.config.seed) for r in found.runs] == [
        (1, 16, 0), (1, 16, 1), (2, 32, 0), (2, 32, 1),
    ]  # fmt: skip
    assert found.runs[2].values["load"] == "engines=2,batch_size=32"


def test_sections_may_be_written_out(tmp_path: Path) -> None:
    found = spec(tmp_path, 'recipe = "arithmetic"\n[flags.optim]\nlr = 1e-3\n[axes]\nrollout.engines = [1, 2]')
    assert [(r.config.optim.lr, r.config.rollout.engines) for r in found.runs] == [(1e-3, 1), (1e-3, 2)]


def test_a_recipe_may_lie_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("steps = 3")
    assert spec(tmp_path, 'recipe = "mine.toml"\n[axes]\nseed = [1]').runs[0].config.steps == 3


@pytest.mark.parametrize("name", builtin_specs())
def test_a_built_in_spec_is_read_by_name(name: str) -> None:
    found = read_spec(name)
    assert found.name == name and len(found.runs) > 1


AXES = 'recipe = "arithmetic"\n[axes]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (AXES + "enginse = [1, 2]", r"unknown flag axes\.enginse = \[1, 2\]: did you mean engines?\?"),
        (AXES + "seed = [0]\n[flags]\nstpes = 3", r"unknown flag flags\.stpes = 3: did you mean steps\?"),
        (AXES + "learning_rate = [1e-3]", r"did you mean optim\.lr\?"),
        (AXES + "engines = []", r"axes\.engines = \[\] is an empty axis.*at least one value"),
        (AXES + "engines = 2", r"axes\.engines = 2 is no list of values: write \[2\]"),
        (AXES + "engines = [1, 1]", r"axes\.engines has 1 twice"),
        (AXES + "engines = [1, 0]", r"run engines=0: rollout\.engines = 0 \(flag --engines\) is not allowed"),
        (AXES + "engines = [1, 1.5]", r"run engines=1\.5: rollout\.engines = 1\.5"),
        (AXES + "engines = [true]", r"rollout\.engines = true .* wrong type"),
        (AXES + 'variant = ["dapo", "gpso"]', r"run variant=gpso: .*gpso.*gspo"),
        (AXES + "batch_size = [32]\n[flags]\nminibatches = 5", r"run batch_size=32: optim\.minibatches = 5 does not divide"),
        (AXES + "seed = [0]\n[flags]\nseed = 3", r"seed is set by \[flags\] and by axes\.seed"),
        (AXES + "engines = [1]\n'rollout.engines' = [2]", r"rollout\.engines is set by engines and by axes\.rollout\.engines"),
        (AXES + "load = [{engines = 1}]\nengines = [1]", r"rollout\.engines is set by load and by axes\.engines"),
        (AXES + "load = [{enginse = 1}]", r"unknown flag axes\.load\.enginse = 1: did you mean engines?\?"),
        (AXES + 'run_dir = ["x"]', r"axes\.run_dir = .* by the sweep itself: remove it"),
        (AXES + "seed = [0]\n[flags]\nresume = true", r"flags\.resume = true is given"),
        ('recipe = "arithmetic"', r"has no axes: write \[axes\]"),
        ('recipe = "arithmetic"\n[axes]', r"has no axes"),
        ("[axes]\nseed = [0]", r'has no recipe: add recipe = "arithmetic"'),
        ('recipe = "arithmetik"\n[axes]\nseed = [0]', r"there is no recipe 'arithmetik'.*nearest is 'arithmetic'"),
        ('recipe = "arithmetic"\naxis = 3\n[axes]\nseed = [0]', r"unknown key axis = 3: .*nearest is 'axes'"),
        ('recipe = "arithmetic"\nsteps = 3\n[axes]\nseed = [0]', r"unknown key steps = 3: write it under \[flags\]"),
        ('recipe = "arithmetic"\nat_once = 0\n[axes]\nseed = [0]', r"at_once = 0 is no number of runs"),
        ('recipe = "arithmetic"\nname = "a/b"\n[axes]\nseed = [0]', r'name = "a/b" becomes the name of a folder'),
        ('recipe = "arithmetic"\nflags = 3\n[axes]\nseed = [0]', r"flags = 3 is no table of flags"),
        ('recipe = "arithmetic"\n[axes\n', r"is not TOML: .*line 2"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        spec(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_spec_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no spec 'scalign'.*nearest is 'scaling'"):
        read_spec("scalign")
    with pytest.raises(UserError, match="is a folder"):
        read_spec(str(tmp_path))
