"""One benchmark in this process: `python -m tests.bench.one NAME ROWS.json`. The runner sets threads and cores before it starts this."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from tests.bench.registry import find
from tests.bench.rows import to_json


def main(name: str, out: str) -> None:
    """Run it and write its rows."""
    (benchmark,) = find([name])
    rows = importlib.import_module(benchmark.module).run()
    assert all(row.name.split("/")[0] == name for row in rows), f"rows of {name} are named after it"
    Path(out).write_text(json.dumps(to_json(rows)))


if __name__ == "__main__":
    main(*sys.argv[1:])
