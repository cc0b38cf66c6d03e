"""What can be known of a model without loading it: from a local folder, the hub's cache, or the hub, with short time limits."""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from rollout.errors import UserError

PROBE_SECONDS = 4.0


class Unseen(Exception):
    """Something is not on this machine and cannot be fetched now; the message says why."""


def is_local(name: str) -> bool:
    """Whether a name of a model or data set is a folder here, or `tiny`, which is made by code."""
    return name == "tiny" or Path(name).is_dir()


@cache
def reachable() -> bool:
    """Whether the hub answers within a few seconds; when it does not, its clients are told to use their cache alone.

    A client that is not told tries again and again, for minutes.
    """
    found: list[bool] = []
    if os.environ.get("HF_HUB_OFFLINE", "").upper() not in ("1", "ON", "YES", "TRUE"):
        thread = threading.Thread(target=_probe, args=(found,), daemon=True)  # name look-up knows no time limit
        thread.start()
        thread.join(PROBE_SECONDS)
    if not found:
        _use_cache_alone()
    return bool(found)


def _probe(found: list[bool]) -> None:
    from huggingface_hub import constants

    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=PROBE_SECONDS):
            found.append(True)
    except (OSError, ValueError):
        return


def _use_cache_alone() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):  # they have read the variable if they are imported
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def like_a_path(name: str) -> bool:
    """Whether a name that is no folder can only have been meant as one: hub names are `name` or `owner/name`."""
    return not name or name.startswith((".", "/", "~")) or name.count("/") > 1


def raise_unseen(key: str, name: str) -> NoReturn:
    """Raises Unseen for what is neither here nor, now, on the hub; UserError where `name` was rather meant as a path.

    So it was when its first part is a folder here.
    """
    parent, slash, _ = name.partition("/")
    if slash and Path(parent).is_dir():
        raise UserError(f"{key} = {name!r} is not in the folder {parent} here, nor on this machine as a hub name: correct the path")
    raise Unseen("is not on this machine and the hub is out of reach")


def model_settings(name: str, key: str = "model.model") -> tuple[dict[str, Any], str]:
    """A model's config.json, and where it was found; `key` is the setting that names it.

    Raises Unseen when it is on a hub out of reach, UserError when there is no such model or it is not readable.
    """
    if name == "tiny":
        from rollout.tiny import MODEL_LENGTH

        return {"max_position_embeddings": MODEL_LENGTH}, "made by code"
    if Path(name).is_dir():
        folder = Path(name)
        if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
            raise UserError(f"{key} = {name!r} is a folder without weights (*.safetensors): give a checkpoint's folder")
        settings = _read(folder / "config.json", name, key)
        _check_weights(folder, name, key)
        return settings, "local folder"
    if like_a_path(name) or Path(name).is_file():
        raise UserError(f"{key} = {name!r} is no folder: give a checkpoint folder that exists, or a hub name{_or_tiny(key)}")
    return _hub_settings(name, key)


def _or_tiny(key: str) -> str:
    return ", or tiny" if key == "model.model" else ""


def _check_weights(folder: Path, name: str, key: str) -> None:
    """Raises UserError where a file of weights is missing, or not as long as its own header says; reads no weight."""
    from safetensors import SafetensorError, safe_open

    files = {path.name for path in folder.glob("*.safetensors") if not path.name.startswith(".")}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = _read(index, name, key, index.name).get("weight_map")
        files |= {str(file) for file in places.values()} if isinstance(places, dict) else set()
    for file in sorted(files):
        try:
            with safe_open(folder / file, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(f"{key} = {name!r} has a {file} that cannot be read ({error}): write the checkpoint again") from None


def _hub_settings(name: str, key: str) -> tuple[dict[str, Any], str]:
    online = reachable()
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return _read(Path(cached), name, key), "in the hub's cache"
        if not online:
            raise_unseen(key, name)
        return _read(Path(hf_hub_download(name, "config.json", etag_timeout=PROBE_SECONDS)), name, key), "on the hub"
    except HFValidationError:
        raise UserError(f"{key} = {name!r} is neither a folder nor a hub name: give one of these{_or_tiny(key)}") from None
    except GatedRepoError:
        raise UserError(f"{key} = {name!r} asks for an access token on the hub: set HF_TOKEN, or take another model") from None
    except RepositoryNotFoundError:
        raise UserError(f"{key} = {name!r} is neither a folder here nor a model on the hub: correct the name") from None
    except OSError as error:
        raise Unseen(f"could not be fetched ({type(error).__name__})") from None


def _read(file: Path, name: str, key: str, what: str = "config.json") -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{key} = {name!r} has no {what}: give a checkpoint's folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{key} = {name!r} has a {what} that cannot be read ({error}): write the checkpoint again") from None
    if not isinstance(settings, dict):
        raise UserError(f"{key} = {name!r} has a {what} that is no JSON object: write the checkpoint again")
    return settings


def context_length(settings: dict[str, Any]) -> int | None:
    """Tokens that a model can hold at once, stretched positions (YaRN, linear, dynamic) included; None where it is not said."""
    text = settings.get("text_config") or settings
    base = text.get("max_position_embeddings") or text.get("n_positions")
    if not base:
        return None
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "yarn":
        return max(int(base), int(rope.get("original_max_position_embeddings", base) * rope.get("factor", 1.0)))
    return int(base * rope.get("factor", 1.0)) if kind in ("linear", "dynamic") else int(base)
