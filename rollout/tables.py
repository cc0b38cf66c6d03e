"""Rows on disk by number: JSONL and Parquet files, Hugging Face data sets. Nothing is copied into memory that need not be.

A table knows its length, reads one row by number, and walks over all rows in order.
"""

from __future__ import annotations

import glob
import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollout.errors import UserError

Record = dict[str, Any]


class Table(Protocol):
    """Rows by number. `where(i)` names row i as a person would look it up."""

    def __len__(self) -> int: ...
    def read(self, index: int) -> Record: ...
    def walk(self) -> Iterator[Record]: ...
    def where(self, index: int) -> str: ...


class JsonLines:
    """JSONL files, kept as byte offsets (8 bytes a row). Blank lines are skipped."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = list(files)
        self.starts: list[int] = []  # number of the first row of each file
        self.offsets, self.lines = array("Q"), array("Q")
        for name in self.files:
            self.starts.append(len(self.offsets))
            self._index(name)

    def _index(self, name: str) -> None:
        """Notes where each row starts, and refuses the first line that is no JSON object."""
        offset = 0
        with open(name, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    _parse(line, name, number)
                    self.offsets.append(offset)
                    self.lines.append(number)
                offset += len(line)

    def _file(self, index: int) -> str:
        return self.files[bisect_right(self.starts, index) - 1]

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, index: int) -> Record:
        name = self._file(index)
        with open(name, "rb") as file:
            file.seek(self.offsets[index])
            return _parse(file.readline(), name, self.lines[index])

    def walk(self) -> Iterator[Record]:
        for name in self.files:
            with open(name, "rb") as file:
                yield from (_parse(line, name, number) for number, line in enumerate(file, start=1) if line.strip())

    def where(self, index: int) -> str:
        return f"{self._file(index)} line {self.lines[index]}"


def _parse(line: bytes, name: str, number: int) -> Record:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")  # an error beyond the line's end stays on the line
        if number == 1 and text.lstrip().startswith("["):
            raise UserError(f"path = {name!r} looks like one JSON array: write it as JSONL, one JSON object a line, without [ and ]")
        record = json.loads(text)
    except UnicodeDecodeError as error:
        raise UserError(f"path = {name!r} is not UTF-8 at line {number}: save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"path = {name!r} is not JSON at line {number} ({error.msg}, column {error.colno}): write one JSON object a line"
        ) from error
    if not isinstance(record, dict):
        raise UserError(
            f"path = {name!r} has at line {number} a {type(record).__name__} in place of a JSON object: write one object a line"
        )
    return record


class ArrowTable:
    """Parquet files, read through Arrow; only the columns that are asked for are loaded."""

    def __init__(self, files: Sequence[str], columns: Sequence[str]) -> None:
        import pyarrow
        import pyarrow.parquet

        self.name = ", ".join(files)
        parts = []
        for name in files:
            try:
                schema = pyarrow.parquet.read_schema(name)
                wanted = [c for c in columns if c in schema.names]
                # With a column missing all are read: the error about the missing field then names what there is.
                parts.append(pyarrow.parquet.read_table(name, columns=wanted if len(wanted) == len(columns) else None, memory_map=True))
            except (pyarrow.ArrowInvalid, OSError) as error:
                raise UserError(
                    f"path = {name!r} is not a Parquet file that can be read: write it again, or name it .jsonl if it is one"
                ) from error
        self.table = pyarrow.concat_tables(parts, promote_options="permissive")

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def read(self, index: int) -> Record:
        return self.table.slice(index, 1).to_pylist()[0]

    def walk(self) -> Iterator[Record]:
        for batch in self.table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def where(self, index: int) -> str:
        return f"{self.name} row {index}"


class HubTable:
    """A split of a Hugging Face data set, memory-mapped by `datasets`."""

    def __init__(self, name: str, subset: str | None, split: str, columns: Sequence[str]) -> None:
        self.name = f"hub data set {name!r}" + (f" ({subset})" if subset else "")
        data = _load_hub(name, subset, split)
        if all(c in data.column_names for c in columns):
            data = data.select_columns(list(columns))
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def read(self, index: int) -> Record:
        return dict(self.data[index])

    def walk(self) -> Iterator[Record]:
        for start in range(0, len(self.data), 1024):
            columns = self.data[start : start + 1024]
            yield from (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))

    def where(self, index: int) -> str:
        return f"{self.name} row {index}"


def _load_hub(name: str, subset: str | None, split: str) -> Any:
    """The split, from a folder saved by `save_to_disk`, a folder laid out as a data set, or the hub."""
    import datasets

    datasets.disable_progress_bars()
    folder = Path(name)
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(name)
            if isinstance(found, datasets.DatasetDict):
                if split not in found:
                    raise UserError(f"split = {split!r} is not in {name!r}: it has {', '.join(map(str, found))}")
                found = found[split]
            return found
        if subset and folder.is_dir() and (folder / subset).is_dir() and not (folder / "README.md").is_file():
            name, subset = str(folder / subset), None  # without a card `datasets` does not know that folders are subsets
        return datasets.load_dataset(name, subset, split=split)
    except UserError:
        raise
    except Exception as error:  # `datasets` raises a dozen kinds, from the network's to its own
        reason = " ".join(str(error).split())[:240]
        what = f"hub = {name!r}" + (f", subset = {subset!r}" if subset else "") + f", split = {split!r}"
        raise UserError(
            f"{what} does not load: check the names, or give a local folder or file ({type(error).__name__}: {reason})"
        ) from error


def open_files(path: str, columns: Sequence[str]) -> Table:
    """The table of a file or glob. Raises UserError when there is none, it is empty, or of an unknown kind."""
    files = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) and not Path(path).exists() else [path]
    files = [f for f in files if not Path(f).is_dir()] if len(files) > 1 else files
    if not files or not Path(files[0]).exists():
        raise UserError(f"path = {path!r} does not exist: give a JSONL or Parquet file, or a glob that matches some")
    if Path(files[0]).is_dir():
        raise UserError(
            f"path = {path!r} is a folder: give a glob such as {path.rstrip('/')}/*.jsonl, or hub = {path!r} if it is laid out "
            "as a data set"
        )
    kinds = {Path(f).suffix.lower() for f in files}
    if kinds <= {".jsonl", ".json", ".ndjson"}:
        table: Table = JsonLines(files)
    elif kinds == {".parquet"}:
        table = ArrowTable(files, columns)
    else:
        raise UserError(
            f"path = {path!r} matches files of the kinds {', '.join(sorted(kinds))}: give .jsonl files or .parquet files, not "
            "others nor both"
        )
    if not len(table):
        raise UserError(f"path = {path!r} is empty: give a file with at least one row")
    return table
