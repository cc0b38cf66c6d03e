"""One vLLM engine: token in, token out, with the engine's own log-probabilities and a weight version per token.

`VllmEngine` is the real one; `rollout.fake.FakeEngine` has the same methods (the `Engine` protocol) and serves tests
of ordering and faults.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rollout import forkserver, reaper
from rollout.config import RolloutConfig
from rollout.records import Completion, Finish, Prompt, Sampling, Span
from rollout.weights import WeightManifest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


DEATH_SECONDS = 0.5  # between two looks at whether the core still lives
OWNER_VARIABLE = "WINNOW_ENGINE_OWNER"  # pid of the process that owns an engine, in the environment of the engine's processes


class Engine(Protocol):
    """What the rollout actor needs of an engine."""

    version: int

    async def start(self) -> None:
        """Load the model; on return the engine can generate."""

    async def generate(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """`sampling.n` answers to one prompt."""

    async def update(self, manifest: WeightManifest) -> dict[str, Any]:
        """Load a version of the weights while requests wait; returns fingerprints and seconds."""

    async def sleep(self) -> None:
        """Give the device up until the next update."""

    def pids(self) -> list[int]:
        """Processes of this engine."""

    async def stop(self) -> None:
        """End the engine and its processes."""


def request_seed(seed: int, uid: int, index: int) -> int:
    """The seed of one answer: a function of the run's seed, the group's uid and the answer's place, nothing else."""
    return int(np.random.SeedSequence([seed & 0xFFFFFFFF, uid & 0xFFFFFFFF, index]).generate_state(1)[0])


def context_length(config: RolloutConfig, max_prompt_tokens: int, eval_max_tokens: int = 0) -> int:
    """Tokens of context that the engine is started with."""
    return config.max_model_len or max_prompt_tokens + max(config.max_tokens, eval_max_tokens)


def rendered(prompt: Prompt, salt: str) -> Any:
    """A prompt as vLLM's renderer would give it. Without the type vLLM takes it for a raw one and hands it to the renderer's thread."""
    return {"type": "token", "prompt_token_ids": prompt.tokens_P.tolist(), "cache_salt": salt}


