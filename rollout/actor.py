"""The Ray shell of a rollout worker: one engine, many groups in flight. No logic of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout import chat
from rollout.config import RolloutConfig
from rollout.delta import HeldVersion
from rollout.engine import Engine, VllmEngine
from rollout.engine_errors import plainly
from rollout.fake import FakeEngine
from rollout.records import Completion, Group, Prompt, Sampling
from rollout.weights import WeightManifest


@dataclass(frozen=True)
class Receipt:
    """That a group was generated: all that the controller needs before the verdicts are there."""

    uid: int
    attempt: int
    tokens: int
    seconds: float


class Rollout:
    """Rollout worker number `index`. `generate` is called with `num_returns=2`: the receipt, and the group itself."""

    def __init__(
        self,
        index: int,
        config: RolloutConfig,
        *,
        model: str,
        max_model_len: int,
        stop_token_ids: tuple[int, ...],
        transfer_backend: str,
        trust_remote_code: bool = False,
        load_weights: bool = False,
    ) -> None:
        self.index = index
        self.config = config
        self.held = HeldVersion.of_this_process()
        tokenizer = chat.load_tokenizer(model, trust_remote_code)
        self.running: dict[tuple[int, int], asyncio.Future[tuple[Completion, ...]]] = {}
        self.engine: Engine
        if config.engine == "fake":
            self.engine = FakeEngine(
                encode=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]), eos=stop_token_ids[0]
            )
        else:
            self.engine = VllmEngine(
                config,
                model=model,
                max_model_len=max_model_len,
                stop_token_ids=stop_token_ids,
                decode=lambda ids: chat.decode(tokenizer, ids),
                transfer_backend=transfer_backend,
                trust_remote_code=trust_remote_code,
                load_weights=load_weights,
            )

    @plainly
    async def start(self) -> dict[str, Any]:
        """Start the engine; says where it runs and how long that took."""
        started = time.monotonic()
        await self.engine.start()
        return {"host": socket.gethostname(), "seconds": time.monotonic() - started}

    def host(self) -> str:
        """The machine that it runs on."""
        return socket.gethostname()

    @plainly
    async def generate(self, prompt: Prompt, attempt: int, sampling: Sampling) -> tuple[Receipt, Group]:
        """One group, or TimeoutError when it outlasts `group_timeout`."""
        started = time.monotonic()
        work = self.running[prompt.uid, attempt] = asyncio.ensure_future(self.engine.generate(prompt, sampling))
        try:
            async with asyncio.timeout(self.config.group_timeout):
                completions = await work
        except asyncio.CancelledError:
            raise RuntimeError(f"group {prompt.uid} was cancelled") from None
        finally:
            del self.running[prompt.uid, attempt]
        group = Group(prompt, attempt, completions, self.index, time.monotonic() - started)
        return Receipt(prompt.uid, attempt, group.tokens, group.seconds), group

    def cancel(self, uid: int, attempt: int) -> None:
        """End a group that will never train; its requests are aborted in the engine."""
        if (uid, attempt) in self.running:
            self.running[uid, attempt].cancel()

    @plainly
    async def answers(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """Answers outside of training: evaluation, and the check of log-probabilities."""
        return await self.engine.generate(prompt, sampling)

    @plainly
    async def update(self, manifest: WeightManifest, data: np.ndarray | None = None, delta: bool = False) -> dict[str, Any]:
        """Load a version of the weights. `data`, where its host is not this one: the file's bytes, or those of its delta."""
        if data is not None:
            manifest = await asyncio.to_thread(self.held.take, manifest, data, delta=delta)
        return await self.engine.update(manifest)

    @plainly
    async def sleep(self) -> None:
        """Give the device up to the learner until the next update."""
        await self.engine.sleep()

    def pids(self) -> list[int]:
        """This process and the engine's."""
        return [os.getpid(), *self.engine.pids()]

    async def stop(self) -> None:
        """End the engine."""
        await self.engine.stop()
        self.held.close()

    # -- the four calls of vLLM's weight-sync client (`nccl`, `ipc`) --------------------------------------------------

    @plainly
    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Join the trainer's transfer group."""
        await self._vllm().init_weight_transfer_engine(request)

    @plainly
    async def start_weight_update(self) -> None:
        """Freeze requests and open an update."""
        await self._engine().pause()
        await self._vllm().start_weight_update()

    @plainly
    async def update_weights(self, request: Any) -> None:
        """Receive weights."""
        await self._vllm().update_weights(request)

    @plainly
    async def finish_weight_update(self) -> None:
        """Close the update; requests go on once the new version is known (`update_weight_version`)."""
        await self._vllm().finish_weight_update()

    @plainly
    async def update_weight_version(self, version: str) -> None:
        """Book what follows under `version`, and let requests go on."""
        await self._vllm().update_weight_version(version)
        self._engine().version = int(version)
        await self._engine().resume()

    def _engine(self) -> VllmEngine:
        assert isinstance(self.engine, VllmEngine)
        return self.engine

    def _vllm(self) -> Any:
        assert self._engine().llm is not None, "the engine was not started"
        return self._engine().llm
