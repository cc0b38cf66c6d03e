"""The spec of a sweep, a TOML file -> the runs of its grid, each with a config that has been checked.

    recipe = "arithmetic"                     # by name or path, as for `winnow train`
    name = "scaling"                          # default: the file's name
    at_once = 2                               # runs at a time, at most; default: as many as the cluster holds

    [flags]                                   # any flags, the same for every run
    steps = 20

    [axes]                                    # any flags; every combination of their values is a run
    engines = [1, 2]
    seed = [0, 1, 2]
    load = [{ engines = 1, batch_size = 16 }, { engines = 2, batch_size = 32 }]   # flags that vary together, under a name of your own

Nothing here imports ray: whatever is wrong is one sentence at once.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import load
from cluster.config import RunConfig, flag_names
from cluster.sentences import nearest, suggest_flag
from rollout.errors import UserError

SWEEPS = Path(__file__).parent / "sweeps"
KEYS = ("recipe", "name", "at_once", "flags", "axes")
OWN = ("run_dir", "resume", "name", "cluster.ray_address", "warmup.warmup_dir")
"""Keys that the sweep gives every run."""
CHECKPOINTS = 5
"""A run whose recipe writes no checkpoints writes one after every so many parts of its steps, so that an end in the middle costs little."""


@dataclass(frozen=True)
class Planned:
    """One run: its folder's name, the value of each axis as text, and its config. `flags` are all that the spec gives it, by dotted key."""

    name: str
    values: Mapping[str, str]
    flags: Mapping[str, Any]
    config: RunConfig


@dataclass(frozen=True)
class Spec:
    """A sweep. `axes` are the names of its axes, in the spec's order."""

    name: str
    recipe: str
    axes: tuple[str, ...]
    at_once: int | None
    runs: tuple[Planned, ...]
    text: str


def read_spec(given: str) -> Spec:
    """The sweep of a file, or of a built-in spec by its name. Raises UserError, in one sentence, for whatever is wrong in it."""
    path = find_spec(given)
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}; correct that line") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a spec that can") from None
    return parse(tree, path, text)


def builtin_specs() -> list[str]:
    """Names of the built-in specs."""
    return sorted(p.stem for p in SWEEPS.glob("*.toml"))


def find_spec(given: str) -> Path:
    """The file of a spec that is given by path or by a built-in's name."""
    if Path(given).is_file():
        return Path(given)
    if Path(given).is_dir():
        raise UserError(f"SPEC = {given} is a folder: give a TOML file, or a built-in spec of {', '.join(builtin_specs())}")
    if (SWEEPS / f"{given}.toml").is_file():
        return SWEEPS / f"{given}.toml"
    known = builtin_specs()
    raise UserError(f"there is no spec {given!r}: give a file that exists, or a built-in one of {', '.join(known)}{nearest(given, known)}")


def parse(tree: Mapping[str, Any], path: Path, text: str = "") -> Spec:
    """The sweep of a spec's tree."""
    for key in tree:
        if key not in KEYS:
            dotted = flag_names().get(key)
            hint = f"write it under [flags] or [axes]{'' if dotted else nearest(key, KEYS)}" if dotted else _one_of(key)
            raise UserError(f"{path}: unknown key {key} = {_short(tree[key])}: {hint}")
    recipe = tree.get("recipe")
    if not isinstance(recipe, str) or not recipe:
        said = "has no recipe" if recipe is None else f"recipe = {_short(recipe)} is no text"
        raise UserError(f'{path} {said}: add recipe = "arithmetic", or another built-in one or file')
    recipe = _beside(recipe, path)
    name = tree.get("name", path.stem)
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"{path}: name = {_short(name)} becomes the name of a folder: take letters, digits, '-', '_' and '.' alone")
    at_once = tree.get("at_once")
    if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
        raise UserError(f"{path}: at_once = {_short(at_once)} is no number of runs: give 1 or more, or leave it out")
    fixed, axes = _flags(tree.get("flags", {}), path), _axes(tree, path)
    _no_key_twice(fixed, axes, path)
    runs = tuple(_run(recipe, fixed, axes, chosen, path) for chosen in itertools.product(*(range(len(points)) for points in axes.values())))
    return Spec(name, recipe, tuple(axes), at_once, runs, text)


def _one_of(key: str) -> str:
    return f"a spec has {', '.join(KEYS)}{nearest(key, KEYS)}"


def _beside(recipe: str, path: Path) -> str:
    """A recipe's file may be given as seen from the spec."""
    beside = path.parent / recipe
    return str(beside) if not Path(recipe).exists() and beside.is_file() else recipe


# -- flags and axes -----------------------------------------------------------------------------------------------------


def _key(name: str, value: Any, where: str, path: Path) -> str:
    """The dotted key of a flag."""
    key = flag_names().get(name) or flag_names().get(name.replace("-", "_"))
    if key is None:
        raise UserError(f"{path}: unknown flag {where}.{name} = {_short(value)}: {suggest_flag(name).replace('--', '')}")
    if key in OWN:
        raise UserError(f"{path}: {where}.{name} = {_short(value)} is given to every run by the sweep itself: remove it")
    return key


