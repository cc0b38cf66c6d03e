"""A version of SmolLM2's weights from the learner into a running engine, against the plain way: a safetensors file and vLLM's own reload.

Both lie in shared memory and both ends have one thread. Every version has other weights; our engine's fingerprints are compared each time,
and its log-probabilities with those of transformers' forward pass in the learner.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.load import load
from cluster.prepare import prepare
from cluster.weights import check_report
from learner.actor import LearnerRank
from rollout.chat import load_tokenizer
from rollout.config import RolloutConfig
from rollout.engine import VllmEngine
from rollout.records import Prompt, Sampling
from tests.bench.measure import memcpy_rate, seconds
from tests.bench.models import smollm2
from tests.bench.rows import Row, compare

PAIRS = 5


class Transfers:
    """A learner rank and an engine of its own, and the two ways between them. Each call gives seconds by part."""

    def __init__(self, dtype: str, folder: Path, shared: Path) -> None:
        self.model, self.shared, self.version, self.difference = smollm2(), shared, 0, 0.0
        cfg = load("arithmetic", ["--model", str(self.model), "--warmup_steps", "0", "--display", "none"])
        self.rank = LearnerRank(0, 1, prepare(cfg, folder).settings, publish_dtype=dtype, threads=1)
        self.rank.start("127.0.0.1", 0)
        tokenizer = load_tokenizer(str(self.model))
        ids = np.array(tokenizer("Here is a short story about a fox:")["input_ids"], dtype=np.int32)
        self.prompt = Prompt(0, ids, "", "", "", "", "")
        extension = {"worker_extension_cls": "tests.bench.plain_reload.PlainExtension"}
        config = RolloutConfig(engine_dtype=dtype, kv_cache_gb=0.5, engine_options=extension)
        stops: dict[str, Any] = {"stop_token_ids": (2,), "decode": tokenizer.decode}
        self.engine = VllmEngine(config, model=str(self.model), max_model_len=512, transfer_backend="winnow_shm", **stops)

    def move(self) -> None:
        """Other weights."""
        self.version += 1
        with torch.no_grad():
            for parameter in self.rank.learner.policy.parameters():  # type: ignore[union-attr]
                parameter.add_(torch.randn_like(parameter), alpha=1e-4)

    async def ours(self) -> dict[str, float]:
        """winnow's way; raises where a fingerprint is not the learner's."""
        started = time.perf_counter()
        manifest = self.rank.publish(0, self.version)
        assert manifest is not None
        published = time.perf_counter()
        report = await self.engine.update(manifest)
        ended = time.perf_counter()
        check_report(0, manifest, report)
        self.rank.release(manifest)
        return {"all": ended - started, "blocked": published - started, "paused": report["seconds_paused"], "bytes": float(manifest.size)}

    async def plain(self) -> dict[str, float]:
        """A checkpoint in shared memory, read between vLLM's reload calls; the pause begins when it lies there."""
        from safetensors.torch import save_file

        started = time.perf_counter()
        save_file(dict(self.rank.learner.weights(torch.float32)), self.shared / "model.safetensors")  # type: ignore[union-attr]
        written = time.perf_counter()
        await self.engine.pause()
        paused = time.perf_counter()
        await self.engine.llm.collective_rpc("plain_reload", kwargs={"path": str(self.shared / "model.safetensors")})  # type: ignore[union-attr]
        await self.engine.resume()
        ended = time.perf_counter()
        return {"all": ended - started, "blocked": written - started, "paused": ended - paused}

    async def check(self) -> None:
        """The engine's log-probabilities are those of the weights that it was given."""
        answers = await self.engine.generate(self.prompt, Sampling(2, 16, 1.0, seed=self.version))
        for mine, answer in zip(self.rank.logprobs(self.prompt, answers), answers, strict=True):
            self.difference = max(self.difference, float(np.abs(mine - answer.logp_T).max()))

    async def pairs(self) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        """Ours and the plain way in turns (A B B A …), the first pair, in which both ends learn and allocate, left out."""
        mine, theirs = list[dict[str, float]](), list[dict[str, float]]()
        await self.engine.start()
        for pair in range(PAIRS + 1):
            for way in (0, 1) if pair % 2 == 0 else (1, 0):
                self.move()
                (mine, theirs)[way].append(await (self.ours, self.plain)[way]())
                if way == 0:
                    await self.check()
        await self.engine.stop()
        self.rank.stop()
        return mine[1:], theirs[1:]


def packing_seconds(shapes: list[tuple[int, int]]) -> float:
    """What oneDNN needs to pack matrices of these shapes for vLLM's kernels, the best of five: no CPU engine loads them for less."""
    import vllm._custom_ops as ops

    weights = [torch.ones(shape) for shape in shapes]
    handlers: list[Any] = [None] * len(weights)

    def pack() -> None:
        for i, weight in enumerate(weights):
            handlers[i] = ops.create_onednn_mm(weight.t(), 32)

    return min(seconds(pack) for _ in range(5))


def shapes_of(model: Path) -> list[tuple[int, int]]:
    """The matrices that vLLM packs for this model: q, k and v as one, gate and up as one."""
    from transformers import AutoConfig

    c = AutoConfig.from_pretrained(model)
    wide, inner = c.hidden_size, c.intermediate_size
    heads = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    layer = [(heads, wide), (wide, c.num_attention_heads * c.head_dim), (2 * inner, wide), (wide, inner)]
    return layer * c.num_hidden_layers + [(c.vocab_size, wide)]


def run() -> list[Row]:
    """Seconds from the learner's shards to the engine's new version."""
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(f"/dev/shm/winnow-bench-{os.getpid()}")
        shared.mkdir()
        try:
            transfers = Transfers("float32", Path(folder), shared)
            mine, theirs = asyncio.run(transfers.pairs())
        finally:
            shutil.rmtree(shared)
    assert transfers.difference < 1e-3, f"log-probabilities differ by {transfers.difference}"
    copy, size = memcpy_rate(), mine[0]["bytes"]
    packing = packing_seconds(shapes_of(transfers.model))
    floor = size / copy + packing
    checked = f"fingerprints equal, log-probabilities within {transfers.difference:.0e} of the learner's"
    note = f"limit: one copy of {size / 1e9:.2f} GB, {size / copy:.2f} s, and oneDNN's packing, {packing:.2f} s; {checked}"
    whole, paused, blocked = ((column(mine, key), column(theirs, key)) for key in ("all", "paused", "blocked"))
    rate = [size / 1e9 / t for t in whole[0]]
    faster = {"higher_is_better": False}
    return [
        compare("weights_shm", "s", *whole, limit=floor, least_ratio=1.3, note=note, **faster),
        compare("weights_shm/memcpy", "GB/s", rate, limit=copy / 1e9, note="the weights' bytes over the time of it all"),
        compare("weights_shm/paused", "s", *paused, note="the engine stands still", **faster),
        compare("weights_shm/blocked", "s", *blocked, most=0.25, note="the learner gathers and writes", **faster),
    ]


def column(rows: list[dict[str, float]], key: str) -> list[float]:
    """One figure of every transfer."""
    return [row[key] for row in rows]
