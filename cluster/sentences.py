"""What a user got wrong, in one sentence: the key, the value, where it was given, and the remedy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from cluster.config import RunConfig, fields, flag_names
from rollout.errors import UserError, nearest_name


def nearest(name: str, known: Sequence[str]) -> str:
    """', nearest is x' for the name among `known` that is most like `name`, or nothing."""
    close = nearest_name(name, known)
    return f", nearest is {close!r}" if close else ""


def suggest_flag(name: str) -> str:
    """The remedy for an unknown flag: the flag that is most like it."""
    off = flag_names().get(name[3:].replace("-", "_")) if name.startswith(("no-", "no_")) else None
    if off is not None and bool in (fields()[off].annotation, *get_args(fields()[off].annotation)):
        return f"write --{name[3:]} false"
    return _suggest(name, list(flag_names()), "--")


ALIASES = {
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.grad_clip",
    "num_epochs": "optim.epochs",
    "ppo_epochs": "optim.epochs",
    "train_batch_size": "buffer.batch_size",
    "num_generations": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "max_new_tokens": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_completion_length": "rollout.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "tensor_parallel_size": "rollout.engine_gpus",
    "gpu_memory_utilization": "rollout.memory_utilization",
    "beta": "objective.kl_coef",
    "kl_beta": "objective.kl_coef",
    "model_path": "model.model",
    "model_name_or_path": "model.model",
    "dataset": "data.sources",
    "max_steps": "steps",
    "total_steps": "steps",
    "output_dir": "run_dir",
}
"""What other trainers call a setting -> its key here."""


def _suggest(name: str, known: list[str], dashes: str = "") -> str:
    leaf = name.rsplit(".", 1)[-1].replace("-", "_")
    close = ALIASES.get(leaf) or nearest_name(name, known) or nearest_name(leaf, known) or ALIASES.get(nearest_name(leaf, ALIASES) or "")
    return f"did you mean {dashes}{close}?" if close else "see --help for all there are"


_WANTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "list_type": "a list",
    "dict_type": "a table of keys and values",
    "model_type": "a section of settings",
}


def sentence(error: ValidationError, flags: Mapping[str, Any], path: Path | None) -> str:
    """The first of a validation's errors as one sentence of key, value and remedy, with the number of the others."""
    errors = error.errors(include_url=False)
    first = errors[0]
    more = f" (and {len(errors) - 1} more problem{'s' if len(errors) > 2 else ''})" if len(errors) > 1 else ""
    if first["type"] == "value_error":
        return str(first["ctx"]["error"]) + more
    key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    given = first["input"]
    endless = isinstance(given, float) and not math.isfinite(given)  # inf and nan as TOML spells them, not as JSON would
    value = str(given) if endless else json.dumps(given, default=str, ensure_ascii=False)
    where = f"flag --{key.rsplit('.', 1)[-1]}" if key in flags else str(path) if path else "the config"
    if first["type"] == "extra_forbidden":
        return f"unknown key {key} = {_short(value)} ({where}): {_suggest_key(first['loc'])}{more}"
    said = first["ctx"].get("expected") if first["type"] == "literal_error" else None
    if said is not None:
        wanted = "one of " + said.replace("'", "").replace(" or ", ", ")
        guess = nearest(str(first["input"]), wanted[7:].split(", "))
        return f"{key} = {_short(value)} ({where}) is not {wanted}: choose one of these{guess}{more}"
    if first["type"] in _WANTED:
        return f"{key} = {_short(value)} ({where}) has the wrong type: give {_WANTED[first['type']]}{more}"
    rule = first["msg"].removeprefix("Input should be ")
    return f"{key} = {_short(value)} ({where}) is not allowed: it should be {rule}{more}"


def no_truth_for_a_number(tree: Mapping[str, Any], path: Path | None) -> None:
    """Raises UserError for true or false where a number belongs, which pydantic would take for 1 or 0."""
    for key, info in fields().items():
        value: Any = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, bool) and {int, float} & {info.annotation, *get_args(info.annotation)}:
            raise UserError(f"{key} = {str(value).lower()} ({path or 'the config'}) has the wrong type: give a number")


def _suggest_key(loc: tuple[int | str, ...]) -> str:
    """The nearest of the keys that the section has, else of all keys of the tree."""
    section, leaf = [str(p) for p in loc[:-1] if not isinstance(p, int)], str(loc[-1])
    here: type[BaseModel] = RunConfig
    for name in section:
        here = next(_models(here.model_fields[name].annotation))
    elsewhere = [key for key in fields() if key.rsplit(".", 1)[-1] == leaf]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    close = None if leaf in ALIASES else nearest_name(leaf, here.model_fields)
    return f"did you mean {'.'.join([*section, close])}?" if close else _suggest(".".join([*section, leaf]), list(fields()))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models(part)


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
