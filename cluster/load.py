"""A recipe and the flags of the command line -> one validated RunConfig, and back to TOML.

Precedence, low to high: defaults, the recipe's variant, the recipe's keys, the variant of a `--variant` flag (in place of
the recipe's), flags. The layers are merged as plain dicts and validated once, so that `model_fields_set` of every section
says what was given and what is a default. Nothing here imports torch, ray, vllm or transformers: `--help` is immediate.
"""

from __future__ import annotations

import json
import re
import tomllib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, TomlConfigSettingsSource

from cluster.config import RunConfig, fields, flag_names, resolved_objective
from cluster.sentences import nearest, no_truth_for_a_number, sentence, suggest_flag
from learner.variants import preset
from rollout.errors import UserError

RECIPES = Path(__file__).parent / "recipes"
RUN_CONFIG = "config.toml"
"""Name of the resolved config in a run folder; a folder that has one can be given in place of a recipe."""

_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


class _Settings(RunConfig, BaseSettings):  # type: ignore[misc]
    """The tree as pydantic-settings wants it: the command line and the recipe are sources of its keys."""


def load(recipe: str | None, argv: Sequence[str] = ()) -> RunConfig:
    """The config of `recipe` (a path, a built-in's name, a run folder; None: defaults alone) under the flags `argv`.

    Raises UserError, in one sentence, for whatever is wrong in either.
    """
    flags, rest = parse_flags(argv)
    if rest:
        raise UserError(f"the argument {rest[0]!r} belongs to no flag: flags are --key value, after one recipe")
    return resolve(recipe, flags)


def resolve(recipe: str | None, flags: Mapping[str, Any]) -> RunConfig:
    """As `load`, with the flags already parsed: dotted key -> value."""
    path = find_recipe(recipe) if recipe is not None else None
    tree = read_recipe(path) if path is not None else {}
    if path is not None and path.name == RUN_CONFIG and Path(str(recipe)).is_dir():
        tree["run_dir"] = str(recipe)
    _say_what_is_none(tree)
    merged = merge(tree, flags)
    no_truth_for_a_number(merged, path)
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        raise UserError(sentence(error, flags, path)) from None


def merge(recipe: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """One nested dict of all layers; sections are merged key by key, any other value is replaced whole."""
    tree: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in recipe.items()}
    if "variant" in flags:
        _lay_over(tree, preset_keys(flags["variant"]))
    else:
        base: dict[str, Any] = {}
        _lay_over(base, preset_keys(recipe.get("variant")))
        for section, keys in base.items():
            given = tree.get(section, {})
            tree[section] = {**keys, **given} if isinstance(given, Mapping) else given
    _lay_over(tree, flags)
    return tree


def _say_what_is_none(tree: dict[str, Any]) -> None:
    """In a config that was written out whole, what its variant would set and is not there was None, for which TOML has no word."""
    there = {f"{section}.{leaf}" for section, keys in tree.items() if isinstance(keys, Mapping) for leaf in keys}
    if all(key in there for key, info in fields().items() if "." in key and info.default is not None):
        for key in preset_keys(tree.get("variant")).keys() - there:
            section, _, leaf = key.partition(".")
            tree[section][leaf] = None


def _lay_over(tree: dict[str, Any], flat: Mapping[str, Any]) -> None:
    for key, value in flat.items():
        *sections, leaf = key.split(".")
        at = tree
        for name in sections:
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                raise UserError(f"{name} = {at!r} is a section of settings, not a value: write [{name}] and its keys below")
        at[leaf] = value


def preset_keys(variant: object) -> dict[str, Any]:
    """The dotted keys that a variant sets; nothing for None."""
    if variant is None:
        return {}
    return {flag_names()[flag]: value for flag, value in preset(str(variant)).items()}


# -- the recipe ---------------------------------------------------------------------------------------------------


def builtin_recipes() -> list[str]:
    """Names of the built-in recipes."""
    return sorted(p.stem for p in RECIPES.glob("*.toml"))


def find_recipe(name: str) -> Path:
    """The file of a recipe that is given by path, by a built-in's name, or as a run folder."""
    path = Path(name)
    if path.is_dir():
        if (path / RUN_CONFIG).is_file():
            return path / RUN_CONFIG
        raise UserError(f"the folder {name} has no {RUN_CONFIG}, so it is no run folder: give a run folder or a recipe file")
    if path.is_file():
        return path
    if (RECIPES / f"{name}.toml").is_file():
        return RECIPES / f"{name}.toml"
    known = builtin_recipes()
    raise UserError(f"there is no recipe {name!r}: give a file that exists, or a built-in one of {', '.join(known)}{nearest(name, known)}")


def _is_recipe(name: str) -> bool:
    return Path(name).exists() or name in builtin_recipes()


def read_recipe(path: Path) -> dict[str, Any]:
    """The keys of a TOML file, unchecked."""
    try:
        return TomlConfigSettingsSource(_Settings, path)()
    except tomllib.TOMLDecodeError as error:
        last = len(path.read_text(encoding="utf-8").splitlines())
        what = str(error).replace("at end of document", f"at line {last}, the last")
        raise UserError(f"{path} is not TOML: {what}; correct that line") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not TOML: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a recipe that can") from None


