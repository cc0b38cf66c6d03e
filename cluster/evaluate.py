"""Held-out accuracy: greedy, and avg@k, pass@k, maj@k from sampled answers; through the same engines and verifiers as training."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import ray

from cluster.config import RunConfig
from cluster.health import Health, engine_is_gone, reason_of
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
        return list(await asyncio.gather(*(self._score_one(i, p, sampling) for i, p in enumerate(self.prompts))))

    async def _score_one(self, index: int, prompt: Prompt, sampling: Sampling) -> ScoredGroup:
        """One prompt; asked again of another engine or verifier when one is lost."""
        for _ in range(self.config.rollout.attempts):
            if not self.health.alive() and self.revive is not None:
                await self.revive()
            alive = self.health.alive()
            number = alive[index % len(alive)]
            engine = self.services.engines[number]
            verifier = self.services.verifiers[index % len(self.services.verifiers)]
            receipt, group = engine.generate.options(num_returns=2).remote(prompt, 1, sampling)
            try:
                await as_coroutine(receipt)
            except ray.exceptions.RayError as error:
                if not engine_is_gone(error):
                    raise
                self.health.engine_lost(number, engine, f"{reason_of(error)} in evaluation")
                continue
            _, scored = verifier.score.options(num_returns=2).remote(group)
            try:
                result: ScoredGroup = await as_coroutine(scored)
                return result
            except ray.exceptions.RayActorError:
                self.health.verifier_lost(verifier, "actor_died in evaluation")
        raise RuntimeError(f"held-out prompt {prompt.uid} met {self.config.rollout.attempts} actors that were lost")


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
