"""What the rollout service costs: the built-in recipe's batches through a rollout actor, against the same requests given to AsyncLLM.

Both are the same engine in the same actor, in turns; the tiny model makes every cost of the service as large as it can be. The direct way
submits every answer's request at once inside the actor and does nothing with what comes.
"""

from __future__ import annotations

import time

import ray

from tests.bench.engine_alone import Alone, engine_alone
from tests.bench.rows import Row, compare

PAIRS, BATCHES = 6, 2


def run() -> list[Row]:
    """Tokens/s of both."""
    with engine_alone(["arithmetic"], BATCHES) as alone:
        mine, theirs = rates(alone)
        sampling = alone.sampling
        note = f"{len(alone.prompts)} prompts × {sampling.n} answers of at most {sampling.max_tokens} tokens, a model of 1M parameters"
    return [compare("service_overhead", "tokens/s", mine, theirs, least_ratio=0.97, note=note)]


def rates(alone: Alone) -> tuple[list[float], list[float]]:
    """Pairs of tokens/s, the first pair left out. The service gives groups, whose receipts are waited for as the loop does."""

    def service() -> float:
        started = time.perf_counter()
        calls = [alone.actor.generate.options(num_returns=2).remote(p, 1, alone.sampling) for p in alone.prompts]
        receipts = ray.get([receipt for receipt, _ in calls])
        return sum(r.tokens for r in receipts) / (time.perf_counter() - started)

    def direct() -> float:
        tokens, seconds = alone.direct(alone.prompts)
        return tokens / seconds

    mine, theirs = list[float](), list[float]()
    for pair in range(PAIRS + 1):
        for way in (0, 1) if pair % 2 == 0 else (1, 0):
            (mine, theirs)[way].append((service, direct)[way]())
    return mine[1:], theirs[1:]
