"""`gym`: the scorers of reasoning-gym (the extra `gym`), run in a jailed child; only a score of exactly 1 counts.

The row's meta has the stored sample as `gym_entry`: samples are never made again, because some tasks depend on the hash seed.
Options: `any_task` (default false: tasks whose scorers pay for garbage, reject their own gold or evaluate what they are given are refused),
`sandbox` = "auto" | "none", `time_s` = 5, `mem_mb` = 2048.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from verifier.extract import after_thinking, boxes
from verifier.process import kill_tree
from verifier.verdict import Verdict, error, timeout, value

# Of the 105 tasks of 0.1.25: those whose scorer takes its own gold answer, takes no garbage, raises on nothing and evaluates no answer.
FIT = frozenset({
    "acre", "advanced_geometry", "aiw", "arc_1d", "arc_agi", "base_conversion", "basic_arithmetic", "bf", "binary_alternation",
    "caesar_cipher", "calendar_arithmetic", "chain_sum", "circuit_logic", "color_cube_rotation", "complex_arithmetic", "count_bits",
    "count_primes", "course_schedule", "cryptarithm", "decimal_arithmetic", "decimal_chain_sum", "dice", "emoji_mystery",
    "family_relationships", "futoshiki", "gcd", "isomorphic_strings", "largest_island", "lcm", "leg_counting", "letter_counting",
    "list_functions", "mahjong_puzzle", "manipulate_matrix", "maze", "mini_sudoku", "modulo_grid", "needle_haystack", "number_filtering",
    "number_format", "number_sequence", "palindrome_generation", "path_star", "pool_matrix", "power_function", "products", "ransom_note",
    "rearc", "rectangle_count", "rotate_matrix", "rotten_oranges", "self_reference", "sentence_reordering", "shortest_path",
    "simple_equations", "simple_geometry", "spell_backward", "string_manipulation", "string_splitting", "string_synthesis", "sudoku",
    "tower_of_hanoi", "tsumego", "word_ladder", "word_sequence_reversal", "word_sorting", "zebra_puzzles",
})  # fmt: skip
MAX_ANSWER = 20_000  # characters
START_LIMIT = 60.0  # seconds for the import

_server: subprocess.Popen[str] | None = None


def verify(gold: str, response: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> Verdict:
    """1 when the task's own scorer gives the final answer a full score, else 0; an error without a stored sample or for an unfit task."""
    entry = meta.get("gym_entry")
    if isinstance(entry, str):
        try:
            entry = json.loads(entry)
        except ValueError:
            return error("meta.gym_entry is not JSON")
    task = entry.get("metadata", {}).get("source_dataset") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(task, str):
        return error("the row has no stored sample of a reasoning-gym task in meta.gym_entry")
    if task not in FIT and not options.get("any_task", False):
        return error(f"the reasoning-gym task {task!r} is not fit for rewards: choose another, or set verifier_options.gym.any_task = true")
    rest = after_thinking(response)
    if rest is None:
        return value(0, "unclosed think block")
    answer = final_answer(rest)
    if len(answer) > MAX_ANSWER:
        return value(0, "the answer is too long")
    limits = {"time_s": float(options.get("time_s", 5)), "mem_mb": float(options.get("mem_mb", 2048)), "out_kb": 64}
    said = _ask({"task": task, "answer": answer, "entry": entry, "limits": limits, "anyway": options.get("sandbox") == "none"})
    if "score" in said:
        return value(said["score"] == 1.0, f"{task}: {said['score']:g}")
    if "late" in said:
        return timeout(f"{task}: past its time")
    if "raised" in said:
        return value(0, f"{task}: its scorer raised {said['raised']}")
    if "open" in said:
        return error("no sandbox for the scorers of reasoning-gym on this machine: set verifier_options.gym.sandbox = 'none' to do without")
    return error(f"reasoning-gym does not know the task {task!r}")


def prepare(options: Mapping[str, Any]) -> None:
    """Start the server: reasoning-gym takes seconds to import."""
    _running()


def final_answer(text: str) -> str:
    r"""What stands in the last `<answer>…</answer>`, else in the last box, else the whole text."""
    start = text.rfind("<answer>")
    if start >= 0:
        return text[start + len("<answer>") :].partition("</answer>")[0].strip()
    found = boxes(text)
    return (found[-1] if found else text).strip()


def _ask(job: dict[str, Any]) -> dict[str, Any]:
    """One question to the server, which is started when there is none. Raises RuntimeError when it does not answer."""
    server = _running()
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps(job, default=str) + "\n")
    server.stdin.flush()
    return _line(server, job["limits"]["time_s"] + 10)


def _running() -> subprocess.Popen[str]:
    global _server
    if _server is None or _server.poll() is not None:
        boot = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from verifier.gym_server import main; main()"
        _server = subprocess.Popen(
            [sys.executable, "-P", "-c", boot, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        )
        _line(_server, START_LIMIT)
    return _server


def _line(server: subprocess.Popen[str], within: float) -> dict[str, Any]:
    """The server's next line. It writes whole lines, so what is ready can be read to its end."""
    assert server.stdout
    end = time.monotonic() + within
    while not select.select([server.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
        if time.monotonic() >= end:
            stop()
            raise RuntimeError("the reasoning-gym server does not answer")
    line = server.stdout.readline()
    if not line:
        stop()
        raise RuntimeError("the reasoning-gym server ended: is the extra `gym` installed?")
    return dict(json.loads(line))


def stop() -> None:
    """End the server, if there is one."""
    global _server
    if _server is not None:
        kill_tree(_server.pid)
        _server.wait()
        for pipe in (_server.stdin, _server.stdout):
            if pipe:
                pipe.close()
        _server = None


def canonical(gold: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> str | None:
    """The gold answer, where the task has one."""
    return f"<answer>{gold}</answer>" if gold else None
