"""The actors of a run: rollout workers, verifiers and learner ranks, started together and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from cluster.config import RunConfig
from cluster.placement import Places, bundles, counts
from learner.actor import LearnerRank
from learner.allocator import ENVIRONMENT
from learner.settings import LearnerSettings
from rollout.actor import Rollout
from verifier.actor import VerifierActor

STOP_SECONDS = 5.0  # for an actor to end by itself
GONE_SECONDS = 2.0  # for its processes to be gone after that
MANY = 10_000  # calls that an asynchronous actor may have under way


@dataclass(frozen=True)
class ModelFacts:
    """What every actor must agree on about the model: where it is, what ends an answer, how long a context is."""

    folder: str
    stop_token_ids: tuple[int, ...]
    max_model_len: int
    transfer_backend: str


@dataclass
class Services:
    """Handles of all actors, each list in the order of their indices; `pids` are an engine's processes on this machine."""

    maker: Maker
    engines: list[Any]
    verifiers: list[Any]
    ranks: list[Any]
    pids: dict[int, list[int]] = field(default_factory=dict)

    async def each(self, actors: Iterable[Any], method: str, *args: Any) -> list[Any]:
        """Call one method on several actors at once; their answers in order."""
        return list(await asyncio.gather(*(as_coroutine(getattr(actor, method).remote(*args)) for actor in actors)))

    async def stop(self) -> None:
        """End every actor: asked first, killed after `STOP_SECONDS`; then every process that they had started."""
        everyone = [*self.engines, *self.verifiers, *self.ranks]
        asked = {asyncio.ensure_future(as_coroutine(a.close.remote() if a in self.verifiers else a.stop.remote())): a for a in everyone}
        done = (await asyncio.wait(asked, timeout=STOP_SECONDS))[0] if asked else set()
        for task, actor in asked.items():
            if task in done and task.exception() is None:
                actor.__ray_terminate__.remote()  # an actor that is killed would be reported as a fault
            else:
                ray.kill(actor)
        await asyncio.gather(*asked, return_exceptions=True)
        deadline = time.monotonic() + GONE_SECONDS
        mine = [pid for pids in self.pids.values() for pid in pids]
        while (left := [pid for pid in mine if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        for actor in everyone:  # one that still works did not heed its end
            ray.kill(actor)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def as_coroutine(ref: Any) -> Coroutine[Any, Any, Any]:
    """An object ref as a coroutine."""

    async def wait() -> Any:
        return await ref

    return wait()


def environment(threads: int) -> dict[str, str]:
    """Variables of an actor: threads that spin on shared cores cost a factor of 30, so each gets its number."""
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "RAY_TQDM": "0"}


class Maker:
    """Makes the actors of a run, at its start and again in the place of one that died."""

    def __init__(
        self, config: RunConfig, settings: LearnerSettings | None, facts: ModelFacts, places: Places, prewarm: Sequence[str]
    ) -> None:
        """`prewarm` names the verifiers to have ready. Without `settings` there is no learner, and engines read the checkpoint."""
        self.config, self.settings, self.facts, self.places, self.prewarm = config, settings, facts, places, list(prewarm)

    def _options(self, kind: str, index: int, threads: int, **variables: str) -> dict[str, Any]:
        return self.places.options(kind, index, bundles(self.config)[kind], environment(threads) | variables)

    def engine(self, index: int) -> Any:
        """Rollout worker number `index`; it has not started yet."""
        config, facts = self.config, self.facts
        options = self._options("engine", index, config.rollout.engine_threads)
        worker = ray.remote(Rollout).options(**options, max_concurrency=MANY)
        return worker.remote(
            index,
            config.rollout,
            model=facts.folder,
            max_model_len=facts.max_model_len,
            stop_token_ids=facts.stop_token_ids,
            transfer_backend=facts.transfer_backend,
            trust_remote_code=config.model.trust_remote_code,
            load_weights=self.settings is None,
        )

    def rank(self, index: int) -> Any:
        """Learner rank number `index`."""
        model, roll, ranks = self.config.model, self.config.rollout, self.config.model.learner_ranks
        heap = {} if model.learner_gpus else ENVIRONMENT
        rank = ray.remote(LearnerRank).options(**self._options("rank", index, model.learner_threads, **heap), max_concurrency=2)
        weights = {"publish_dtype": roll.engine_dtype, "deltas": roll.weight_delta}
        return rank.remote(index, ranks, self.settings, threads=model.learner_threads, **weights)

    def verifier(self, index: int) -> Any:
        """Verifier actor number `index`."""
        options = self._options("verifier", index, 1)
        return ray.remote(VerifierActor).options(**options, max_concurrency=MANY).remote(self.config.verify, self.prewarm)

    def all(self) -> Services:
        """Every actor; none has started its work yet."""
        number = counts(self.config, learner=self.settings is not None)
        engines = [self.engine(i) for i in range(number["engine"])]
        ranks = [self.rank(i) for i in range(number["rank"])]
        return Services(self, engines, [self.verifier(i) for i in range(number["verifier"])], ranks)


def verifier_names(config: RunConfig) -> list[str]:
    """The verifiers that the recipe names, which are imported before the first answer comes."""
    sources = (*config.data.sources, *config.data.eval_sources)
    return sorted({s.verifier for s in sources} | set(config.verify.reward_weights))
