"""What the rollout service costs: the built-in recipe's batches through a rollout actor, against the same requests given to AsyncLLM.

Both are the same engine in the same actor, in turns; the tiny model makes every cost of the service as large as it can be. The direct way
submits every answer's request at once inside the actor and does nothing with what comes.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from cluster import placement
from cluster.load import load
from cluster.prepare import prepare
from rollout.actor import Rollout
from rollout.engine import request_seed
from rollout.records import Prompt, Sampling
from tests.bench.rows import Row, compare

PAIRS, BATCHES = 6, 2


class BothWays(Rollout):
    """A rollout worker that can also be asked the direct way."""

    async def direct(self, prompts: list[Prompt], sampling: Sampling) -> tuple[int, float]:
        """(tokens, seconds) of all answers, straight from AsyncLLM with the parameters that the service uses."""
        engine = self._engine()

        async def one(prompt: Prompt, index: int) -> int:
            params = engine.parameters(sampling, request_seed(sampling.seed, prompt.uid, index))
            request: Any = {"prompt_token_ids": prompt.tokens_P.tolist(), "cache_salt": "direct"}
            name = f"direct-{prompt.uid}-{index}-{time.monotonic_ns()}"
            outputs = [output async for output in self._vllm().generate(request, params, request_id=name)]
            return len(outputs[-1].outputs[0].token_ids)

        started = time.perf_counter()
        counts = await asyncio.gather(*(one(p, i) for p in prompts for i in range(sampling.n)))
        return sum(counts), time.perf_counter() - started


def run() -> list[Row]:
    """Tokens/s of both."""
    cfg = load("arithmetic", ["--display", "none"])
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(cfg, Path(folder))
        facts = prepared.facts
        placement.join(cfg)
        try:
            options = {"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ["PYTHONPATH"]}}
            actor = ray.remote(BothWays).options(num_cpus=0.5, max_concurrency=10_000, runtime_env=options).remote(
                0, cfg.rollout, model=facts.folder, max_model_len=facts.max_model_len, stop_token_ids=facts.stop_token_ids,
                transfer_backend=facts.transfer_backend, load_weights=True,
            )  # fmt: skip
            ray.get(actor.start.remote())
            prompts = [p for _ in range(BATCHES * cfg.buffer.batch_size) if (p := prepared.stream.next()) is not None]
            sampling = Sampling(cfg.rollout.group_size, cfg.rollout.max_tokens, 1.0, seed=0)
            mine, theirs = rates(actor, prompts, sampling)
            ray.get(actor.stop.remote())
        finally:
            placement.leave()
    note = f"{len(prompts)} prompts × {sampling.n} answers of at most {sampling.max_tokens} tokens, a model of 1M parameters"
    return [compare("service_overhead", "tokens/s", mine, theirs, least_ratio=0.97, note=note)]


def rates(actor: Any, prompts: list[Prompt], sampling: Sampling) -> tuple[list[float], list[float]]:
    """Pairs of tokens/s, the first pair left out. The service gives groups, whose receipts are waited for as the loop does."""

    def service() -> float:
        started = time.perf_counter()
        calls = [actor.generate.options(num_returns=2).remote(p, 1, sampling) for p in prompts]
        receipts = ray.get([receipt for receipt, _ in calls])
        return sum(r.tokens for r in receipts) / (time.perf_counter() - started)

    def direct() -> float:
        tokens, seconds = ray.get(actor.direct.remote(prompts, sampling))
        return tokens / seconds

    mine, theirs = list[float](), list[float]()
    for pair in range(PAIRS + 1):
        for way in (0, 1) if pair % 2 == 0 else (1, 0):
            (mine, theirs)[way].append((service, direct)[way]())
    return mine[1:], theirs[1:]