def _flags(given: Any, path: Path, where: str = "flags") -> dict[str, Any]:
    """Flags by their dotted keys; a table whose name is a section's holds flags of that section."""
    if not isinstance(given, Mapping):
        raise UserError(f"{path}: {where} = {_short(given)} is no table of flags: write [{where}] and below it lines like steps = 20")
    found: dict[str, Any] = {}
    for name, value in given.items():
        whole = name in RunConfig.model_fields and name not in flag_names() and isinstance(value, Mapping)
        for leaf, leaf_value in value.items() if whole else [(name, value)]:
            key = _key(f"{name}.{leaf}" if whole else leaf, leaf_value, where, path)
            if key in found:
                raise UserError(f"{path}: {where} gives {key} twice, once by its bare and once by its dotted name: keep one")
            found[key] = leaf_value
    return found


Point = tuple[str, Mapping[str, Any]]
"""One place on an axis: its value as text, and its flags by dotted key."""


def _axes(tree: Mapping[str, Any], path: Path) -> dict[str, list[Point]]:
    """The points of each axis."""
    given = tree.get("axes", {})
    if not isinstance(given, Mapping) or not given:
        raise UserError(f"{path} has no axes: write [axes] and below it lines like engines = [1, 2]")
    flat = {}
    for name, values in given.items():  # rollout.engines = [1, 2] is a table rollout in TOML
        section = isinstance(values, Mapping) and name in RunConfig.model_fields
        flat.update({f"{name}.{leaf}": value for leaf, value in values.items()} if section else {name: values})
    axes: dict[str, list[Point]] = {}
    for name, values in flat.items():
        if not isinstance(values, list):
            text = _short(values)
            raise UserError(f"{path}: axes.{name} = {text} is no list of values: write [{text}], or put it under [flags]")
        if not values:
            raise UserError(f"{path}: axes.{name} = [] is an empty axis, which leaves no run: give it at least one value")
        if not any(isinstance(value, Mapping) for value in values):
            _key(name, values, "axes", path)
        points = [_point(name, value, path) for value in values]
        for place, (text, _) in enumerate(points):
            if text in [other for other, _ in points[:place]]:
                raise UserError(f"{path}: axes.{name} has {text} twice, which would be one run: remove one (for repeats vary seed)")
        axes[name] = points
    return axes


def _point(name: str, value: Any, path: Path) -> Point:
    key = flag_names().get(name) or flag_names().get(name.replace("-", "_"))
    if key is None and isinstance(value, Mapping):
        flags = _flags(value, path, f"axes.{name}")
        return ",".join(f"{k.rsplit('.', 1)[-1]}={_text(v)}" for k, v in flags.items()), flags
    return _text(value), {_key(name, value, "axes", path): value}


def _no_key_twice(fixed: Mapping[str, Any], axes: Mapping[str, list[Point]], path: Path) -> None:
    owner = dict.fromkeys(fixed, "[flags]")
    for name, points in axes.items():
        for key in dict.fromkeys(key for _, flags in points for key in flags):
            if owner.get(key, name) != name:
                raise UserError(f"{path}: {key} is set by {owner[key]} and by axes.{name}: keep one of the two")
            owner[key] = name


# -- runs ---------------------------------------------------------------------------------------------------------------


def _run(recipe: str, fixed: Mapping[str, Any], axes: Mapping[str, list[Point]], chosen: tuple[int, ...], path: Path) -> Planned:
    """One run of the grid, its config resolved."""
    points = {name: points[at] for (name, points), at in zip(axes.items(), chosen, strict=True)}
    flags = {**fixed, **{key: value for _, given in points.values() for key, value in given.items()}}
    name = ",".join(_folder_part(axis, text, at) for (axis, (text, _)), at in zip(points.items(), chosen, strict=True))
    try:
        config = load.resolve(recipe, flags)
        if not config.log.checkpoint_every:
            flags["log.checkpoint_every"] = max(1, config.steps // CHECKPOINTS)
            config = load.resolve(recipe, flags)
    except UserError as error:
        raise UserError(f"{path}, run {name}: {error}") from None
    return Planned(name, {axis: text for axis, (text, _) in points.items()}, flags, config)


def _folder_part(axis: str, text: str, place: int) -> str:
    """`engines=2`; a value that makes no good name of a folder is told by its place on the axis."""
    short = axis.rsplit(".", 1)[-1]
    if re.fullmatch(r"[\w.+=,-]{1,40}", text):
        return text if text.startswith(f"{short}=") else f"{short}={text}"
    return f"{short}=no{place + 1}"


def arguments(planned: Planned) -> list[str]:
    """The flags of a run as `winnow train` takes them."""
    return [f"--{key}={_text(value)}" for key, value in planned.flags.items()]


def _text(value: Any) -> str:
    """A value as a flag has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(value: Any, most: int = 60) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= most else text[: most - 1] + "…"
