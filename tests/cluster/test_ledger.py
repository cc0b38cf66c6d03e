"""`winnow ledger RUN`: exit codes, sentences, torn lines and resumes.

Does not cover: that a run writes its snapshots (the loop's tests).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.ledger import LEDGER_FILE, append_snapshot, main, read_books
from learner.ledger import BatchTokens, Ledger


def step(ledger: Ledger, tokens: int = 10) -> Ledger:
    """One more batch of one group, after one group without signal."""
    for kept in (False, True):
        uid = ledger.last_uid + 1
        ledger.open(uid)
        ledger.move(uid, "generating")
        if kept:
            ledger.keep(uid, tokens)
            ledger.commit({uid: ""}, [], BatchTokens(trained=tokens))
        else:
            ledger.close(uid, "uninformative", "all_wrong", 4)
    return ledger


def test_closed_books(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger()
    for _ in range(3):
        append_snapshot(tmp_path, step(ledger))
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "The books close (3 snapshots checked)." in out
    rows = [line.replace("│", " ").split() for line in out.splitlines()]
    for row in (["trained", "3", "50.0", "%"], ["uninformative(all_wrong)", "3", "50.0", "%"], ["dispatched", "6"], ["received", "42"]):
        assert row in rows, row
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ledger": ledger.to_json(), "closes": True, "problems": []}


def test_books_that_do_not_close(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger()
    append_snapshot(tmp_path, step(ledger))
    data = json.loads((tmp_path / LEDGER_FILE).read_text())
    data["groups"]["trained"] = 2
    (tmp_path / LEDGER_FILE).write_text(json.dumps(data) + "\n")
    assert main([str(tmp_path)]) == 1
    assert "Line 1: 2 groups were dispatched" in capsys.readouterr().out.replace("\n", " ")


def test_a_count_that_falls_within_a_life_is_a_problem_and_a_resume_is_none(tmp_path: Path) -> None:
    ledger = Ledger()
    append_snapshot(tmp_path, step(ledger))
    checkpoint = ledger.to_json()
    ledger.open(90)
    ledger.move(90, "generating")
    ledger.close(90, "failed", "generation")
    append_snapshot(tmp_path, step(ledger))
    resumed = step(step(Ledger.from_json(checkpoint)))
    append_snapshot(tmp_path, resumed, life=1)
    books = read_books(tmp_path)
    assert (books.resumes, books.problems, books.last.batches) == (1, [], 3)
    (tmp_path / LEDGER_FILE).write_text((tmp_path / LEDGER_FILE).read_text().replace('"life": 1', '"life": 0'))
    assert read_books(tmp_path).problems == ["Line 3: Between batches 2 and 3 the failed(generation) groups fell from 1 to 0."]


def test_two_resumes_from_one_checkpoint_are_two_lives(tmp_path: Path) -> None:
    """Both have the same number, since the first wrote no checkpoint, and may have the same step."""
    ledger = step(Ledger())
    append_snapshot(tmp_path, ledger)
    first = Ledger.from_json(ledger.to_json())
    first.attempts_failed["deadline"] = 5
    append_snapshot(tmp_path, step(first), life=1)
    append_snapshot(tmp_path, step(Ledger.from_json(ledger.to_json())), life=1)
    books = read_books(tmp_path)
    assert (books.problems, books.resumes) == ([], 2)


def test_torn_last_line_is_no_problem_and_is_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger()
    append_snapshot(tmp_path, step(ledger))
    path = tmp_path / LEDGER_FILE
    path.write_bytes(path.read_bytes() + b'{"format": 1, "groups": ' + b"x" * 10_000)
    assert main([str(tmp_path)]) == 0
    assert "half-written" in capsys.readouterr().out
    append_snapshot(tmp_path, step(ledger))
    books = read_books(tmp_path)
    assert (books.snapshots, books.torn, books.problems) == (2, False, [])


def test_torn_only_line_is_replaced(tmp_path: Path) -> None:
    (tmp_path / LEDGER_FILE).write_bytes(b"{" * 5000)
    append_snapshot(tmp_path, step(Ledger()))
    assert read_books(tmp_path).snapshots == 1


def test_a_damaged_line_in_the_middle_is_a_problem(tmp_path: Path) -> None:
    append_snapshot(tmp_path, step(Ledger()))
    path = tmp_path / LEDGER_FILE
    path.write_text("not json\n" + path.read_text())
    assert main([str(tmp_path)]) == 1
    assert read_books(tmp_path).problems[0].startswith(f"Line 1 of {LEDGER_FILE} is no snapshot")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("received", float("inf")), ("received", 14.0), ("batches", True), ("last_uid", -1), ("attempts_failed", {"[/x]": -1}),
        ("trained_uninformative", {"dull": 1}), ("live", [[None, "kept", 0]]), ("live", [["5", "kept", 0]]), ("tokens", None),
    ],
)  # fmt: skip
def test_what_no_ledger_has_is_a_problem_and_never_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object
) -> None:
    append_snapshot(tmp_path, step(Ledger()))
    path = tmp_path / LEDGER_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}) + "\n")
    assert main([str(tmp_path)]) == 1
    assert "The books do not close" in capsys.readouterr().out


def test_names_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets are no markup."""
    append_snapshot(tmp_path, step(Ledger()))
    path = tmp_path / LEDGER_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attempts_failed": {"[/x]": 2}}) + "\n")
    assert main([str(tmp_path)]) == 0
    assert "[/x] 2" in capsys.readouterr().out


def test_failed_attempts_only_become_more(tmp_path: Path) -> None:
    ledger = step(Ledger())
    ledger.attempts_failed["deadline"] = 5
    append_snapshot(tmp_path, ledger)
    ledger.attempts_failed["deadline"] = 4
    append_snapshot(tmp_path, step(ledger))
    assert read_books(tmp_path).problems == ["Line 2: Between batches 1 and 2 the attempts that failed by deadline fell from 5 to 4."]


def test_nesting_without_end_is_a_problem(tmp_path: Path) -> None:
    append_snapshot(tmp_path, step(Ledger()))
    path = tmp_path / LEDGER_FILE
    path.write_text("[" * 100_000 + "\n" + path.read_text())
    assert len(read_books(tmp_path).problems) == 1


@pytest.mark.parametrize("make", ["nothing", "folder", "empty"])
def test_user_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: str) -> None:
    run = tmp_path / "run"
    if make != "nothing":
        run.mkdir()
    if make == "empty":
        (run / LEDGER_FILE).touch()
    assert main([str(run)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"winnow: RUN = {run} ") and ": give " in message and message.count("\n") == 1
    assert main([]) == 2
    message = capsys.readouterr().err
    assert message.startswith("winnow: ") and "RUN" in message and message.count("\n") == 1
