"""A rollout actor that can also be asked the direct way: the same engine, in the same process, without what the service adds."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from cluster import placement
from cluster.load import load
from cluster.prepare import prepare
from rollout.actor import Rollout
from rollout.engine import rendered, request_seed
from rollout.records import Prompt, Sampling


class BothWays(Rollout):
    """A rollout worker that can also be asked the direct way."""

    async def direct(self, prompts: list[Prompt], sampling: Sampling) -> tuple[int, float]:
        """(tokens, seconds) of all answers, straight from AsyncLLM with the parameters that the service uses."""
        engine = self._engine()

        async def one(prompt: Prompt, index: int) -> int:
            params = engine.parameters(sampling, request_seed(sampling.seed, prompt.uid, index))
            name = f"direct-{prompt.uid}-{index}-{time.monotonic_ns()}"
            outputs = [output async for output in self._vllm().generate(rendered(prompt, "direct"), params, request_id=name)]
            return len(outputs[-1].outputs[0].token_ids)

        started = time.perf_counter()
        counts = await asyncio.gather(*(one(p, i) for p in prompts for i in range(sampling.n)))
        return sum(counts), time.perf_counter() - started


@dataclass(frozen=True)
class Alone:
    """The actor, a number of batches of prompts, and how the recipe draws its answers."""

    actor: Any
    prompts: list[Prompt]
    sampling: Sampling

    def direct(self, prompts: Sequence[Prompt]) -> tuple[int, float]:
        """(tokens, seconds) of all answers to these prompts, whose requests are all there from the start."""
        tokens, seconds = ray.get(self.actor.direct.remote(list(prompts), self.sampling))
        return tokens, seconds


@contextmanager
def engine_alone(flags: Sequence[str], batches: int) -> Iterator[Alone]:
    """An engine with the weights of the recipe's model, in a Ray of its own, and nothing beside it."""
    cfg = load(flags[0], [*flags[1:], "--display", "none"])
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
            prompts = [p for _ in range(batches * cfg.buffer.batch_size) if (p := prepared.stream.next()) is not None]
            yield Alone(actor, prompts, Sampling(cfg.rollout.group_size, cfg.rollout.max_tokens, 1.0, seed=0))
            ray.get(actor.stop.remote())
        finally:
            placement.leave()
