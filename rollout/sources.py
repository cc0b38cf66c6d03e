"""Sets of questions: built-in tasks, reasoning-gym, files and hub data sets behind one interface.

A source has a name, a size and questions by number; which of them are trained on is decided in `rollout/prompts.py`.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollout.chat import Message
from rollout.config import SourceConfig
from rollout.errors import UserError
from rollout.tables import HubTable, Record, Table, open_files
from rollout.tasks import find_task

ENUMERATED = 1 << 17  # procedural tasks of at most so many questions are enumerated, larger ones never
GYM_SIZE = 2000  # samples of a reasoning-gym task unless options.size says otherwise


@dataclass(frozen=True)
class Row:
    """One question before it is tokenised. `prompt` is text or chat messages; `question` is its text, whatever the format."""

    index: int
    prompt: str | list[Message]
    question: str
    answer: str
    verifier: str
    where: str
    meta: Mapping[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """Questions by number, in `[0, size)`."""

    name: str
    config: SourceConfig
    size: int

    def read(self, index: int) -> Row: ...

    def fingerprints(self) -> np.ndarray | None:
        """One uint64 per question, equal for equal questions; None where there are too many to enumerate."""
        ...


def fingerprint(question: str) -> int:
    """A stable 64-bit hash of a question's text, blind to white space."""
    return int.from_bytes(hashlib.blake2b(" ".join(question.split()).encode(), digest_size=8).digest(), "big")


class TaskSource:
    """A built-in task."""

    def __init__(self, config: SourceConfig) -> None:
        assert config.task is not None
        self.name, self.config = config.task, config
        self.task = find_task(config.task)
        self.options = self.task.settings(config.options)
        self.size = self.task.size(self.options)

    def read(self, index: int) -> Row:
        text, answer = self.task.question(index, self.options)
        return Row(index, text, text, answer, self.config.verifier, f"task {self.name} question {index}")

    def fingerprints(self) -> np.ndarray | None:
        if self.size > ENUMERATED:
            return None
        return np.fromiter((fingerprint(self.read(i).question) for i in range(self.size)), dtype=np.uint64, count=self.size)


class TableSource:
    """Rows of a file or hub data set, mapped by the fields of the config. Every row is looked at once, when it is opened."""

    def __init__(self, name: str, config: SourceConfig, table: Table) -> None:
        self.name, self.config, self.table, self.size = name, config, table, len(table)
        self._prints = np.fromiter((fingerprint(row.question) for row in self.walk()), dtype=np.uint64, count=self.size)

    def read(self, index: int) -> Row:
        return self._row(index, self.table.read(index))

    def walk(self) -> Iterator[Row]:
        """All rows in order; much quicker than reading them one by one."""
        yield from (self._row(i, record) for i, record in enumerate(self.table.walk()))

    def fingerprints(self) -> np.ndarray | None:
        return self._prints

    def _row(self, index: int, record: Record) -> Row:
        where = self.table.where(index)
        prompt = _prompt_of(_pick(record, self.config.prompt_field, "prompt_field", where), self.config.prompt_field, where)
        answer = _text(_pick(record, self.config.answer_field, "answer_field", where))
        verifier = self.config.verifier
        if self.config.verifier_field is not None:
            verifier = str(_pick(record, self.config.verifier_field, "verifier_field", where))
        question = prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt if m["role"] == "user")
        meta = {f: _pick(record, f, "meta_fields", where) for f in self.config.meta_fields}
        return Row(index, prompt, question, answer, verifier, where, meta)


def _pick(record: Record, path: str, key: str, where: str) -> Any:
    """The value at a dotted path. Raises UserError naming the fields that there are."""
    if path in record:
        value: Any = record[path]
    else:
        value = record
        for part in path.split("."):
            if isinstance(value, dict) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            else:
                raise UserError(
                    f"{key} = {path!r} is not in {where}: set {key} to one of its fields, which are {', '.join(_fields(record))}"
                )
    if value is None:
        raise UserError(f"{key} = {path!r} has no value in {where}: fill it in or remove the row")
    return value


def _fields(record: Record, above: str = "") -> list[str]:
    """All dotted paths of a record, nested ones included."""
    out = []
    for key, value in record.items():
        out += _fields(value, f"{above}{key}.") if isinstance(value, dict) and value else [f"{above}{key}"]
    return out


