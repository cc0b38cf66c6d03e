"""The registry and the verifiers that are about no number: `format`, `function`, `random`. Does not cover the pool."""

from __future__ import annotations

import pytest

from rollout.errors import UserError
from verifier import VERIFIERS, check_gold, load
from verifier.extract import after_thinking, boxes


def test_every_verifier_of_the_registry_loads():
    for name in VERIFIERS:
        assert callable(load(name).verify)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"'numerc'.*'numeric'"):
        load("numerc")


def test_a_second_name_stands_for_a_verifier_with_other_settings():
    assert load("brevity", {"verifier": "function"}) is load("function")


@pytest.mark.parametrize(
    ("options", "response", "expect"),
    [
        ({}, "so \\boxed{5}", 1),
        ({}, "\\boxed{5} \\boxed{6}", 0),
        ({}, "\\boxed{ }", 0),
        ({}, "<think>\\boxed{5}", 0),
        ({"shape": "think_box"}, "<think>a</think> \\boxed{5}", 1),
        ({"shape": "think_box"}, "\\boxed{5}", 0),
        ({"shape": "marker"}, "a #### 5", 1),
        ({"shape": "marker"}, "#### 5 #### 6", 0),
        ({"shape": "regex", "pattern": r"\d+ .*"}, "12 abc\nd", 1),
        ({"shape": "regex", "pattern": r"\d+"}, "12 abc", 0),
    ],
)
def test_format(options, response, expect):
    assert load("format").verify("", response, options, {}).reward == expect


def test_format_without_a_known_shape_is_our_error():
    assert load("format").verify("", "x", {"shape": "round"}, {}).status == "error"


def test_random_knows_nothing_and_can_be_repeated():
    verify = load("random").verify
    drawn = [verify(str(i), str(i), {}, {}).reward for i in range(2000)]
    assert drawn == [verify(str(i), str(i), {}, {}).reward for i in range(2000)]
    assert 900 < sum(drawn) < 1100
    assert 350 < sum(verify("1", str(i), {"p": 0.2, "salt": 3}, {}).reward == 1.0 for i in range(2000)) < 450


def test_function_by_dotted_path(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def short(gold, response, meta):\n    return 1 / (1 + len(response)) + meta.get('bonus', 0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    verify = load("function").verify
    assert verify("", "abc", {"path": "my_rewards.short"}, {"bonus": 1}).reward == 1.25
    assert verify("", "abc", {"path": "my_rewards:short"}, {}).reward == 0.25
    with pytest.raises(UserError, match="my_rewards.long"):
        verify("", "abc", {"path": "my_rewards.long"}, {})


def test_a_verifier_without_gold_answers_has_nothing_to_check():
    assert check_gold("format", "whatever") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{\frac{1}{2}} then \fbox{3}", [r"\frac{1}{2}", "3"]),
        (r"\boxed{a \boxed{b} c}", [r"a \boxed{b} c"]),
        (r"\boxed{1} \boxed{\frac{1}{2}", ["1"]),
        (r"{ \boxed{5}", ["5"]),
        (r"\boxed{ \{1, 2\} }", [r" \{1, 2\} "]),
        (r"\boxed{ \{ }", [r" \{ "]),
        ("\\boxed{" * 3000, []),
        ("no box }}}", []),
    ],
)
def test_boxes(text, found):
    assert boxes(text) == found


def test_after_thinking():
    assert after_thinking("a") == "a"
    assert after_thinking("<think>a</think>b") == "b"
    assert after_thinking("a</think>b") == "b"
    assert after_thinking("<think>a</think><think>b") is None
