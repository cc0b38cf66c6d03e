"""Built-in procedural tasks: each question is a pure function of its number.

A task enumerates its questions: `question(index, options)` gives question `index` of `size(options)` distinct ones, so a
stream can shuffle, resume and hold out without keeping any of them. All answers are integers, for the `numeric` verifier.
"""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import UserError

Options = Mapping[str, int]
Question = tuple[str, str, int]  # terse form, form in words, answer


@dataclass(frozen=True)
class Option:
    """One whole-number setting of a task, within `[low, high]`."""

    default: int
    low: int
    high: int
    meaning: str


WORDS = Option(0, 0, 1, "0: the terse form, e.g. 47+38=; 1: a question in words, for chat models")


@dataclass(frozen=True)
class Task:
    """A family of questions. `size` counts them and `ask` gives the one of a number in `[0, size)`."""

    name: str
    meaning: str
    options: Mapping[str, Option]
    size: Callable[[Options], int]
    ask: Callable[[int, Options], Question]

    def settings(self, given: Mapping[str, Any]) -> dict[str, int]:
        """The task's options with defaults filled in. Raises UserError for an unknown name or a value out of range."""
        known = {**self.options, "words": WORDS}
        for key, value in given.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
                raise UserError(f"task {self.name} has no option {key!r} (value {value!r}): {hint}")
            option = known[key]
            whole = isinstance(value, int) or (isinstance(value, str) and value.lstrip("-").isdigit())
            if not whole or not option.low <= int(value) <= option.high:
                raise UserError(
                    f"option {key} = {value!r} of task {self.name} must be a whole number from {option.low} to "
                    f"{option.high} ({option.meaning})"
                )
        return {key: int(given.get(key, option.default)) for key, option in known.items()}

    def question(self, index: int, options: Options) -> tuple[str, str]:
        """Prompt text and gold answer of question `index`, for options made by `settings`."""
        assert 0 <= index < self.size(options), f"question {index} of {self.name} does not exist"
        terse, words, answer = self.ask(index, options)
        return (words if options["words"] else terse), str(answer)

    def sample(self, rng: random.Random, options: Options) -> tuple[str, str]:
        """Prompt text and gold answer of a question drawn uniformly."""
        return self.question(rng.randrange(self.size(options)), options)


def _count(digits: int) -> int:
    """How many numbers have so many digits (0 to 9 for one digit)."""
    return 10 if digits == 1 else 9 * 10 ** (digits - 1)


def _number(index: int, digits: int) -> int:
    """The number of so many digits at `index`, from the smallest up."""
    return index if digits == 1 else 10 ** (digits - 1) + index


def _unmix(index: int, *bases: int) -> list[int]:
    """Mixed-radix digits of `index`, first base most significant."""
    out = []
    for base in reversed(bases):
        index, digit = divmod(index, base)
        out.append(digit)
    return out[::-1]


def _addition(index: int, o: Options) -> Question:
    a, b = (_number(i, o["digits"]) for i in _unmix(index, _count(o["digits"]), _count(o["digits"])))
    return f"{a}+{b}=", f"What is {a}+{b}?", a + b


def _chain_sum_size(o: Options) -> int:
    return _count(o["digits"]) ** o["terms"] * (2 ** (o["terms"] - 1) if o["subtract"] else 1)


def _chain_sum(index: int, o: Options) -> Question:
    signs, rest = divmod(index, _count(o["digits"]) ** o["terms"])
    terms = [_number(i, o["digits"]) for i in _unmix(rest, *[_count(o["digits"])] * o["terms"])]
    text, total = str(terms[0]), terms[0]
    for place, term in enumerate(terms[1:]):
        minus = signs >> place & 1
        text += f"{'-' if minus else '+'}{term}"
        total += -term if minus else term
    return f"{text}=", f"What is {text}?", total


def _products(index: int, o: Options) -> Question:
    factors = [_number(i, o["digits"]) for i in _unmix(index, *[_count(o["digits"])] * o["factors"])]
    text = "*".join(map(str, factors))
    return f"{text}=", f"What is {text}?", math.prod(factors)


def _gcd(index: int, o: Options) -> Question:
    a, b = (i + 1 for i in _unmix(index, o["maximum"], o["maximum"]))
    return f"gcd({a},{b})=", f"What is the greatest common divisor of {a} and {b}?", math.gcd(a, b)


def _count_bits(index: int, o: Options) -> Question:
    return f"bits({index})=", f"How many ones are in the binary form of {index}?", index.bit_count()


def _letter_counting(index: int, o: Options) -> Question:
    letter, *word = (chr(ord("a") + i) for i in _unmix(index, *[o["letters"]] * (o["length"] + 1)))
    text = "".join(word)
    return f"count({letter},{text})=", f'How many times does the letter "{letter}" occur in "{text}"?', text.count(letter)


def _number_sequence(index: int, o: Options) -> Question:
    value, step, growth = _unmix(index, o["start"] + 1, o["step"], o["growth"] + 1)
    step += 1
    shown = []
    for _ in range(o["terms"]):
        shown.append(str(value))
        value, step = value + step, step + growth
    text = ",".join(shown)
    return f"{text},?=", f"Which number comes next: {text}?", value


_DIGITS = "digits of each number"
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("addition", "the sum of two numbers", {"digits": Option(2, 1, 9, _DIGITS)}, lambda o: _count(o["digits"]) ** 2, _addition),
        Task(
            "chain_sum",
            "the sum of several numbers",
            {
                "terms": Option(3, 2, 20, "numbers in the sum"),
                "digits": Option(1, 1, 9, _DIGITS),
                "subtract": Option(0, 0, 1, "1: some numbers are taken away, and answers may be negative"),
            },
            _chain_sum_size,
            _chain_sum,
        ),
        Task(
            "products",
            "the product of numbers",
            {"factors": Option(2, 2, 5, "numbers in the product"), "digits": Option(1, 1, 6, _DIGITS)},
            lambda o: _count(o["digits"]) ** o["factors"],
            _products,
        ),
        Task(
            "gcd",
            "the greatest common divisor of two numbers",
            {"maximum": Option(50, 2, 10**6, "largest number")},
            lambda o: o["maximum"] ** 2,
            _gcd,
        ),
        Task(
            "count_bits",
            "how many ones a number has in binary",
            {"maximum": Option(1023, 1, 10**9, "largest number")},
            lambda o: o["maximum"] + 1,
            _count_bits,
        ),
        Task(
            "letter_counting",
            "how often a letter occurs in a made-up word",
            {"length": Option(6, 1, 40, "letters of the word"), "letters": Option(4, 2, 26, "size of the alphabet")},
            lambda o: o["letters"] ** (o["length"] + 1),
            _letter_counting,
        ),
        Task(
            "number_sequence",
            "the next number of a sequence with a steadily growing step",
            {
                "terms": Option(4, 3, 12, "numbers shown"),
                "start": Option(20, 0, 10**6, "largest first number"),
                "step": Option(9, 1, 10**6, "largest first step"),
                "growth": Option(2, 0, 10**6, "largest growth of the step; 0: arithmetic sequences only"),
            },
            lambda o: (o["start"] + 1) * o["step"] * (o["growth"] + 1),
            _number_sequence,
        ),
    )
}


def find_task(name: str) -> Task:
    """The built-in task of that name. Raises UserError with the nearest name otherwise."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(TASKS)}"
        raise UserError(f"task = {name!r} is not a built-in task: {hint}")
    return TASKS[name]
