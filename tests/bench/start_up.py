"""How long until something happens: `winnow --help`, and the first generated token of `winnow train` against that of vLLM's engine alone.

A run's first token counts when the engine has the learner's weights and the answers of the probe are there.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.measure import interleave, seconds
from tests.bench.rows import Row, compare
from tests.bench.runs import Run
from tests.bench.warmed import ADDITION, warmed

ALONE = """
import asyncio, sys
import numpy as np
from cluster.load import load
from rollout import chat
from rollout.engine import VllmEngine
from rollout.records import Prompt, Sampling

async def main(whose, model):
    tokenizer = chat.load_tokenizer(model)
    config = load("arithmetic", ["--display", "none"]).rollout
    engine = VllmEngine(config, model=model, max_model_len=40, stop_token_ids=(1,), decode=tokenizer.decode,
                        transfer_backend="winnow_shm", load_weights=True)
    if whose == "vllm":  # with the same arguments, as vLLM starts it: its core imports vLLM once more when its owner has
        engine._set_environment()
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        engine.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine._engine_args()))
        await engine.llm.update_weight_version("0")
    else:
        await engine.start()
    await engine.generate(Prompt(0, np.array([3, 4, 5], dtype=np.int32), "", "", "", "", ""), Sampling(1, 1, 1.0, 0))
    print("token", flush=True)
    engine.llm.shutdown() if whose == "vllm" else await engine.stop()

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""


def alone(whose: str, model: str, script: Path) -> float:
    """Seconds from starting Python to the first token of an engine, "vllm"'s or "ours"."""
    script.write_text(ALONE)
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, str(script), whose, model], text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    next(line for line in process.stdout if "token" in line)
    took = time.monotonic() - started
    process.communicate(timeout=60)
    return took


def train(model: str, folder: Path) -> float:
    """Seconds from `winnow train` to answers of an engine with the learner's weights."""
    run = Run([*ADDITION, "--model", model, "--warmup_steps", "0", "--steps", "1"], folder / str(time.monotonic_ns()))
    took = run.until("log-probabilities of engine and learner differ")
    run.interrupt()
    return took


def run() -> list[Row]:
    """Help, and three pairs of starts."""
    command = [sys.executable, "-m", "cluster.launch", "--help"]
    helps = [seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)) for _ in range(5)]
    model = str(warmed(ADDITION))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        mine, theirs = interleave(lambda: train(model, folder), lambda: alone("vllm", model, folder / "alone.py"), pairs=3, warm=False)
        own = alone("ours", model, folder / "alone.py")
    note = f"peer: vLLM alone, in a process of its own; our engine alone, whose core is forked: {own:.1f} s (once)"
    more = [a - b for a, b in zip(mine, theirs, strict=True)]
    return [
        compare("start_up/help", "s", helps, most=1.0, note="winnow --help"),
        compare("start_up/first_token", "s", mine, theirs, higher_is_better=False, note=note),
        compare("start_up/more", "s", more, most=8.0, note="what a run's first token takes longer than that of vLLM alone"),
    ]
