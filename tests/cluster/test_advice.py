"""Advice: for every rule a series that raises it and one, as near as may be, that must not; and when a message is said.

Does not cover whether the flag helps. The healthy runs are drawn after the demo's: 25 steps in which the reward doubles, answers grow
from 8 to 17 tokens and the entropy falls to a third.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cluster import load
from cluster.advice import HOLDS, REPEAT, RULES, Adviser, Facts
from cluster.metrics import logged

FACTS = Facts(
    clip_inert=False, whitened=False, loss_agg="token-mean", clip_raised=False, overlong="score", mismatch="none", filter_groups=True,
    group_size=8, batch_size=32, max_tokens=100, max_staleness=1, engines=2, learner_ranks=1, engine_dtype="float32",
)  # fmt: skip

Fields = dict[str, float]
Course = Callable[[float, int], Fields]
"""(part of the run that is over, step) -> fields."""


def healthy(part: float, step: int) -> Fields:
    """A run that learns; small waves stand for noise."""
    wave = 0.03 * (-1) ** step
    return {
        "buffer.reward": 0.35 + 0.4 * part + wave,
        "buffer.informative": 0.97 - 0.15 * part + wave,
        "buffer.all_right": 0.01 + 0.14 * part,
        "buffer.all_wrong": 0.02,
        "buffer.equal": 0.0,
        "buffer.right": 0.35 + 0.4 * part + wave,
        "buffer.resp_len": 8 + 9 * part + wave,
        "buffer.truncated": 0.005,
        "buffer.verifier_errors": 0,
        "buffer.verifier_timeouts": 0,
        "buffer.scored": 37,
        "buffer.in_flight": 30,
        "buffer.blocked_by_oldest_s": 0.0,
        "buffer.refill_wait_s": 0.2,
        "train.clipfrac": 0.01,
        "train.entropy": 0.5 - 0.35 * part,
        "train.mismatch.mean_abs": 2e-7,
        "seconds_step": 2.0,
        "seconds_generate_wait": 0.8,
        "seconds_train": 1.0,
        "seconds_eval": 0.0,
        "seconds_checkpoint": 0.0,
    }


def said(course: Course, facts: Facts = FACTS, steps: int = 40) -> dict[str, str]:
    """Rule -> message of everything that a run is told in its `steps` steps."""
    adviser = Adviser(facts)
    found: dict[str, str] = {}
    for step in range(1, steps + 1):
        fields = healthy(step / steps, step) | course(step / steps, step)
        found |= {advice.rule: str(advice) for advice in adviser.step(step, logged(fields))}
    return found


def flat(part: float, step: int) -> Fields:
    return {"buffer.reward": 0.5, "buffer.right": 0.5, "buffer.resp_len": 12.0}


def with_(**changes: Any) -> Facts:
    return Facts(**{**vars(FACTS), **changes})


SYNC = with_(max_staleness=0)
CASES: dict[str, tuple[Course, Facts, Course, Facts, tuple[str, ...]]] = {
    # rule: (a series that raises it, facts, a series that must not, facts, words that the message has)
    "too_easy": (
        lambda p, s: {"buffer.informative": 0.05, "buffer.all_right": 0.9, "buffer.all_wrong": 0.05}, FACTS,
        lambda p, s: {"buffer.informative": 0.15, "buffer.all_right": 0.8, "buffer.all_wrong": 0.05}, FACTS,
        ("informative is 0.05", "too easy", "harder prompts"),
    ),
    "too_hard": (
        lambda p, s: {"buffer.informative": 0.05, "buffer.all_right": 0.05, "buffer.all_wrong": 0.9}, FACTS,
        lambda p, s: {"buffer.informative": 0.05 if s % 7 < 2 else 0.9, "buffer.all_wrong": 0.5}, FACTS,
        ("too hard", "--warmup_steps", "--group_size 16"),
    ),
    "same_reward": (
        lambda p, s: {"buffer.informative": 0.0, "buffer.equal": 0.9}, FACTS,
        lambda p, s: {"buffer.informative": 0.5, "buffer.equal": 0.5}, FACTS,
        ("neither right nor wrong", "--reward_weights"),
    ),
    "length_bias": (
        lambda p, s: flat(p, s) | {"buffer.resp_len": 20 + 40 * p}, FACTS,
        lambda p, s: {"buffer.resp_len": 20 + 40 * p}, FACTS,  # as fast, and the reward rises
        ("resp_len grew from", "--loss_agg seq-mean-token-sum-norm", "dr_grpo"),
    ),
    "clip_tiny": (
        lambda p, s: flat(p, s) | {"train.clipfrac": 0.0}, FACTS,
        lambda p, s: flat(p, s) | {"train.clipfrac": 0.0}, with_(clip_inert=True),
        ("the updates are tiny", "--lr"),
    ),
    "clip_large": (
        lambda p, s: {"train.clipfrac": 0.8}, FACTS,
        lambda p, s: {"train.clipfrac": 0.8}, with_(clip_inert=True),
        ("clipfrac is 0.80", "too fast", "lower learning rate (--lr)"),
    ),
    "entropy_collapse": (
        lambda p, s: flat(p, s) | {"train.entropy": 0.5 * 0.01**p}, FACTS,
        lambda p, s: {"train.entropy": 0.5 * 0.01**p, "buffer.right": 0.4 + 0.6 * min(2 * p, 1)}, FACTS,  # solved: nothing to explore
        ("nats: exploration stops", "--clip_high 0.28"),
    ),
    "mismatch_growing": (
        lambda p, s: {"train.mismatch.mean_abs": 0.01 + 0.3 * p}, FACTS,
        lambda p, s: {"train.mismatch.mean_abs": 0.01 + 0.03 * p}, FACTS,  # of the size that a policy one batch old differs by
        ("drift apart", "--mismatch tis"),
    ),
    "critic_lost": (
        lambda p, s: flat(p, s) | {"train.critic.frozen": 0, "train.critic.explained_variance": 0.4 - 0.4 * p}, FACTS,
        lambda p, s: flat(p, s) | {"train.critic.frozen": 1, "train.critic.explained_variance": 0.0}, FACTS,  # it is pre-trained
        ("explained_variance is 0.0", "outruns its critic", "lower learning rate (--lr), a third at first"),
    ),
    "truncated": (
        lambda p, s: {"buffer.truncated": 0.4}, FACTS,
        lambda p, s: {"buffer.truncated": 0.1}, FACTS,
        ("40% of the answers", "max_tokens = 100", "--max_tokens 200", "--overlong mask"),
    ),
    "verifier_errors": (
        lambda p, s: {"buffer.verifier_errors": 37 * 8 * 0.03}, FACTS,
        lambda p, s: {"buffer.verifier_errors": 1 if s == 20 else 0}, FACTS,
        ("3.0% of the answers", "winnow check"),
    ),
    "verifier_timeouts": (
        lambda p, s: {"buffer.verifier_timeouts": 37 * 8 * 0.1}, FACTS,
        lambda p, s: {"buffer.verifier_timeouts": 2}, FACTS,
        ("10.0% of the answers", "--verify_timeout"),
    ),
    "learner_starves": (
        lambda p, s: {"seconds_generate_wait": 1.6, "seconds_train": 0.3}, FACTS,
        lambda p, s: {"seconds_generate_wait": 1.6, "seconds_train": 0.3}, SYNC,  # synchronous: the learner cannot but wait
        ("80% of the time", "--engines 3"),
    ),
    "generators_starve": (
        lambda p, s: {"seconds_generate_wait": 0.0, "seconds_train": 1.95, "buffer.in_flight": 0}, FACTS,
        lambda p, s: {"seconds_generate_wait": 0.0, "seconds_train": 1.95, "buffer.in_flight": 30}, FACTS,
        ("the engines wait for the learner", "--learner_ranks 2"),
    ),
}  # fmt: skip


def test_every_rule_has_its_two_series() -> None:
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_is_raised_by_its_series_alone(rule: str) -> None:
    course, facts, *_, words = CASES[rule]
    found = said(course, facts)
    assert list(found) == [rule], found
    assert [word for word in words if word not in found[rule]] == [], found[rule]


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_is_not_raised_by_the_other(rule: str) -> None:
    _, _, course, facts, _ = CASES[rule]
    assert said(course, facts) == {}


@pytest.mark.parametrize("facts", [FACTS, SYNC, with_(clip_inert=True)], ids=["one batch behind", "synchronous", "clip inert"])
@pytest.mark.parametrize("steps", [3, 25, 60, 300])
def test_a_healthy_run_is_told_nothing(facts: Facts, steps: int) -> None:
    assert said(lambda p, s: {}, facts, steps) == {}


def test_a_critic_that_explains_little_of_a_run_that_learns_is_let_be() -> None:
    assert said(lambda p, s: {"train.critic.frozen": 0, "train.critic.explained_variance": 0.4 - 0.4 * p}) == {}


def test_a_run_that_has_learned_and_stays_where_it_is_is_told_nothing() -> None:
    """The second half of a demo: reward, lengths and entropy are level but for noise, and most of the step is waiting."""
    level = lambda p, s: healthy(min(2 * p, 1), s) | {"seconds_generate_wait": 1.3, "seconds_train": 0.6, "train.clipfrac": 0.0}  # noqa: E731
    assert said(level, Facts(**{**vars(SYNC), "clip_inert": True}), 50) == {}


REMEDIES: list[tuple[str, Course, Facts, str]] = [
    ("length_bias", CASES["length_bias"][0], with_(loss_agg="seq-mean-token-sum-norm"), "--overlong penalty --overlong_cache 20"),
    ("entropy_collapse", CASES["entropy_collapse"][0], with_(clip_raised=True), "--entropy_coef"),
    ("entropy_collapse", CASES["entropy_collapse"][0], with_(clip_inert=True), "--entropy_coef"),
    ("mismatch_growing", CASES["mismatch_growing"][0], with_(mismatch="tis"), "--max_staleness 0"),
    ("mismatch_growing", CASES["mismatch_growing"][0], with_(mismatch="tis", max_staleness=0), "--engine_dtype float32"),
    ("critic_lost", CASES["critic_lost"][0], with_(whitened=True), "--adv_norm none"),
    ("learner_starves", lambda p, s: {"seconds_generate_wait": 1.9, "seconds_train": 0.05}, SYNC, "--max_staleness 1"),
    ("learner_starves", lambda p, s: {"seconds_generate_wait": 1.6, "buffer.blocked_by_oldest_s": 1.2}, FACTS, "--max_staleness 2"),
    ("learner_starves", lambda p, s: {"seconds_generate_wait": 1.6, "buffer.refill_wait_s": 1.2}, FACTS, "data.sources"),
    ("generators_starve", lambda p, s: {"seconds_train": 1.8, "buffer.in_flight": 0}, SYNC, "--max_staleness 1"),
]


@pytest.mark.parametrize(("rule", "course", "facts", "flag"), REMEDIES)
def test_the_flag_fits_what_is_set_already(rule: str, course: Course, facts: Facts, flag: str) -> None:
    assert flag in said(course, facts)[rule].split("; try ")[1]


def test_masked_answers_are_not_advised_to_be_masked() -> None:
    assert "--overlong" not in said(CASES["truncated"][0], with_(overlong="mask"))["truncated"]


def steps_said(values: list[float]) -> list[int]:
    adviser = Adviser(FACTS)
    return [step for step, value in enumerate(values, 1) if adviser.step(step, logged({"buffer.truncated": value}))]


def test_a_message_is_said_when_it_has_held_for_some_steps_and_then_seldom() -> None:
    first = 4 + HOLDS  # five steps until there is a recent value
    assert steps_said([0.5] * (2 * REPEAT + first)) == [first, first + REPEAT, first + 2 * REPEAT]


def test_one_odd_step_is_no_message_and_neither_is_a_rule_that_comes_and_goes() -> None:
    assert steps_said([0.0] * 20 + [1.0] + [0.0] * 20) == []
    assert len(steps_said(([0.5] * 10 + [0.0] * 5) * 3)) == 1


def test_a_resumed_run_goes_on_with_its_series_and_repeats_nothing() -> None:
    rows = [{"step": step, **logged({"buffer.truncated": 0.5}), "note": None} for step in range(1, 20)]
    resumed = Adviser(FACTS, rows)
    assert [s for s in range(20, 70) if resumed.step(s, logged({"buffer.truncated": 0.5}))] == [4 + HOLDS + REPEAT]


def test_facts_of_a_config() -> None:
    inert = Facts.of(load.resolve("arithmetic", {}))
    assert inert.clip_inert and inert.clip_raised and inert.max_staleness == 0
    assert not Facts.of(load.resolve("arithmetic", {"optim.minibatches": 2})).clip_inert
    assert not Facts.of(load.resolve("arithmetic", {"rollout.max_staleness": 1})).clip_inert, "the ratio is to the policy that sampled"
    assert Facts.of(load.resolve("arithmetic", {"variant": "rloo", "optim.minibatches": 2})).clip_inert, "reinforce has no ratio"
