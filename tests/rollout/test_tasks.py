"""The built-in tasks: answers are right, questions are distinct, options are checked.

Answers are recomputed here from the question's text alone. Not covered: whether a model can read the questions.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable

import pytest

from rollout.errors import UserError
from rollout.tasks import TASKS, find_task


def _sum(text: str) -> int:
    return sum(int(t) for t in re.findall(r"[+-]?\d+", text))


def _next(text: str) -> int:
    seen = [int(t) for t in re.findall(r"\d+", text)]
    return seen[-1] + (seen[-1] - seen[-2]) + (seen[-1] - 2 * seen[-2] + seen[-3])


def _letters(text: str) -> int:
    letter, word = re.fullmatch(r"count\((\w),(\w+)\)=", text).groups()  # type: ignore[union-attr]
    return sum(c == letter for c in word)


BY_TEXT: dict[str, Callable[[str], int]] = {
    "addition": _sum,
    "chain_sum": _sum,
    "products": lambda t: math.prod(int(n) for n in re.findall(r"\d+", t)),
    "gcd": lambda t: max(d for d in range(1, 51) if all(int(n) % d == 0 for n in re.findall(r"\d+", t))),
    "count_bits": lambda t: bin(int(re.findall(r"\d+", t)[0])).count("1"),
    "letter_counting": _letters,
    "number_sequence": _next,
}


@pytest.mark.parametrize("name", TASKS)
def test_answers_follow_from_the_text(name: str) -> None:
    task, rng = TASKS[name], random.Random(3)
    options = task.settings({})
    for _ in range(300):
        text, answer = task.sample(rng, options)
        assert int(answer) == BY_TEXT[name](text), text


SMALL = {
    "addition": {"digits": 1},
    "chain_sum": {"terms": 2, "subtract": 1},
    "products": {"factors": 2},
    "gcd": {"maximum": 12},
    "count_bits": {"maximum": 77},
    "letter_counting": {"length": 3, "letters": 3},
    "number_sequence": {"start": 5, "step": 4, "growth": 3},
}
SIZES = {"addition": 100, "chain_sum": 200, "products": 100, "gcd": 144, "count_bits": 78, "letter_counting": 81, "number_sequence": 96}


@pytest.mark.parametrize("words", [0, 1])
@pytest.mark.parametrize("name", TASKS)
def test_every_number_is_another_question(name: str, words: int) -> None:
    task = TASKS[name]
    options = task.settings({**SMALL[name], "words": words})
    texts = {task.question(i, options)[0] for i in range(task.size(options))}
    assert len(texts) == task.size(options) == SIZES[name]


def test_addition_has_all_two_digit_sums_and_only_those() -> None:
    task = find_task("addition")
    options = task.settings({})
    found = {task.question(i, options) for i in range(task.size(options))}
    assert found == {(f"{a}+{b}=", str(a + b)) for a in range(10, 100) for b in range(10, 100)}
    assert task.question(0, task.settings({"words": 1})) == ("What is 10+10?", "20")


def test_subtraction_is_asked_for() -> None:
    task = find_task("chain_sum")
    plain, signed = task.settings({"digits": 2}), task.settings({"digits": 2, "subtract": 1})
    rng = random.Random(0)
    assert not any("-" in task.sample(rng, plain)[0] for _ in range(100))
    assert any(int(task.sample(rng, signed)[1]) < 0 for _ in range(100))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("addition", {"digit": 2}, ["no option 'digit'", "did you mean digits?"]),
        ("addition", {"digits": 0}, ["digits = 0", "from 1 to 9"]),
        ("gcd", {"maximum": "many"}, ["maximum = 'many'", "whole number"]),
        ("gcd", {"maximum": True}, ["maximum = True", "whole number"]),
        ("gcd", {"zzz": 1}, ["no option 'zzz'", "maximum, words"]),
    ],
)
def test_wrong_options_are_named(name: str, options: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        find_task(name).settings(options)
    assert all(w in str(error.value) for w in words)


def test_unknown_task_gets_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"task = 'adition' .*did you mean addition\?"):
        find_task("adition")
