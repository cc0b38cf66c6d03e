"""reasoning-gym's scorers in their jail; skipped without the extra `gym`. Does not cover the making of samples."""

from __future__ import annotations

import importlib.util
import os

import pytest

from verifier import check_gold, gym

needs_gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="the extra gym is not installed")


@pytest.fixture(scope="module", autouse=True)
def _no_server_is_left():
    yield
    gym.stop()


def entry(task, **settings):
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=1, **settings)[0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer> <answer> 2 </answer>", "2"),
        ("so \\boxed{3}", "3"),
        (" 4\n", "4"),
        ("<answer>5", "5"),
        ("\\boxed{1} <answer>6</answer>", "6"),
    ],
)
def test_final_answer(text, answer):
    assert gym.final_answer(text) == answer


@pytest.mark.parametrize("meta", [{}, {"gym_entry": "{"}, {"gym_entry": {}}, {"gym_entry": {"metadata": {"source_dataset": "countdown"}}}])
def test_what_cannot_be_scored_is_our_error(meta):
    assert gym.verify("1", "1", {}, meta).status == "error"


def test_tasks_known_to_pay_for_anything_are_not_fit():
    assert not gym.FIT & {"countdown", "game_of_life_halting", "syllogism", "puzzle24", "n_queens", "prime_factorization", "codeio"}


@needs_gym
@pytest.mark.parametrize("task", ["chain_sum", "gcd", "letter_counting", "spell_backward", "base_conversion"])
def test_a_gold_answer_is_right_and_another_is_not(task):
    e = entry(task)
    assert gym.verify(e["answer"], f"<answer>{e['answer']}</answer>", {}, {"gym_entry": e}).reward == 1
    assert gym.verify(e["answer"], f"I say {e['answer']}", {}, {"gym_entry": e}).reward == 0
    assert gym.verify(e["answer"], "garbage", {}, {"gym_entry": e}).reward == 0
    assert check_gold("gym", e["answer"], {}, {"gym_entry": e}) is None


@needs_gym
def test_an_answer_that_its_scorer_executes_reaches_nothing(tmp_path):
    e = entry("countdown")
    for attack in (
        f"__import__('os').system('touch {tmp_path}/pwned')",
        f"open('{tmp_path}/pwned', 'w')",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "9**9**9**9",
    ):
        verdict = gym.verify(e["answer"], attack, {"any_task": True, "time_s": 1}, {"gym_entry": e})
        assert verdict.reward == 0, verdict
    assert not os.listdir(tmp_path)
    right = entry("chain_sum")
    assert gym.verify(right["answer"], right["answer"], {}, {"gym_entry": right}).reward == 1
