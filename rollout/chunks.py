"""Seeded requests whose prompt takes more than one step of a CPU engine.

A step has room for a number of tokens (vLLM's `max_num_batched_tokens`), and a prompt that does not fit is computed in parts: long prompts,
many at once, or many answers that are computed anew after an update of the weights. vLLM samples after each part, throws away what all but
the last gave, and turns the request's random generator back by an offset. A generator on a CPU has none: the engine's core dies of it
(vLLM 0.32, `GPUModelRunner._bookkeeping_sync`).
"""

from __future__ import annotations

from typing import Any

import numpy as np


def spare_seeds(runner: Any) -> None:
    """Let the model runner sample without the generators of requests whose token is thrown away, so that there is nothing to turn back.

    Those draw from the process's common generator, and an answer depends on its own seed alone, in however many parts its prompt came.
    """
    sample_tokens = runner.sample_tokens

    def sparing(*args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators  # the dict that the sampler looks into
        thrown_away = np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])
        spared = {i: generators.pop(i) for i in thrown_away.tolist() if i in generators}
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            generators.update(spared)

    runner.sample_tokens = sparing
