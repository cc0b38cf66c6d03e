"""`winnow ledger RUN`: print the persisted ledger of a run and check that the books close.

A run appends one snapshot a step to `RUN/ledger.jsonl`; the last line is the present state. Counts of what is closed only rise from line
to line within one life of the run; a resume or a rollback, which goes back in time, begins another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.load import SentenceParser
from learner.ledger import FLIGHT, MASKED, UNINFORMATIVE, Ledger
from rollout.errors import UserError

LEDGER_FILE = "ledger.jsonl"


def append_snapshot(run_dir: Path, ledger: Ledger, life: int = 0) -> None:
    """Adds the ledger as one line; a line that a crash left half-written is cut off first.

    `life` counts the resumes and rollbacks of the run so far.
    """
    path = run_dir / LEDGER_FILE
    line = (json.dumps(ledger.to_json() | {"life": life}) + "\n").encode()
    with path.open("r+b" if path.exists() else "w+b") as file:
        end = file.seek(0, 2)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                _cut_torn_line(file, end)
        file.seek(0, 2)
        file.write(line)


def _cut_torn_line(file: Any, end: int) -> None:
    step, stop = 4096, end
    while stop > 0:
        start = max(stop - step, 0)
        file.seek(start)
        at = file.read(stop - start).rfind(b"\n")
        if at >= 0:
            file.truncate(start + at + 1)
            return
        stop = start
    file.truncate(0)


@dataclass(frozen=True)
class Books:
    """A run's persisted ledger: the last readable snapshot, how many there are, and what is wrong.

    `resumes` counts the lives after the first; `torn` says that a crash cut the last line short.
    """

    last: Ledger
    snapshots: int
    resumes: int
    torn: bool
    problems: list[str]


def read_books(run_dir: Path) -> Books:
    """Reads and checks every snapshot of a run. Raises UserError when there is no ledger to check."""
    if not run_dir.is_dir():
        raise UserError(f"RUN = {run_dir} is not a folder: give the run folder that training printed as its last line.")
    path = run_dir / LEDGER_FILE
    if not path.is_file():
        raise UserError(f"RUN = {run_dir} has no {LEDGER_FILE}: give a run folder in which at least one step was taken.")
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError as error:
        raise UserError(f"RUN = {run_dir} has a {LEDGER_FILE} that cannot be read ({error.strerror}): get the right to read it.") from None
    lines = text.split("\n")
    tail = lines.pop()
    problems: list[str] = []
    ledgers: list[Ledger] = []
    resumes = life = 0
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            ledger, before, life = Ledger.from_json(data), life, data.get("life", 0)
        except (ValueError, RecursionError) as error:
            problems.append(f"Line {number} of {LEDGER_FILE} is no snapshot: {error}.")
            continue
        problems += [f"Line {number}: {sentence}" for sentence in ledger.check()]
        # A second resume from one checkpoint has the number of the first.
        if ledgers and (life != before or ledger.batches <= ledgers[-1].batches):
            resumes += 1
        elif ledgers:
            problems += [f"Line {number}: {sentence}" for sentence in ledger.check_after(ledgers[-1])]
        ledgers.append(ledger)
    if not ledgers and not problems:
        raise UserError(f"RUN = {run_dir} has an empty {LEDGER_FILE}: give a run folder in which at least one step was taken.")
    return Books(ledgers[-1] if ledgers else Ledger(), len(ledgers), resumes, bool(tail), problems)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def groups_table(ledger: Ledger) -> Table:
    """Groups by state, with their share of those dispatched."""
    table = Table("state", "groups", "share", title=f"Groups after {ledger.batches} batches", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    failed = sorted(name for name in ledger.groups if name.startswith("failed("))
    known = ["trained", *(f"uninformative({kind})" for kind in UNINFORMATIVE), *failed, "surplus"]
    names = known + [name for name in ledger.groups if name not in known]
    for name in names:
        table.add_row(name, f"{ledger.groups[name]:,}", _share(ledger.groups[name], ledger.dispatched))
        if name == "trained":
            for kind, n in sorted(ledger.trained_uninformative.items()):
                table.add_row(f"  of these without signal: {kind}", f"{n:,}", _share(n, ledger.dispatched))
    for state in ("kept", *FLIGHT):
        table.add_row(state, f"{ledger.live(state):,}", _share(ledger.live(state), ledger.dispatched))
    table.add_section()
    table.add_row("dispatched", f"{ledger.dispatched:,}", "")
    return table


def tokens_table(ledger: Ledger) -> Table:
    """Tokens by account, with their share of those received."""
    table = Table("account", "tokens", "share", title="Tokens received", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    known = ["trained", *(f"masked({m})" for m in MASKED), "uninformative", "failed", "surplus", "lost_attempt"]
    for name in known + [n for n in ledger.tokens if n not in known]:
        table.add_row(name, f"{ledger.tokens[name]:,}", _share(ledger.tokens[name], ledger.received))
    table.add_row("held by kept groups", f"{ledger.held:,}", _share(ledger.held, ledger.received))
    table.add_section()
    table.add_row("received", f"{ledger.received:,}", "")
    return table


def print_books(books: Books, console: Console) -> None:
    """Both tables, the failed attempts, and whether the books close."""
    last = books.last
    console.print(groups_table(last))
    console.print(tokens_table(last))
    if last.attempts_failed:
        console.print("Failed attempts: " + ", ".join(f"{reason} {n:,}" for reason, n in sorted(last.attempts_failed.items())) + ".")
    if books.torn:
        console.print(f"The last line of {LEDGER_FILE} is half-written (a crash) and is not counted.")
    resumed = f", {_count(books.resumes, 'resume')}" if books.resumes else ""
    for problem in books.problems:
        console.print(problem, style="red", markup=False, highlight=False)
    verdict = f"do not close: {_count(len(books.problems), 'problem')}" if books.problems else "close"
    console.print(f"The books {verdict} ({_count(books.snapshots, 'snapshot')} checked{resumed}).")


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when the books close, 1 when they do not, 2 for a user error."""
    parser = SentenceParser(prog="winnow ledger", description="Print and check where every group and every token of a run is.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help="print the last snapshot and the problems as JSON instead of tables")
    try:
        args = parser.parse_args(argv)
        books = read_books(args.run)
    except SystemExit as stop:
        return int(stop.code or 0)
    except UserError as error:
        print(f"winnow: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"ledger": books.last.to_json(), "closes": not books.problems, "problems": books.problems}))
    else:
        print_books(books, Console(markup=False, highlight=False))
    return 1 if books.problems else 0
