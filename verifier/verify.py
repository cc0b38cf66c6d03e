"""`winnow verify FILE.jsonl`: score a file of answers with the same pool, without Ray.

A line has `verifier` (or `--verifier` for all), `gold`, and `response` (or `response_rep`, a list of [text, count]); a program has `tests`,
`limits` and `code` or `response`; `id` and `meta` are optional. One verdict a line comes out, in input order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, TextIO

from pydantic import ValidationError

from rollout.errors import UserError
from verifier import VERIFIERS, entry
from verifier.config import VerifyConfig
from verifier.pool import Item, VerifierPool
from verifier.verdict import Verdict

CHUNK = 64  # items that are handed to the pool at once
AHEAD = 16  # chunks on their way: the file is never held whole


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0: every line was scored; 1: some lines could not be read; 2: a mistake in the command."""
    try:
        args = _parser().parse_args(argv)
        options = _options(args)
        if args.verifier:
            entry(args.verifier, options.get(args.verifier))
        config = VerifyConfig(
            verifier_processes=args.verifier_processes,
            verify_timeout=args.verify_timeout,
            verify_memory_mb=args.verify_memory_mb,
            verifier_options=options,
        )
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(_open(args.file))
            target = stack.enter_context(open(args.output, "w", encoding="utf-8")) if args.output else sys.stdout
            pool = stack.enter_context(VerifierPool(config, [args.verifier] if args.verifier else []))
            tick = stack.enter_context(_progress(args.file, args.quiet))
            bad, total = _run(pool, source, target, args.verifier, tick)
    except BrokenPipeError:  # whoever reads the verdicts has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 1
    except ValidationError as e:
        first = e.errors()[0]
        print(f"winnow: --{'.'.join(map(str, first['loc']))} {first['input']} is refused: {first['msg']}.", file=sys.stderr)
        return 2
    except (UserError, OSError) as e:
        print(f"winnow: {e}", file=sys.stderr)
        return 2
    if bad:
        print(f"winnow: {bad} of {total} lines could not be read", file=sys.stderr)
    return 1 if bad else 0


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    defaults = VerifyConfig()
    fields = VerifyConfig.model_fields
    p = _Parser(
        prog="winnow verify", description="Score a file of answers: one JSON object a line in, one verdict a line out."
    )
    p.add_argument("file", help="JSONL file, or - for standard input")
    p.add_argument("--verifier", help=f"verifier of every line, whatever the line says: {', '.join(VERIFIERS)}")
    p.add_argument("--output", help="file for the verdicts; default: standard output")
    p.add_argument(
        "--options", action="append", default=[], metavar="NAME.KEY=VALUE", help="a setting of a verifier, e.g. math.final=box; repeatable"
    )
    p.add_argument(
        "--verifier_processes",
        type=int,
        default=os.cpu_count() or 1,
        help=f"{fields['verifier_processes'].description}; default: one a core",
    )
    p.add_argument("--verify_timeout", type=float, default=defaults.verify_timeout, help=fields["verify_timeout"].description)
    p.add_argument("--verify_memory_mb", type=int, default=defaults.verify_memory_mb, help=fields["verify_memory_mb"].description)
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    return p


def _options(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    options: dict[str, dict[str, Any]] = {}
    for given in args.options:
        path, equals, text = given.partition("=")
        name, dot, key = path.partition(".")
        if not (equals and dot and name and key):
            raise UserError(f"--options {given!r} names no setting: write it as NAME.KEY=VALUE, e.g. math.final=box.")
        try:
            options.setdefault(name, {})[key] = json.loads(text)
        except ValueError:
            options.setdefault(name, {})[key] = text
    return options


@contextlib.contextmanager
def _open(path: str) -> Iterator[TextIO]:
    if path == "-":
        yield sys.stdin
        return
    if not Path(path).is_file():
        raise UserError(f"the file {path!r} does not exist: give a JSONL file.")
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as f:
        yield f


def _run(pool: VerifierPool, source: TextIO, target: TextIO, verifier: str | None, tick: Any) -> tuple[int, int]:
    """Score all lines; how many were bad, and how many there were."""
    waiting: deque[tuple[list[Any], Future[list[Verdict]]]] = deque()
    ids: list[Any] = []
    items: list[Item] = []
    bad = number = 0

    def hand_over(ahead: int) -> None:
        nonlocal ids, items
        if items:
            waiting.append((ids, pool.submit(items)))
            ids, items = [], []
        while len(waiting) > ahead:
            names, future = waiting.popleft()
            for name, verdict in zip(names, future.result(), strict=True):
                target.write(json.dumps(_row(name, verdict)) + "\n")
            tick(len(names))

    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            item, name = _item(line, verifier)
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            bad += 1
            print(f"line {number}: {e}", file=sys.stderr)
            tick(1)
            continue
        ids.append(number if name is None else name)
        items.append(item)
        if len(items) >= CHUNK:
            hand_over(AHEAD)
    hand_over(0)
    target.flush()
    return bad, number


def _row(name: Any, verdict: Verdict) -> dict[str, Any]:
    return {"id": name, "reward": verdict.reward, "status": verdict.status, "detail": verdict.detail, "seconds": round(verdict.seconds, 6)}


def _item(line: str, verifier: str | None) -> tuple[Item, Any]:
    """The item of a line, and its id. Raises ValueError with what is wrong with the line."""
    try:
        row = json.loads(line)
    except ValueError as e:
        raise ValueError(f"not JSON ({e})") from e
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    name = verifier or row.get("verifier")
    if not isinstance(name, str):
        raise ValueError("no field 'verifier': add it, or give --verifier")
    entry(name)
    meta = dict(row.get("meta") or {})
    meta.update({k: row[k] for k in ("tests", "limits") if k in row})
    if "code" in row:
        meta["program"] = True
    gold = row.get("gold", "" if "tests" in row or name in ("format", "function", "random") else None)
    if not isinstance(gold, str | int | float) or isinstance(gold, bool):
        raise ValueError("no field 'gold' with a text or a number")
    response = row.get("code", row.get("response"))
    if response is None and isinstance(row.get("response_rep"), list):
        response = "".join(str(text) * int(count) for text, count in row["response_rep"])
    if not isinstance(response, str):
        raise ValueError("no field 'response' (or 'response_rep', or 'code') with a text")
    return Item(name, str(gold), response, meta), row.get("id")


@contextlib.contextmanager
def _progress(path: str, quiet: bool) -> Iterator[Any]:
    """A function to be told of finished lines; shows a bar where standard error is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    total = None
    if path != "-":
        with open(path, "rb") as f:
            total = sum(1 for line in f if line.strip())
    columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("verifying", total=total)
        yield lambda n: bar.advance(task, n)


if __name__ == "__main__":
    sys.exit(main())
