"""Groups through the pool: weighted rewards, and what becomes of errors. Does not cover Ray, or what the buffer makes of it."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from rollout.records import Completion, Group, Prompt, Span
from verifier.actor import VerifierActor
from verifier.config import VerifyConfig
from verifier.records import Verdict
from verifier.score import combine


def group(*texts, verifier="numeric", answer="5"):
    tokens = np.arange(3, dtype=np.int32)
    prompt = Prompt(7, tokens, "2+3=", answer, verifier, "task", "0")
    done = tuple(Completion(tokens, np.zeros(3, np.float32), "stop", (Span(0, 3, 2),), t) for t in texts)
    return Group(prompt, 0, done, 1, 0.5)


def score(config, g):
    async def run():
        actor = VerifierActor(config, ["numeric"])
        try:
            assert len(await actor.ready()) == 2
            return await actor.score(g)
        finally:
            await actor.close()

    return asyncio.run(run())


def test_the_rows_own_verifier():
    summary, scored = score(VerifyConfig(), group("5", "6", "so 5"))
    assert scored.names == ("numeric",)
    assert scored.rewards_G.tolist() == [1, 0, 1]
    assert scored.rewards_RG.tolist() == [[1, 0, 1]]
    assert (summary.uid, summary.errors, summary.version_min) == (7, 0, 2)


def test_several_weighted_rewards():
    config = VerifyConfig(
        reward_weights={"row": 1.0, "boxed": 0.25}, verifier_options={"boxed": {"verifier": "format", "shape": "box"}}, verifier_processes=1
    )
    _, scored = score(config, group("\\boxed{5}", "\\boxed{6}", "5"))
    assert scored.names == ("row", "boxed")
    assert scored.rewards_RG.tolist() == [[1, 0, 1], [1, 1, 0]]
    assert scored.rewards_G.tolist() == [1.25, 0.25, 1.0]
    assert dict(scored.verdicts[0].rewards) == {"row": 1.0, "boxed": 1.0}


def test_an_error_leaves_no_reward_and_is_counted():
    summary, scored = score(VerifyConfig(), group("5", "6", answer="five"))
    assert np.isnan(scored.rewards_G).all()
    assert summary.errors == 2 and "not a number" in summary.detail


def test_parts_are_joined():
    g = group("a", "b", "c", "d")
    ok, zero = Verdict("value", 1.0, "right", 0.5), Verdict("value", 0.0)
    late, bad, huge = Verdict("timeout", 0.0, "late"), Verdict("error", None, "bad"), Verdict("value", 1e308)
    scored = combine(g, {"x": 2.0, "y": 10.0}, [[ok, late, bad, zero], [zero, ok, ok, huge]])
    assert [v.status for v in scored.verdicts] == ["value", "timeout", "error", "error"]
    assert [v.reward for v in scored.verdicts] == [2.0, 10.0, None, None]
    assert scored.verdicts[0].seconds == 0.5
    assert math.isnan(scored.rewards_RG[0, 2]) and scored.rewards_RG[1, 2] == 1


@pytest.mark.parametrize("status", ["value", "timeout"])
def test_one_verifier_alone_keeps_its_verdict(status):
    scored = combine(group("a"), {"x": 1.0}, [[Verdict(status, 0.0, "why", 0.1)]])
    assert scored.verdicts[0] == Verdict(status, 0.0, "why", 0.1, {"x": 0.0})
