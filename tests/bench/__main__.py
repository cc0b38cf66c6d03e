"""The benchmarks: `python -m tests.bench [--only NAME[,NAME]] [--out bench.json] [--list]`, or `make bench [ONLY=NAME]`.

Each runs in a process of its own, one after the other, on all the cores that this process may use; one table is printed and one list of
objects written. Exits with 1 where a benchmark fails or misses its bar: figures are this machine's, and a busy machine gives others.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.bench.registry import BENCHMARKS, Benchmark, find
from tests.bench.rows import Row, table, to_json

ROOT = Path(__file__).resolve().parents[2]


def measure(benchmark: Benchmark, cores: set[int]) -> list[Row]:
    """Its rows; where it fails, one row that says so. Whatever processes it started end with it."""
    env = os.environ | {"OMP_NUM_THREADS": str(benchmark.threads or len(cores)), "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [sys.executable, "-m", "tests.bench.one", benchmark.name, str(out)]
        with open(Path(folder, "log"), "w+") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
            os.sched_setaffinity(process.pid, cores)
            try:
                process.wait(benchmark.timeout)
                reason = "" if process.returncode == 0 else f"exit status {process.returncode}"
            except subprocess.TimeoutExpired:
                reason = f"not done after {benchmark.timeout:.0f} s"
            finally:
                end_group(process)
            log.seek(0)
            lines = [line.rstrip() for line in log if line.strip()]
        if not reason and out.exists():
            return [Row(**row) for row in json.loads(out.read_text())]
    print("\n".join(f"  {line}" for line in lines[-25:]), file=sys.stderr)
    return [Row(benchmark.name, "", float("nan"), bar="runs to its end", met=False, note=f"failed: {reason}")]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(arguments: list[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Ours against a peer and the machine's limit.")
    parser.add_argument("--only", default="", help="names, separated by commas; all without it")
    parser.add_argument("--out", default="bench.json", help="where the rows go")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    args = parser.parse_args(arguments)
    if args.list:
        print("\n".join(f"{b.name:16} {b.about}" for b in BENCHMARKS))
        return 0
    try:
        chosen = find([name for name in args.only.replace(",", " ").split()])
    except KeyError as error:
        print(f"ONLY={error.args[0]} is not a benchmark: give one of {', '.join(b.name for b in BENCHMARKS)}.", file=sys.stderr)
        return 2
    cores, rows = os.sched_getaffinity(0), list[Row]()
    for benchmark in chosen:
        start = time.monotonic()
        print(f"{benchmark.name}: {benchmark.about} …", file=sys.stderr, flush=True)
        rows += measure(benchmark, cores)
        print(f"{benchmark.name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    print(table(rows))
    Path(args.out).write_text(json.dumps(to_json(rows), indent=1) + "\n")
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
