"""How long until something happens: `winnow --help`, and the first generated token of `winnow train` against that of the engine alone.

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
from rollout import chat
from rollout.config import RolloutConfig
from rollout.engine import VllmEngine
from rollout.records import Prompt, Sampling

async def main():
    tokenizer = chat.load_tokenizer(sys.argv[1])
    engine = VllmEngine(RolloutConfig(), model=sys.argv[1], max_model_len=40, stop_token_ids=(1,), decode=tokenizer.decode,
                        transfer_backend="winnow_shm", load_weights=True)
    await engine.start()
    await engine.generate(Prompt(0, np.array([3, 4, 5], dtype=np.int32), "", "", "", "", ""), Sampling(1, 1, 1.0, 0))
    print("token", flush=True)
    await engine.stop()

if __name__ == "__main__":
    asyncio.run(main())
"""


def alone(model: str, script: Path) -> float:
    """Seconds from starting Python to the engine's first token."""
    script.write_text(ALONE)
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, str(script), model], text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
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
        mine, theirs = interleave(lambda: train(model, folder), lambda: alone(model, folder / "alone.py"), pairs=3, warm=False)
    more = [a - b for a, b in zip(mine, theirs, strict=True)]
    return [
        compare("start_up/help", "s", helps, most=1.0, note="winnow --help"),
        compare("start_up/first_token", "s", mine, theirs, higher_is_better=False, note="peer: the engine alone, in a process of its own"),
        compare("start_up/more", "s", more, most=8.0, note="what a run's first token takes longer than that of the engine alone"),
    ]