class VllmEngine:
    """`AsyncLLM` with many requests in flight, whose weights can be replaced while it runs."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        model: str,
        max_model_len: int,
        stop_token_ids: tuple[int, ...],
        decode: Any,
        transfer_backend: str,
        trust_remote_code: bool = False,
        load_weights: bool = False,
    ) -> None:
        self.config = config
        self.load_weights = load_weights
        self.model = model
        self.max_model_len = max_model_len
        self.stop_token_ids = list(stop_token_ids)
        self.decode = decode  # token ids -> text
        self.transfer_backend = transfer_backend
        self.trust_remote_code = trust_remote_code
        self.version = 0
        self.asleep = False
        self.sockets = ""  # the folder of vLLM's sockets
        self.llm: AsyncLLM | None = None
        self._requests = 0
        self._resumed = asyncio.Event()
        self._resumed.set()

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and answer one request, so that no timed request meets a cold engine."""
        self._set_environment()
        self.sockets = tempfile.mkdtemp(prefix="winnow-engine-")  # a short path: the name of a socket has 107 bytes
        os.environ["VLLM_RPC_BASE_PATH"] = self.sockets
        reaper.start(os.getpid(), f"{OWNER_VARIABLE}={os.getpid()}", self.sockets)
        if self.on_cpu:
            forkserver.start()
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        with forkserver.forked() if self.on_cpu else nullcontext():
            self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._engine_args()))
        await self.llm.collective_rpc("winnow_start")
        await self.llm.update_weight_version(str(self.version))
        warm = Prompt(-1, np.array([self.stop_token_ids[0]] * 2, dtype=np.int32), "", "", "", "", "")
        await self.generate(warm, Sampling(n=1, max_tokens=2, temperature=1.0, seed=0))

    @property
    def on_cpu(self) -> bool:
        """Whether it computes on CPUs."""
        return self.config.engine_gpus == 0

    def _set_environment(self) -> None:
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        os.environ["SPT_NOENV"] = "1"  # a core's title does not go over its environment, by which the reaper finds it
        if self.transfer_backend == "ipc":  # CUDA handles travel pickled, between this run's own actors alone
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        if self.on_cpu:
            # One engine does not own the machine: vLLM's own binding would put every engine on the first core,
            # and compiling for shapes that last milliseconds costs 20 s at the first request.
            os.environ["OMP_NUM_THREADS"] = str(self.config.engine_threads)
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
            # oneDNN keeps what it made for the last 1024 shapes, and each number of tokens is one: a third of a GiB that fills for minutes.
            os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
            # With threads fixed above, the worker may live in the engine core: one process and its imports fewer.
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    def _engine_args(self) -> dict[str, Any]:
        config, cpu = self.config, self.on_cpu
        args: dict[str, Any] = {
            "model": self.model,
            "dtype": config.engine_dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": config.max_sequences,
            "enforce_eager": cpu or config.eager,
            # In a run the learner's weights arrive before the first request: reading the checkpoint would be waste.
            "load_format": "auto" if self.load_weights else "dummy",
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "trust_remote_code": self.trust_remote_code,
            "worker_extension_cls": "rollout.receive.WorkerExtension",
            "weight_transfer_config": {"backend": self.transfer_backend},
            "tensor_parallel_size": max(1, int(config.engine_gpus)),
        }
        if cpu:
            args["kv_cache_memory_bytes"] = int(config.kv_cache_gb * 2**30)
            args["distributed_executor_backend"] = "uni"
        else:
            args["gpu_memory_utilization"] = config.memory_utilization
            args["enable_sleep_mode"] = config.colocate
        return {**args, **config.engine_options}

    def pids(self) -> list[int]:
        """The engine's processes: every descendant of this one."""
        import psutil

        return [p.pid for p in psutil.Process().children(recursive=True)]

    async def stop(self) -> None:
        """End the engine core, and remove the sockets that vLLM leaves."""
        if self.llm is not None:
            self.llm.shutdown()
            self.llm = None
            if self.on_cpu:
                forkserver.stop()
            shutil.rmtree(self.sockets, ignore_errors=True)

    # -- generation -------------------------------------------------------------------------------------------------

    async def generate(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """`sampling.n` answers; each has its own request and seed, and shares the prompt's cache with the others."""
        tasks = [asyncio.ensure_future(self._answer(prompt, sampling, i)) for i in range(sampling.n)]
        try:
            return tuple(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:  # a cancelled request is aborted in the engine
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def parameters(self, sampling: Sampling, seed: int) -> Any:
        """What vLLM is told of one request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=seed,
            logprobs=0,  # the sampled token's own
            flat_logprobs=True,
            stop=self.config.stop or None,
            include_stop_str_in_output=True,
            stop_token_ids=list(self.stop_token_ids),
            skip_clone=True,  # it serves one request
            detokenize=bool(self.config.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,  # nobody here waits for a part of an answer
        )

    async def _answer(self, prompt: Prompt, sampling: Sampling, index: int) -> Completion:
        assert self.llm is not None, "the engine was not started"
        await self._resumed.wait()
        params = self.parameters(sampling, request_seed(sampling.seed, prompt.uid, index))
        # New keys and values never serve an older version's request, nor the other way round: the salt is the version.
        request = rendered(prompt, str(self.version))
        self._requests += 1
        answer = None
        async for output in self.llm.generate(request, params, request_id=f"{prompt.uid}-{index}-{self._requests}"):
            answer = output.outputs[0]
        finish = None if answer is None else answer.finish_reason
        if answer is None or finish not in ("stop", "length"):
            raise RuntimeError(f"the engine ended a request with finish reason {finish!r}")
        ids = np.array(answer.token_ids, dtype=np.int32)
        logp = np.array(answer.logprobs.logprobs, dtype=np.float32)  # flat: one number for each token
        assert len(logp) == len(ids), "a log-probability for each token"
        # The engine's core labels every token with the version that it had when it sampled it.
        spans = tuple(Span(s.start, s.end, int(s.version)) for s in answer.weight_versions or () if s.end > s.start)
        text = self.decode([t for t in answer.token_ids if t not in self.stop_token_ids])
        reason: Finish = "stop" if finish == "stop" else "length"
        return Completion(ids, logp, reason, spans, text)

    # -- weights ----------------------------------------------------------------------------------------------------

    async def update(self, manifest: WeightManifest) -> dict[str, Any]:
        """Pause, load, resume: requests in flight are kept and go on under the new version. Raises EngineDeadError when the core dies."""
        assert self.llm is not None
        llm = self.llm
        return await unless_dead(self._update(manifest), lambda: llm.dead_error if llm.errored else None)

    async def _update(self, manifest: WeightManifest) -> dict[str, Any]:
        assert self.llm is not None
        info = {
            "path": manifest.path,
            "names": [t.name for t in manifest.tensors],
            "dtypes": [t.dtype for t in manifest.tensors],
            "shapes": [list(t.shape) for t in manifest.tensors],
            "offsets": [t.offset for t in manifest.tensors],
            "sizes": [t.size for t in manifest.tensors],
        }
        started = time.monotonic()
        await self.pause()
        paused = time.monotonic()
        try:
            if self.asleep:  # memory for the weights first: on a GPU the learner may still hold what the cache will take
                await self.llm.wake_up(tags=["weights"])
            (report, *_) = await self.llm.collective_rpc("winnow_update", kwargs={"update_info": info})
            await self.llm.update_weight_version(str(manifest.version))
            self.version = manifest.version
            if self.asleep:
                await self.llm.wake_up(tags=["kv_cache"])
                self.asleep = False
        finally:
            await self.resume()
        return {**report, "version": manifest.version, "seconds_paused": time.monotonic() - paused, "seconds": time.monotonic() - started}

    async def sleep(self) -> None:
        """Give up weights and cache (vLLM's level 2; on CPUs it only stands still). Requests that come wait for the next update."""
        assert self.llm is not None
        self._resumed.clear()
        await self.llm.sleep(level=2, mode="keep")
        self.asleep = True

    async def pause(self) -> None:
        """Freeze requests where they are."""
        assert self.llm is not None
        self._resumed.clear()
        # What AsyncLLM.pause_generation does, without the 20 ms that it then waits for outputs on their way.
        await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=self.config.kv_on_update == "recompute")

    async def resume(self) -> None:
        """Let requests go on."""
        assert self.llm is not None
        await self.llm.resume_generation()
        self._resumed.set()


async def unless_dead(work: Coroutine[Any, Any, dict[str, Any]], death: Callable[[], BaseException | None]) -> dict[str, Any]:
    """The result of `work`; raises what `death` gives as soon as it gives something.

    vLLM ends the requests of a core that has died, but a call to the core itself (an update of its weights) would wait for ever.
    """
    task = asyncio.ensure_future(work)
    while not (await asyncio.wait([task], timeout=DEATH_SECONDS))[0]:
        if (error := death()) is not None:
            task.cancel()
            raise error
    return task.result()
