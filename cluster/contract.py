"""The log-probability contract, checked before the first step: engines and learner see the same distribution."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from cluster.config import RunConfig
from cluster.health import RunFailed, on_ranks
from cluster.prepare import Prepared
from cluster.services import Services, as_coroutine
from rollout.records import Sampling

PROBE_PROMPTS, PROBE_ANSWERS, PROBE_TOKENS = 4, 4, 256
TOLERANCE = {"float32": 1e-4}  # nats, mean difference of engine and learner; 16-bit engines round
TOLERANCE_16_BITS = 0.05


async def check_logprobs(cfg: RunConfig, prepared: Prepared, services: Services, note: Callable[[str], None]) -> dict[str, float]:
    """Some answers of each engine, and what the learner says of them; the differences in nats. Raises RunFailed when they are too large."""
    sampling = Sampling(PROBE_ANSWERS, min(cfg.rollout.max_tokens, PROBE_TOKENS), cfg.rollout.temperature, cfg.seed)
    prompts = (await asyncio.to_thread(prepared.stream.heldout, PROBE_PROMPTS)) or []
    differences = []
    for i, prompt in enumerate(prompts):
        engine = services.engines[i % len(services.engines)]
        completions = await as_coroutine(engine.answers.remote(prompt, sampling))
        learner = (await on_ranks(services, "logprobs", prompt, completions))[0]
        differences += [np.abs(mine - c.logp_T) for mine, c in zip(learner, completions, strict=True)]
    if not differences or cfg.rollout.engine == "fake":
        return {}
    flat = np.concatenate(differences)
    tolerance = cfg.rollout.logp_tolerance or TOLERANCE.get(cfg.rollout.engine_dtype, TOLERANCE_16_BITS)
    by = f"{flat.mean():.1e} in the mean, {flat.max():.1e} at most, over {flat.size} tokens"
    text = f"log-probabilities of engine and learner differ by {by}"
    if not flat.mean() <= tolerance:
        raise RunFailed(
            f"{text}, more than logp_tolerance = {tolerance:g}: they run different models, tokenizers or temperatures; "
            "check engine_dtype and engine_options, or raise the tolerance"
        )
    note(text)
    return {"probe_mean_abs": float(flat.mean()), "probe_max_abs": float(flat.max())}
