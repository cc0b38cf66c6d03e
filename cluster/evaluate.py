"""Held-out accuracy: greedy, and avg@k, pass@k, maj@k from sampled answers; through the same engines and verifiers as training."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import ray

from cluster.config import RunConfig
from cluster.health import DEADLINE_SLACK, Health, RunFailed, engine_is_gone, reason_of
from cluster.services import Services, as_coroutine
from rollout.records import Prompt, Sampling
from verifier.records import ScoredGroup

RIGHT = 1.0  # a reward from which an answer counts as right


@dataclass(frozen=True)
class EvalStats:
    """Shares of held-out prompts; None where no answers were sampled (`eval_samples` 0).

    `avg_at_k`: right answers among k; `pass_at_k`: at least one is right; `maj_at_k`: the answer given most often is right.
    """

    prompts: int
    greedy: float
    resp_len: float  # tokens of the greedy answers
    truncated: float
    k: int = 0
    avg_at_k: float | None = None
    pass_at_k: float | None = None
    maj_at_k: float | None = None


class Evaluator:
    """Evaluates the weights that the engines have at the moment; prompts and seeds are the same every time."""

    def __init__(self, config: RunConfig, services: Services, health: Health, prompts: Sequence[Prompt]) -> None:
        self.config = config
        self.services = services
        self.health = health
        self.prompts = list(prompts)
        self.revive: Callable[[], Awaitable[None]] | None = None  # returns when an engine is there again

    async def run(self) -> EvalStats:
        """All held-out prompts, spread over the engines."""
        settings = self.config.eval
        budget = settings.eval_max_tokens or self.config.rollout.max_tokens
        greedy = await self._score(Sampling(n=1, max_tokens=budget, temperature=0.0, seed=0))
        stats = greedy_stats(greedy)
        if not settings.eval_samples:
            return stats
        sampling = Sampling(settings.eval_samples, budget, settings.eval_temperature, seed=self.config.seed, top_p=settings.eval_top_p)
        return sampled_stats(stats, await self._score(sampling))

    async def _score(self, sampling: Sampling) -> list[ScoredGroup]:
        # No more at once than the engines take at once: a request's deadline runs while it queues.
        room = asyncio.Semaphore(len(self.services.engines) * max(1, self.config.rollout.max_sequences // sampling.n))

        async def one(index: int, prompt: Prompt) -> ScoredGroup:
            async with room:
                return await self._score_one(index, prompt, sampling)

        tasks = [asyncio.ensure_future(one(i, p)) for i, p in enumerate(self.prompts)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _score_one(self, index: int, prompt: Prompt, sampling: Sampling) -> ScoredGroup:
        """One prompt; asked again when its engine or verifier is lost, hangs, or does not answer within the group's deadline."""
        attempts, slack = self.config.rollout.attempts, DEADLINE_SLACK
        for _ in range(attempts):
            if not self.health.alive() and self.revive is not None:
                await self.revive()
            if not self.health.alive():
                break
            number = self.health.alive()[index % len(self.health.alive())]
            engine = self.services.engines[number]
            receipt, group = engine.generate.options(num_returns=2).remote(prompt, 1, sampling)
            try:
                await asyncio.wait_for(as_coroutine(receipt), self.config.rollout.group_timeout + slack)
            except (ray.exceptions.RayError, TimeoutError) as error:
                if engine_is_gone(error) or not isinstance(error, ray.exceptions.RayError):
                    self.health.engine_lost(number, engine, f"{reason_of(error)} in evaluation")
                continue
            verifier = self.services.verifiers[await self.health.verifier()]
            _, scored = verifier.score.options(num_returns=2).remote(group)
            try:
                limit = self.config.verify.verify_timeout * (sampling.n + 1) + slack
                result: ScoredGroup = await asyncio.wait_for(as_coroutine(scored), limit)
                return result
            except (ray.exceptions.RayError, TimeoutError) as error:
                if isinstance(error, ray.exceptions.RayActorError) or not isinstance(error, ray.exceptions.RayError):
                    self.health.verifier_lost(verifier, f"{reason_of(error)} in evaluation")
        raise RunFailed(
            f"held-out prompt {prompt.text!r} had no answer in attempts = {attempts}: raise group_timeout = "
            f"{self.config.rollout.group_timeout:g}, or lower eval_max_tokens"
        )


def greedy_stats(scored: Sequence[ScoredGroup]) -> EvalStats:
    """From one greedy answer per prompt; an answer without a verdict counts as not right."""
    answers = [s.group.completions[0] for s in scored]
    right = [s.rewards_G[0] >= RIGHT for s in scored]  # NaN compares as not right
    return EvalStats(
        prompts=len(scored),
        greedy=float(np.mean(right)),
        resp_len=float(np.mean([len(a.tokens_T) for a in answers])),
        truncated=float(np.mean([a.truncated for a in answers])),
    )


def sampled_stats(greedy: EvalStats, scored: Sequence[ScoredGroup]) -> EvalStats:
    """Adds avg@k, pass@k and maj@k. A majority is over the answers that the verifier extracted, ties to the one given first."""
    right_PK = np.array([s.rewards_G >= RIGHT for s in scored])
    majority = [right_PK[i, first_of_majority([v.detail for v in s.verdicts])] for i, s in enumerate(scored)]
    return EvalStats(
        greedy.prompts,
        greedy.greedy,
        greedy.resp_len,
        greedy.truncated,
        k=int(right_PK.shape[1]),
        avg_at_k=float(right_PK.mean()),
        pass_at_k=float(right_PK.any(axis=1).mean()),
        maj_at_k=float(np.mean(majority)),
    )


def first_of_majority(answers: Sequence[str]) -> int:
    """Index of the first of the answers given most often; answers that could not be extracted ("") do not vote."""
    votes = Counter(a for a in answers if a)
    if not votes:
        return 0
    most = max(votes.values())
    return next(i for i, a in enumerate(answers) if votes.get(a) == most)
