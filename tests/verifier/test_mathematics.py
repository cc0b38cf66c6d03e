"""`math`: the given cases, more of their kinds, policies, gates. Does not cover deadlines (test_pool, test_fuzz)."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier import check_gold, math_symbolic, mathematics
from verifier.math_parse import Refused, Unreadable, parse
from verifier.math_text import peel, split, tidy
from verifier.math_value import equal, exact, proportional

CASES = Path(__file__).parent / "cases"
GIVEN = [json.loads(line) for line in (CASES / "math.jsonl").read_text().splitlines()]
MORE = [json.loads(line) for line in (CASES / "math_more.jsonl").read_text().splitlines()]


def judge(gold, response, **options):
    return mathematics.verify(gold, response, options, {})


def box(answer):
    return f"So the result is \\boxed{{{answer}}}."


@pytest.mark.parametrize("case", GIVEN, ids=[c["id"] for c in GIVEN])
def test_case(case):
    response = case["response"] if "response" in case else "".join(text * n for text, n in case["response_rep"])
    start = time.perf_counter()
    verdict = judge(case["gold"], response)
    assert (verdict.status, verdict.reward) == ("value", case["expect"]), (case["why"], verdict.detail)
    assert time.perf_counter() - start < case["max_seconds"]


def test_more_of_the_same_kinds():
    wrong = [(c["gold"], c["response"], c["expect"]) for c in MORE if judge(c["gold"], c["response"]).reward != c["expect"]]
    assert not wrong


@pytest.mark.parametrize("case", GIVEN, ids=[c["id"] for c in GIVEN])
def test_every_gold_answer_accepts_itself(case):
    assert check_gold("math", case["gold"]) is None


@pytest.mark.parametrize("gold", ["", "  ", "\\frac{1}{2", "$$", "x" * 5000])
def test_a_gold_answer_that_nothing_can_match_is_our_error(gold):
    assert judge(gold, box("1")).status == "error"
    assert check_gold("math", gold) is not None


@pytest.mark.parametrize(
    ("options", "gold", "response", "default", "expect"),
    [
        ({"final": "box"}, "73", "Final Answer: **73**", 1, 0),
        ({"final": "only_box"}, "7", "\\boxed{5} no: \\boxed{7}", 1, 0),
        ({"final": "only_box"}, "7", "\\boxed{7} yes: \\boxed{7}", 1, 1),
        ({"final": "anywhere"}, "12", "it is on page 12", 0, 1),
        ({"candidates": "any"}, "7", box("7, 8"), 0, 1),
        ({"tolerance": 0.02}, "\\frac{1}{3}", box("0.33"), 0, 1),
        ({"tolerance": 0.001}, "\\frac{1}{3}", box("0.33"), 0, 0),
        ({"rounding": True}, "\\frac{100}{3}", box("33.33"), 0, 1),
        ({"rounding": True}, "\\frac{100}{3}", box("33.3"), 0, 0),
        ({"percent": "strict"}, "10\\%", box("0.1"), 1, 0),
        ({"degrees": "strict"}, "45^\\circ", box("\\frac{\\pi}{4}"), 1, 0),
        ({"factored": "expand"}, "(x+1)(x-2)", box("x^2-x-2"), 0, 1),
    ],
)
def test_policies(options, gold, response, default, expect):
    assert judge(gold, response).reward == default
    assert judge(gold, response, **options).reward == expect


def test_an_unknown_policy_is_our_error():
    assert judge("1", "1", final="first").status == "error"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2\\frac{1}{2}", Fraction(5, 2)),
        ("-11 5/6", Fraction(-71, 6)),
        ("\\frac12\\cdot 4", Fraction(2)),
        ("2^{-3}", Fraction(1, 8)),
        ("-2^2", Fraction(-4)),
        ("2^3^2", Fraction(512)),
        ("5!/3!", Fraction(20)),
        ("\\sqrt{\\frac{9}{4}}", Fraction(3, 2)),
        ("27^{2/3}", Fraction(9)),
        ("0.1\\overline{6}", Fraction(1, 6)),
        ("42_9", Fraction(38)),
        ("|3-5|", Fraction(2)),
        ("\\gcd(12, 18)", Fraction(6)),
        ("\\lfloor -2.5 \\rfloor", Fraction(-3)),
        ("50\\%", Fraction(1, 2)),
    ],
)
def test_values(text, value):
    assert exact(parse(tidy(text))) == value


@pytest.mark.parametrize(
    "text", ["4 10/3", "2 3", "1 +", "(1", "x^", "__import__('os')", "a dogs", "2..3", "", "x^2^", "42_3", "\\frac{1}"]
)
def test_what_is_no_formula(text):
    with pytest.raises(Unreadable):
        parse(tidy(text))


@pytest.mark.parametrize("text", ["(" * 65 + "1" + ")" * 65, "9" * 257, "+".join("x" * 2000), "x" * 5000, "\\sqrt{" * 70 + "2" + "}" * 70])
def test_gates(text):
    with pytest.raises(Refused):
        parse(text)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("(x+y+z+w)^{60}", "(x+y+z+w)^{60}+1", False),
        ("2^{100000000}", "2^{100000001}", False),
        ("2^{100000000}\\cdot 2", "2^{100000001}", True),
        ("\\frac{1}{2004!}", "\\frac{1}{2006!}", False),
        ("\\sqrt{2}\\cdot 10^{-300}", "0", False),
        ("\\sin(\\pi)", "0", True),
        ("\\sqrt{2}+10^{-100}", "\\sqrt{2}", False),
        ("\\sqrt{x^2}", "x", None),
        ("(-1)^{2n}", "1", True),
        ("\\frac{x}{x}", "1", True),
        ("\\frac{1}{0}", "\\frac{2}{0}", None),
    ],
)
def test_equality(a, b, same):
    assert equal(parse(tidy(a)), parse(tidy(b))) is same


@pytest.mark.parametrize(("a", "b", "sign"), [("x-y", "2x-2y", 1), ("x-y", "y-x", -1), ("x-y", "x+y", 0), ("x^2-1", "x-1", 0)])
def test_proportional(a, b, sign):
    assert proportional(parse(a), parse(b)) == sign


def test_a_tower_is_refused_at_once():
    start = time.perf_counter()
    assert judge("5", box("5^{5^{5^{5^{5}}}}")).reward == 0
    assert judge("5", box("((10!)!)!")).reward == 0
    assert judge("5^{5^{5^{5^{5}}}}", box("5^{5^{5^{5^{5}}}}")).reward == 1
    assert time.perf_counter() - start < 0.5


def test_peel_and_split():
    assert peel("{((1,2))}.") == "(1,2)"
    assert peel("(1)+(2)") == "(1)+(2)"
    assert peel("(" * 300 + "5" + ")" * 300) == "5"
    assert split("(1,2),{3,4},5") == ["(1,2)", "{3,4}", "5"]
    assert split("1),(2") == ["1),(2"]


@pytest.mark.parametrize(
    "text", [r"\int_0^1 x", r"\sum k", "9^{9^9}", "x" * 500, "\x02words\x03", "__import__", "1" * 50, "(" * 30, "x^{65}", "n!"]
)
def test_what_math_verify_never_sees(text):
    assert not math_symbolic.equal("x", text)[0]
    assert math_symbolic._refuse(text)


def test_math_verify_reads_what_we_do_not():
    assert judge("\\mathbb{R}\\setminus\\{0\\}", box("\\mathbb{R} \\backslash \\{0\\}")).status == "value"
    assert math_symbolic.equal(r"2\vec{i}+3\vec{j}", r"3\vec{j}+2\vec{i}")[0]


@given(st.fractions(max_denominator=10**6), st.sampled_from(["{}", "\\frac{{{n}}}{{{d}}}", "{n}/{d}", "x = {}", "\\text{{{}}}", "$({})$"]))
@settings(max_examples=150, deadline=None)
def test_a_number_is_itself_in_any_dress_and_no_other(number, dress):
    answer = dress.format(number, n=number.numerator, d=number.denominator)
    assert judge(str(number), box(answer)).reward == 1
    assert judge(str(number + Fraction(1, 10**6 + 3)), box(answer)).reward == 0


PIECES = [*"0123456789+-*/^_()[]{}\\,.=<>|xyn!% $", "\\frac", "\\sqrt", "\\text", "\\pm", "\u221a", "\u00b2"]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
@settings(max_examples=300, deadline=2000)
def test_no_answer_makes_it_raise(text):
    assert judge("7", box(text)).status == "value"
    assert judge("x+1", f"\\boxed{text}").status == "value"
