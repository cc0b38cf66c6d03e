"""Recorded rollouts for the learner's benchmarks: token ids of the shape that a reasoning model gives, the same from every call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from learner.records import Batch, TrainGroup
from rollout.records import Completion, Group, Prompt, Span
from verifier.records import ScoredGroup


@dataclass(frozen=True)
class Rollouts:
    """One batch: groups of answers to one prompt each. `rewards_A` are 0 or 1 with both in every group."""

    prompts_A: list[list[int]]
    answers_A: list[list[int]]
    rewards_A: list[float]
    group_size: int

    @property
    def answer_tokens(self) -> int:
        """Tokens that are trained."""
        return sum(map(len, self.answers_A))

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """Prompt tokens: of every answer, and of every group once."""
        sizes = [len(p) for p in self.prompts_A]
        return sum(sizes), sum(sizes[:: self.group_size])

    def batch(self, index: int) -> Batch:
        """As our learner takes it."""
        groups = []
        for g in range(0, len(self.answers_A), self.group_size):
            uid = index * len(self.answers_A) + g
            prompt = Prompt(uid, np.array(self.prompts_A[g], dtype=np.int32), "", "", "none", "recorded", str(uid))
            done = tuple(
                Completion(np.array(a, dtype=np.int32), np.full(len(a), -5.0, dtype=np.float32), "stop", (Span(0, len(a), 0),), "")
                for a in self.answers_A[g : g + self.group_size]
            )
            rewards = np.array(self.rewards_A[g : g + self.group_size])
            groups.append(ScoredGroup(Group(prompt, 0, done, 0, 0.0), (), rewards, rewards[None], ("reward",)))
        return Batch(index, tuple(TrainGroup.of_scored(g) for g in groups), ("reward",), {g.uid: g for g in groups})


def record(seed: int, *, answers: int = 16, group_size: int = 8, mean: float = 120.0, longest: int = 512, equal: bool = False) -> Rollouts:
    """Log-normal lengths (σ = 0.8) of the given mean, none above `longest`, or all equal; prompts of 60 to 200 tokens."""
    rng = np.random.default_rng(seed)
    sigma = 0.8
    drawn = np.exp(rng.normal(np.log(mean) - sigma**2 / 2, sigma, answers))
    lengths = np.full(answers, round(mean)) if equal else np.clip(np.round(drawn * mean / drawn.mean()), 4, longest).astype(int)
    prompts = [rng.integers(1000, 40000, rng.integers(60, 201)).tolist() for _ in range(answers // group_size)]
    rewards = [float(i % 2) for i in range(answers)]
    return Rollouts(
        prompts_A=[prompts[i // group_size] for i in range(answers)],
        answers_A=[rng.integers(1000, 40000, n).tolist() for n in lengths],
        rewards_A=rewards,
        group_size=group_size,
    )
