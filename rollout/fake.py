"""A deterministic engine for tests of ordering and faults: answers depend on the seed and the uid alone.

It has the methods of `rollout.engine.VllmEngine` and none of its cost. It is never a stand-in for a real run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from rollout.engine import request_seed
from rollout.records import Completion, Prompt, Sampling, Span
from rollout.weights import WeightManifest, fingerprint

Delay = Callable[[Prompt], float]


class FakeEngine:
    """Answers made by a hash. `right_share` of the answers hold the gold answer; `delay` gives seconds per prompt."""

    def __init__(
        self,
        *,
        encode: Callable[[str], list[int]],
        eos: int,
        right_share: float = 0.5,
        delay: Delay | None = None,
    ) -> None:
        self.encode = encode
        self.eos = eos
        self.right_share = right_share
        self.delay = delay
        self.version = 0

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """`sampling.n` answers, right with probability `right_share`, of a length drawn with them."""
        if self.delay is not None:
            await asyncio.sleep(self.delay(prompt))
        return tuple(self._answer(prompt, sampling, i) for i in range(sampling.n))

    def _answer(self, prompt: Prompt, sampling: Sampling, index: int) -> Completion:
        rng = np.random.default_rng(request_seed(sampling.seed, prompt.uid, index))
        right = rng.random() < (1.0 if sampling.temperature == 0 else self.right_share)
        text = "1" * int(rng.integers(0, 4)) + " " + (prompt.answer if right else prompt.answer + "1")
        tokens = np.array(self.encode(text)[: sampling.max_tokens - 1] + [self.eos], dtype=np.int32)
        logps = np.log(rng.uniform(0.05, 1.0, size=len(tokens))).astype(np.float32)
        return Completion(tokens, logps, "stop", (Span(0, len(tokens), self.version),), text)

    async def update(self, manifest: WeightManifest) -> dict[str, Any]:
        """Read the file as a real engine would, so that fingerprints can be compared."""
        data = np.fromfile(manifest.path, dtype=np.uint8)
        prints = {t.name: fingerprint(data[t.offset : t.offset + t.size]) for t in manifest.tensors}
        self.version = manifest.version
        return {
            "fingerprints": prints,
            "missing": [],
            "version": manifest.version,
            "seconds_paused": 0.0,
            "seconds": 0.0,
            "pid": os.getpid(),
        }

    async def sleep(self) -> None:
        """It holds nothing."""

    def pids(self) -> list[int]:
        """No process of its own."""
        return []

    async def stop(self) -> None:
        """Nothing to end."""
