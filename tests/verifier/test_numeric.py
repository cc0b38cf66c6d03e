"""The number readers: `numeric`, `gsm8k` and `quantity`. Does not cover the pool they run in."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier import check_gold, gsm8k, numeric, quantity

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "gsm8k.jsonl").read_text().splitlines()]


def response_of(case: dict) -> str:
    return case["response"] if "response" in case else "".join(text * n for text, n in case["response_rep"])


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_gsm8k_case(case):
    start = time.perf_counter()
    verdict = gsm8k.verify(case["gold"], response_of(case), {}, {})
    assert (verdict.status, verdict.reward) == ("value", case["expect"]), case["why"]
    assert time.perf_counter() - start < case["max_seconds"]


@pytest.mark.parametrize(
    ("gold", "response", "expect"),
    [
        ("18", "#### 18.", 1),
        ("0.5", "#### .5", 1),
        ("-18", "#### \u221218", 1),
        ("18", "#### \uff11\uff18", 1),
        ("She has 3*6=18 eggs.\n#### 18", "#### **18**", 1),
        ("18", "#### \\boxed{18}", 1),
        ("18", "#### 3 * 6 = 18 eggs", 1),
        ("18", "#### 17 = 18", 0),
        ("1.5", "#### 1 1/2", 1),
        ("1234567", "#### 1 234 567", 1),
        ("18", "#### 1,8", 0),
        ("18", "#### ", 0),
        ("18", "#### eighteen", 0),
        ("18", "<think>\n#### 18", 0),
        ("18", "<think>#### 17</think>#### 18", 1),
        ("18", "x = 18, found on page 12 of 99.", 0),
        ("18", "#### 18\ud800", 1),
        ("18", "####\x0018", 1),
    ],
)
def test_gsm8k_kinds(gold, response, expect):
    assert gsm8k.verify(gold, response, {}, {}).reward == expect


def test_gsm8k_policies_of_the_final_answer():
    assert gsm8k.verify("72", "The answer is 72.", {"final": "marker"}, {}).reward == 0
    assert gsm8k.verify("72", "#### 71\nor rather 72", {"final": "last_number"}, {}).reward == 1


@pytest.mark.parametrize(
    ("gold", "response", "expect"),
    [
        ("85", "8 85", 1),
        ("85", "7+8=15 4+3+1=8 85\n", 1),
        ("85", "85 0", 0),
        ("5", "12.5", 0),
        ("-5", "3-5", 0),
        ("5", "3-5", 1),
        ("-5", "x=-5", 1),
        ("1234", "1,234", 1),
        ("85", "85" * 100_000, 0),
        ("5", "5" + " a" * 40_000, 1),
        ("5", "5" + " a" * 60_000, 0),
        ("5", "", 0),
        ("5", "no number", 0),
    ],
)
def test_numeric(gold, response, expect):
    assert numeric.verify(gold, response, {}, {}).reward == expect


def test_numeric_reads_fractions_when_told():
    assert numeric.verify("0.75", "3/4", {"fractions": True}, {}).reward == 1
    assert numeric.verify("4", "3/4", {"fractions": True}, {}).reward == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("11 5/6", Fraction(71, 6)),
        ("-1 1/4", Fraction(-5, 4)),
        ("4 10/3", None),
        ("1,234.50", Fraction(2469, 2)),
        ("1,23", None),
        ("6.02e23", Fraction(602 * 10**21)),
        ("1e999", None),
        ("1/0", None),
        ("9" * 257, Fraction(10**257 - 1)),
        ("9" * 400, None),
        ("", None),
        ("1 2", None),
        ("\u0663", None),
    ],
)
def test_read(text, value):
    assert quantity.read(text) == value


@given(st.fractions(), st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_the_last_number_is_found_whatever_comes_before(number, before):
    assert quantity.read(str(quantity.last_number(f"{before} = {number}"))) == number


@given(st.text(alphabet="0123456789.,/-+ eE#\u2212x", max_size=80))
@settings(max_examples=300, deadline=None)
def test_no_text_makes_the_readers_raise(text):
    quantity.read(text)
    assert gsm8k.verify("1", text, {}, {}).status == "value"
    assert numeric.verify("1", text, {}, {}).status == "value"


def test_gold_answers_are_checked():
    assert check_gold("numeric", "85") is None
    assert check_gold("gsm8k", "3*6=18\n#### 18") is None
    assert "not a number" in str(check_gold("numeric", "eighty-five"))
    assert "no number" in str(check_gold("gsm8k", "#### none"))