# -- the flags ----------------------------------------------------------------------------------------------------


class SentenceParser(ArgumentParser):
    """An ArgumentParser whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see {self.prog} --help")


def flag_parser(prog: str, form: str, about: str) -> ArgumentParser:
    """The parser that pydantic-settings makes of the tree: a group for each section, the help from the fields' descriptions."""
    root = SentenceParser(prog=prog, usage=f"{prog} {form}", description=about, formatter_class=RawDescriptionHelpFormatter)

    def add(container: Any, *names: str, **kwargs: Any) -> Any:
        if kwargs.get("const") == "{}":  # a section as a whole is no flag; this leaves --model to model.model
            return None
        kwargs["help"] = re.sub(r" \(default( factory: .*|: null)\)$", "", kwargs["help"])
        kwargs.pop("action", None)  # a list is given once, as JSON
        bare = names[0].rsplit(".", 1)[-1].lstrip("-")
        return container.add_argument(*dict.fromkeys((f"--{bare}", *names)), **kwargs)

    CliSettingsSource(
        _Settings,
        cli_prog_name=prog,
        root_parser=root,
        add_argument_method=add,
        cli_use_class_docs_for_groups=True,
        cli_hide_none_type=True,
    )
    return root


def parse_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """`--key value`, `--key=value` and bare `--key` for a boolean -> (dotted key -> value, arguments that are no flags).

    Values of lists and mappings are decoded here and not by pydantic-settings, whose decoder escapes a backslash twice,
    so that `--stop '["\\n"]'` would mean two characters. Scalars stay text, which the validation converts.
    """
    flags: dict[str, Any] = {}
    rest: list[str] = []
    after: dict[str, str] = {}  # argument behind a bare boolean flag -> the flag
    todo = list(argv)
    while todo:
        token = todo.pop(0)
        if not token.startswith("--"):
            rest.append(token)
            continue
        name, equals, text = token[2:].partition("=")
        key = flag_names().get(name) or flag_names().get(name.replace("-", "_"))
        if key is None:
            raise UserError(f"unknown flag --{name}{f' = {text!r}' if equals else ''}: {suggest_flag(name)}")
        words = _bare_words(fields()[key].annotation)
        if not equals:
            follows = todo[0] if todo else None
            if words and (follows is None or follows.lower() not in words):
                text = "true"
                if follows is not None:
                    after[follows] = name
            elif follows is None or (follows.startswith("--") and follows[2:].partition("=")[0] in flag_names()):
                raise UserError(f"--{name} has no value: write --{name} VALUE")
            else:
                text = todo.pop(0)
        flags[key] = _decode(key, name, text)
    if len(rest) > 1:  # more than one recipe: one of them was meant as a flag's value
        for argument in (a for a in rest if a in after and not _is_recipe(a)):
            name = after[argument]
            raise UserError(f"{name} = {argument!r} is not true or false: write --{name} true or --{name} false")
    return flags, rest


def _bare_words(annotation: Any) -> set[str]:
    """For a flag that may stand bare for true, the words that are its value when they follow it; else nothing."""
    kinds = get_args(annotation) or (annotation,)
    if bool not in kinds:
        return set()
    return _TRUE | _FALSE | {str(word) for kind in kinds for word in get_args(kind)}


def _decode(key: str, name: str, text: str) -> Any:
    """The value of a flag: null, JSON for lists and mappings (also `a=1` for a mapping, `x` for a list of one text), else the text."""
    annotation = fields()[key].annotation
    origin = get_origin(annotation)
    if origin is Literal and not isinstance(get_args(annotation)[0], str):
        return int(text) if re.fullmatch(r"-?\d+", text) else text
    if origin not in (list, dict):
        return None if text == "null" else text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        if origin is dict and re.match(r"^\w+=", text):
            part, _, value = text.partition("=")
            try:
                return {part: json.loads(value)}
            except json.JSONDecodeError:
                return {part: value}
        if origin is list and annotation == list[str] and not text.startswith("["):
            return [text]
    form = "'{\"key\": 1}' or key=1" if origin is dict else '\'["a", "b"]\'' if annotation == list[str] else '\'[{"task": "addition"}]\''
    raise UserError(f"--{name} = {text!r} is not JSON: write it as {form}")


# -- back to TOML -------------------------------------------------------------------------------------------------


def to_toml(cfg: RunConfig) -> str:
    """The whole resolved tree as TOML that `load` reads back to the same values; what is None is left out, TOML has no word for it.

    The objective is written as it is trained: read back, every key counts as given, and no default would be filled in any more.
    """
    tree = cfg.model_dump() | {"objective": resolved_objective(cfg).model_dump()}
    top = [f"{k} = {_toml(v)}" for k, v in tree.items() if not isinstance(v, dict) and v is not None]
    parts = ["\n".join(top)]
    for section, keys in tree.items():
        if isinstance(keys, dict):
            lines = (f"{k} = {_toml(_as_declared(f'{section}.{k}', v))}" for k, v in keys.items() if v is not None)
            parts.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _as_declared(key: str, value: Any) -> Any:
    """A default such as 0 of a field of floats becomes 0.0, as it is read back."""
    return float(value) if fields()[key].annotation is float else value


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items() if v is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value if v is not None) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)
