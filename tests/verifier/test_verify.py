"""`winnow verify`: lines in, verdicts out, in order; bad lines by number. Does not cover the progress bar."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from verifier import verify

ROOT = Path(__file__).parent.parent.parent
CASES = Path(__file__).parent / "cases"


def run(tmp_path, lines, *flags):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    code = verify.main([str(source), "--output", str(target), "--verifier_processes", "2", *flags])
    return code, [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []


def test_the_given_cases_in_input_order(tmp_path):
    rows = [json.loads(line) for name in ("gsm8k", "math") for line in (CASES / f"{name}.jsonl").read_text().splitlines()]
    code, verdicts = run(tmp_path, rows)
    assert code == 0
    assert [v["id"] for v in verdicts] == [r["id"] for r in rows]
    assert [v["reward"] for v in verdicts] == [r["expect"] for r in rows]
    assert all(set(v) == {"id", "reward", "status", "detail", "seconds"} for v in verdicts)
    assert all(v["seconds"] < r["max_seconds"] for v, r in zip(verdicts, rows, strict=True))


def test_programs_come_with_tests_instead_of_gold(tmp_path):
    tests = {"type": "call", "fn": "f", "cases": [[[1], 2]]}
    rows = [
        {"id": 1, "verifier": "code", "code": "def f(x): return x + 1", "tests": tests},
        {"id": 2, "verifier": "code", "response": "```\ndef f(x): return x\n```", "tests": tests, "limits": {"time_s": 1}},
    ]
    code, verdicts = run(tmp_path, rows)
    assert code == 0 and [(v["id"], v["reward"]) for v in verdicts] == [(1, 1), (2, 0)]


def test_bad_lines_are_named_and_the_rest_is_scored(tmp_path, capsys):
    good = {"verifier": "numeric", "gold": 5, "response": "5"}
    lines = [
        good,
        "{\n",
        "[1]\n",
        "\n",
        {"gold": "1", "response": "1"},
        {**good, "verifier": "nope"},
        {**good, "gold": None},
        {"verifier": "numeric", "gold": "1"},
        good,
    ]
    code, verdicts = run(tmp_path, lines)
    assert code == 1
    assert [(v["id"], v["reward"]) for v in verdicts] == [(1, 1), (9, 1)]
    said = capsys.readouterr().err
    for number, what in ((2, "not JSON"), (3, "not a JSON object"), (5, "'verifier'"), (6, "'nope'"), (7, "'gold'"), (8, "'response'")):
        assert f"line {number}: " in said and what in next(line for line in said.splitlines() if line.startswith(f"line {number}:"))
    assert "6 of 9 lines" in said


def test_one_verifier_for_all_and_its_settings(tmp_path):
    rows = [{"gold": "7", "response": "Answer: 7"}, {"verifier": "nope", "gold": "7", "response": "\\boxed{7}"}]
    assert [v["reward"] for v in run(tmp_path, rows, "--verifier", "math")[1]] == [1, 1]
    assert [v["reward"] for v in run(tmp_path, rows, "--verifier", "math", "--options", "math.final=box")[1]] == [0, 1]


def test_mistakes_in_the_command(tmp_path, capsys):
    assert verify.main(["nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    assert run(tmp_path, [], "--verifier", "maths")[0] == 2
    assert "'math'" in capsys.readouterr().err
    assert run(tmp_path, [], "--options", "final=box")[0] == 2
    assert run(tmp_path, [], "--verify_timeout", "0")[0] == 2
    capsys.readouterr()
    for argv in ([], ["nowhere.jsonl"], [str(tmp_path)], ["x", "--verify_timeout", "soon"]):
        assert verify.main(argv) == 2
        said = capsys.readouterr().err
        assert said.startswith("winnow: ") and said.count("\n") == 1


def test_a_long_file_keeps_its_order(tmp_path):
    rows = [{"id": i, "gold": str(i), "response": f"{i if i % 3 else i + 1}"} for i in range(3000)]
    code, verdicts = run(tmp_path, rows, "--verifier", "numeric")
    assert code == 0 and [v["id"] for v in verdicts] == list(range(3000))
    assert [v["reward"] for v in verdicts] == [float(i % 3 != 0) for i in range(3000)]


def test_it_starts_quickly_and_takes_standard_input():
    start = time.monotonic()
    line = json.dumps({"id": "a", "verifier": "gsm8k", "gold": "5", "response": "#### 5"})
    done = subprocess.run([sys.executable, "-m", "verifier.verify", "-"], input=line, capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert json.loads(done.stdout)["reward"] == 1 and done.returncode == 0
    assert time.monotonic() - start < 10  # 0.5 s on a quiet machine
