"""What a 16-bit engine on another host is sent after a real optimiser step of SmolLM2 at learning rate 1e-6, against the whole weights.

Each step trains on answers with rewards, publishes in bfloat16, and the version that the other host then holds is compared by fingerprint.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from cluster.load import load
from cluster.prepare import prepare
from learner.actor import LearnerRank
from learner.publish import read_file
from rollout.delta import HeldVersion
from rollout.weights import fingerprint
from tests.bench.models import smollm2
from tests.bench.rows import Row, compare
from tests.learner.making import make_batch, make_group

STEPS = 3
ANSWERS, TOKENS = 2, 16  # few: a CPU without bfloat16 takes minutes for more, and what a step changes does not depend on it
FLAGS = ["--warmup_steps", "0", "--lr", "1e-6", "--lr_warmup_steps", "0", "--lr_schedule", "constant", "--compute_dtype", "bfloat16"]
FLAGS += ["--engine_dtype", "bfloat16", "--max_tokens", "64", "--variant", "grpo", "--kl_coef", "0", "--display", "none"]


def run() -> list[Row]:
    """The share of every step's delta."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = load("arithmetic", ["--model", str(smollm2()), *FLAGS])
        rank = LearnerRank(0, 1, prepare(cfg, Path(folder)).settings, publish_dtype="bfloat16", threads=1, deltas=True)
        rank.start("127.0.0.1", 0)
        held, shares, changed, making, taking = HeldVersion(Path(folder, "held.bin")), [], [], [], []
        for step in range(STEPS + 1):
            if step:
                groups = [make_group(g, answers=ANSWERS, seed=step, lengths=np.full(ANSWERS, TOKENS)) for g in range(2)]
                assert rank.learner is not None
                taken = rank.learner.train_batch(make_batch(groups, step - 1)).steps
                assert all(s.skipped == "" and s.lr == 1e-6 for s in taken), taken
            started = time.perf_counter()
            manifest = rank.publish(0, step)
            making.append(time.perf_counter() - started)
            assert manifest is not None and (step == 0 or manifest.delta is not None)
            data = read_file(manifest, delta=step > 0)
            started = time.perf_counter()
            here = held.take(manifest, data, delta=step > 0)
            taking.append(time.perf_counter() - started)
            whole = np.fromfile(here.path, dtype=np.uint8)
            assert all(fingerprint(whole[t.offset : t.offset + t.size]) == t.fingerprint for t in manifest.tensors)
            if step:
                shares.append(data.size / manifest.size)
                changed.append(float(data[8:16].view(np.uint64)[0]) / (manifest.size / 2))
            rank.release(manifest)
        rank.stop()
    each = ", ".join(f"{s:.4f}" for s in shares)
    note = f"of {manifest.size / 1e6:.0f} MB, step by step {each}; about {np.mean(changed):.1%} of the elements changed; lossless by "
    note += f"fingerprint; made in {np.median(making[1:]):.2f} s with the version itself, put in place in {np.median(taking[1:]):.2f} s"
    return [compare("weights_delta", "share", shares, most=0.05, note=note)]
