"""The GPU script: `python -m tests.gpu.run [--out gpu.json] [--small]`, or `make gpu`. One GPU, 8 minutes at most, and of libraries
torch and transformers alone.

Prints one table and writes JSON: {"device", "date", "torch", "transformers", "checks": [...], "rows": [...]}. Exits with 1 where a check
fails. Without a GPU it runs the same at small sizes on the CPU (`--small` asks for these anywhere); the figures then say nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.gpu.checks import run_all
from tests.gpu.rates import learner_rates, loss_rates
from tests.gpu.setting import FULL, SMALL, device, start


def report(found: dict[str, Any]) -> str:
    """The table."""
    lines = [f"{found['device']}, torch {found['torch']}, transformers {found['transformers']}, {found['date']}", ""]
    lines += [f"{'ok  ' if c['ok'] else 'FAIL'}  {c['error']:.1e} (≤ {c['allowed']:.1e})  {c['name']}" for c in found["checks"]]
    lines.append("")
    for row in found["rows"]:
        cells = [f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "name"]
        lines.append(f"{row['name']}: {', '.join(cells)}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description="The learner's numbers on one GPU.")
    parser.add_argument("--out", default="gpu.json")
    parser.add_argument("--small", action="store_true", help="small sizes, which is all that a CPU does")
    args = parser.parse_args(arguments)
    where = device()
    small = args.small or where.type == "cpu"
    begun = time.monotonic()
    start(where)
    with tempfile.TemporaryDirectory() as folder:
        checks = run_all(where, Path(folder))
        size = SMALL if small else FULL
        rows = learner_rates(size, where, Path(folder)) + loss_rates(size, where)
    found = {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU, small sizes",
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": round(time.monotonic() - begun, 1),
        "checks": [{"name": name, "error": error, "allowed": most, "ok": error <= most} for name, error, most in checks],
        "rows": rows,
    }
    print(report(found))
    Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(c["ok"] for c in found["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