def _prompt_of(value: Any, path: str, where: str) -> str | list[Message]:
    if isinstance(value, str) and value.strip():
        return value
    messages = value if isinstance(value, list) else []
    if messages and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages):
        return [{"role": m["role"], "content": m["content"]} for m in messages]
    raise UserError(
        f"prompt_field = {path!r} holds {str(value)[:60]!r} in {where}: it must be text that is not empty, or a list of "
        "messages with role and content"
    )


def _text(value: Any) -> str:
    """A gold answer as text: strings as they are, numbers as written, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _gym_file(config: SourceConfig, seed: int, folder: Path) -> Path:
    """The stored samples of a reasoning-gym task, made on the first call.

    Some of its tasks are not deterministic, so samples are made once, stored, and never made again.
    """
    options = {"size": GYM_SIZE, "seed": seed, **config.options}
    digest = hashlib.blake2b(json.dumps([config.gym, options], sort_keys=True, default=str).encode(), digest_size=6).hexdigest()
    file = folder / f"{config.gym}-{digest}.jsonl"
    if file.is_file():
        return file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a library that it imports
            import reasoning_gym
    except ImportError as error:
        raise UserError(f"gym = {config.gym!r} needs the extra `gym`: install it with pip install 'winnow[gym]'") from error
    try:
        entries = list(reasoning_gym.create_dataset(config.gym, **options))
    except Exception as error:  # asserts and TypeErrors of its own config classes
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"gym = {config.gym!r} with options = {config.options!r} is refused by reasoning-gym: check the name and its options ({reason})"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    with part.open("w", encoding="utf-8") as out:
        for entry in entries:
            out.write(
                json.dumps({"prompt": entry["question"], "answer": entry["answer"], "gym_entry": entry}, default=str, ensure_ascii=False)
                + "\n"
            )
    part.replace(file)  # whole or not at all
    return file


def open_source(config: SourceConfig, seed: int = 0, folder: Path | None = None) -> Source:
    """The source that a config names. `folder` keeps the samples of reasoning-gym tasks, `seed` makes them (unless options.seed does).

    Raises UserError when not exactly one of task, gym, path and hub is given, or the set cannot be read.
    """
    given = [k for k in ("task", "gym", "path", "hub") if getattr(config, k) is not None]
    if len(given) != 1:
        raise UserError(
            f"a source must have exactly one of task, gym, path and hub, and this one has {' and '.join(given) or 'none'}: remove or add"
        )
    if config.task is not None:
        return TaskSource(config)
    if config.gym is not None:
        if folder is None:
            raise UserError(f"gym = {config.gym!r} needs a folder to store its samples in: set run_dir")
        fixed = config.model_copy(
            update={"prompt_field": "prompt", "answer_field": "answer", "verifier_field": None, "meta_fields": ["gym_entry"]}
        )
        return TableSource(f"gym:{config.gym}", fixed, open_files(str(_gym_file(config, seed, folder)), ()))
    fields = [f for f in (config.prompt_field, config.answer_field, config.verifier_field, *config.meta_fields) if f is not None]
    columns = list(dict.fromkeys(f.split(".")[0] for f in fields))
    if config.path is not None:
        return TableSource(Path(config.path).stem, config, open_files(config.path, columns))
    assert config.hub is not None
    table = HubTable(config.hub, config.subset, config.split, columns)
    if not len(table):
        raise UserError(f"hub = {config.hub!r}, split = {config.split!r} is empty: choose another split")
    name = Path(config.hub).name + (f":{config.subset}" if config.subset else "")
    return TableSource(name, config, table)


def open_sources(configs: Sequence[SourceConfig], seed: int = 0, folder: Path | None = None) -> list[Source]:
    """All sources, their names made unique (a second `addition` is `addition#2`)."""
    sources = [open_source(config, seed, folder) for config in configs]
    seen: dict[str, int] = {}
    for source in sources:
        seen[source.name] = seen.get(source.name, 0) + 1
        if seen[source.name] > 1:
            source.name = f"{source.name}#{seen[source.name]}"
    return sources


def rows_of(source: Source, limit: int | None = None) -> Iterator[Row]:
    """Rows in order; of a source larger than `limit`, that many spread evenly over it."""
    count = source.size if limit is None else min(limit, source.size)
    if isinstance(source, TableSource) and count == source.size:
        yield from source.walk()
        return
    for i in range(count):
        yield source.read(i * source.size // count)
