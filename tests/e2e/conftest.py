"""What the end-to-end tests share: one Ray head, one short training on two of everything, and one engine that serves its export."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.processes import MARK, kill, left_behind, marked

ROOT = Path(__file__).parents[2]
# A head that `ray.init` starts asks for a token, which a process that joins it shows only when it is told to.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "RAY_AUTH_MODE": "token"}
# Keys as a user's environment has them; no trace of them may be found in what a run leaves behind. wandb stays on this machine.
SECRETS = {name: f"{name.lower()}-{'5ec2e7' * 8}" for name in ("WANDB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY")}

# Rewards by coin flip: informative groups without a warm-up, while every part is the real one.
DRAWN = json.dumps([{"task": "addition", "verifier": "random"}])
JUDGED = json.dumps([{"task": "addition", "verifier": "numeric"}])
SMALL = [
    "arithmetic", "--sources", DRAWN, "--eval_sources", JUDGED, "--warmup_steps", "0", "--batch_size", "4", "--group_size", "4",
    "--tiny_layers", "2", "--lr_warmup_steps", "0", "--eval_prompts", "16", "--display", "plain",
]  # fmt: skip


@dataclass
class Command:
    """A `winnow` command under way. Its processes carry a mark, so that those left behind can be found."""

    args: Sequence[str]
    cwd: Path = ROOT
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[str] = field(init=False)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        env = {**ENVIRONMENT, **SECRETS, "WANDB_MODE": "offline", MARK: self.mark}
        if "--ray_address" not in self.args:
            env.pop("RAY_AUTH_MODE")  # a private cluster needs nothing of the user's
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.launch", *self.args],
            cwd=self.cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def until(self, pattern: str) -> str:
        """Read its output up to a line that matches; fails when it ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no line matched {pattern!r} before the end:\n" + "\n".join(self.lines[-40:]))

    def end(self, seconds: float = 240.0) -> int:
        """Its exit code, once it is over."""
        out, _ = self.process.communicate(timeout=seconds)
        self.lines += out.splitlines()
        return self.process.returncode

    @property
    def text(self) -> str:
        """All that it printed."""
        return "\n".join(self.lines)

    def left_behind(self, seconds: float = 5.0) -> list[str]:
        """Commands of its processes that still live `seconds` after the end."""
        return list(left_behind(self.mark, seconds).values())

    def kill(self) -> None:
        """End it and all its processes, hard."""
        kill(marked(self.mark))


@pytest.fixture(scope="session")
def command() -> Iterator[Callable[..., Command]]:
    """Starts `winnow` with arguments; whatever still lives of it at the end is killed."""
    started: list[Command] = []

    def start(*args: str, cwd: Path = ROOT) -> Command:
        started.append(Command(args, cwd))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture(scope="session")
def small(command: Callable[..., Command]) -> Callable[..., Command]:
    """Starts `winnow train` on the small recipe, with flags."""
    return lambda *flags, cwd=ROOT: command("train", *SMALL, *flags, cwd=cwd)


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray head that runs of the session may join."""
    code = (
        "import ray, sys; c = ray.init('local', include_dashboard=False, num_cpus=8,"
        " object_store_memory=2**29, log_to_driver=False); print('ADDRESS', c.address_info['gcs_address'], flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    head = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, text=True, stdin=pipe, stdout=pipe)
    assert head.stdout is not None and head.stdin is not None
    line = next(line for line in head.stdout if line.startswith("ADDRESS"))
    yield line.split()[1]
    head.stdin.close()
    head.wait(30)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, small: Callable[..., Command]) -> Command:
    """Three steps with 2 generators, 2 verifier workers and 2 learner ranks, on a Ray cluster of its own. `args[-1]` is the run folder."""
    run_dir = tmp_path_factory.mktemp("runs") / "two-of-everything"
    flags = [
        "--engines", "2", "--verifier_actors", "2", "--learner_ranks", "2", "--steps", "3", "--minibatches", "2", "--eval_samples", "2",
        "--eval_every", "2", "--checkpoint_every", "1", "--keep_checkpoints", "2", "--keep_best", "true", "--run_dir", str(run_dir),
    ]  # fmt: skip
    done = small(*flags)
    code = done.end()
    assert code == 0, done.text
    return done


@pytest.fixture(scope="session")
def run_dir(trained: Command) -> Path:
    """The folder of the short training."""
    return Path(trained.args[-1])


@pytest.fixture(scope="session")
def summary(run_dir: Path) -> dict[str, Any]:
    """Its summary.json."""
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found


class Served:
    """An engine, and the event loop that it lives on."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.events = asyncio.new_event_loop()
        self.do(engine.start())

    def do(self, work: Any) -> Any:
        """Run a coroutine on the engine's loop."""
        return self.events.run_until_complete(work)

    def close(self) -> None:
        """End the engine."""
        self.do(self.engine.stop())
        self.events.close()


@pytest.fixture(scope="session")
def served(summary: dict[str, Any]) -> Iterator[Served]:
    """A real engine that has loaded the short training's export by itself."""
    from rollout import chat
    from rollout.config import RolloutConfig
    from rollout.engine import VllmEngine

    tokenizer = chat.load_tokenizer(summary["export"])
    engine = VllmEngine(
        RolloutConfig(kv_cache_gb=0.25, max_sequences=64),
        model=summary["export"],
        max_model_len=128,
        stop_token_ids=(1,),
        decode=lambda ids: chat.decode(tokenizer, ids),
        transfer_backend="winnow_shm",
        load_weights=True,
    )
    held = Served(engine)
    yield held
    held.close()
