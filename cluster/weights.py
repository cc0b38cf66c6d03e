"""One version of the weights from the learner to every engine: published once, loaded everywhere, compared by fingerprint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any

import ray

from cluster.health import Health, engine_is_gone, on_ranks, reason_of
from cluster.services import Services, as_coroutine
from rollout.weights import WeightManifest


class WeightError(RuntimeError):
    """An engine has other weights than the learner."""


@dataclass(frozen=True)
class TransferStats:
    """One transfer, in seconds: the learner's part, the wait for engines to drain and their pause (the longest), and all of it."""

    version: int
    size: int  # bytes
    sent: int  # bytes to engines on other hosts, together
    seconds_publish: float
    seconds_drained: float
    seconds_paused: float
    seconds: float


def together(transfers: Sequence[TransferStats]) -> TransferStats | None:
    """Several transfers as one, of the last version: seconds and bytes add up, of drains and pauses the longest; None of none."""
    if not transfers:
        return None
    of = {field.name: [getattr(t, field.name) for t in transfers] for field in fields(TransferStats)}
    longest = {name: max(of[name]) for name in ("version", "seconds_drained", "seconds_paused")}
    return TransferStats(**{name: sum(values) for name, values in of.items()} | longest)


class WeightSync:
    """One transfer at a time. `versions` holds what each engine has acknowledged; -1: nothing yet."""

    def __init__(self, services: Services, health: Health, backend: str, workers: int) -> None:
        """`backend`: shm, nccl or ipc; `workers` counts the GPUs of all engines."""
        self.services = services
        self.health = health
        self.backend = backend
        self.workers = workers
        self.versions = [-1] * len(services.engines)
        self.attempt = 0
        self.drained: Callable[[int], AbstractAsyncContextManager[float]] = at_once
        self.ready: Callable[[], None] = lambda: None  # told when an engine has new weights, and so may be given more
        self._held: dict[int, tuple[Any, tuple[int, int]]] = {}  # engines on other hosts, and the version that each keeps a copy of
        self._joined = False

    async def publish(self, version: int) -> WeightManifest | TransferStats:
        """The learner's part: when it returns, the learner is free again. Over `nccl` and `ipc` it is the whole transfer."""
        if self.backend != "shm":
            return await self._send(version)
        manifests = await on_ranks(self.services, "publish", self.attempt, version)
        return next(m for m in manifests if m is not None)

    async def load(
        self, published: WeightManifest | TransferStats, seconds_publish: float, only: Sequence[int] | None = None
    ) -> TransferStats:
        """The part of the engines `only`, or of all that have started; one that is lost meanwhile is left to its replacement.

        Raises WeightError when an engine has read other bytes, or left a parameter as it was.
        """
        if isinstance(published, TransferStats):
            return published
        started = time.monotonic()
        indices = sorted({*self.health.alive(), *self.health.started}) if only is None else only
        reports = [r for r in await asyncio.gather(*(self._load_one(i, published) for i in indices)) if r is not None]
        await self.services.each(self.services.ranks[:1], "release", published)
        return TransferStats(
            published.version,
            published.size,
            sum(r["sent"] for r in reports),
            seconds_publish,
            max((r["seconds_drained"] for r in reports), default=0.0),
            max((r["seconds_paused"] for r in reports), default=0.0),
            seconds_publish + time.monotonic() - started,
        )

    async def transfer(self, version: int, only: Sequence[int] | None = None) -> TransferStats:
        """Publish and load."""
        started = time.monotonic()
        published = await self.publish(version)
        return await self.load(published, time.monotonic() - started, only)

    async def sleep(self) -> None:
        """Every engine gives its device up until the next load; one that is lost meanwhile is left to its replacement."""

        async def one(index: int) -> None:
            engine = self.services.engines[index]
            try:
                await asyncio.wait_for(as_coroutine(engine.sleep.remote()), self.health.start_timeout)
            except (ray.exceptions.RayError, TimeoutError) as error:
                if isinstance(error, ray.exceptions.RayError) and not engine_is_gone(error):
                    raise
                self.health.engine_lost(index, engine, f"{reason_of(error)} in going to sleep")

        await asyncio.gather(*(one(index) for index in self.health.alive()))

    async def _load_one(self, index: int, manifest: WeightManifest) -> dict[str, Any] | None:
        async with self.drained(index) as seconds:
            report = await self._load_now(index, manifest)
        if report is None:
            return None
        self.ready()
        return report | {"seconds_drained": seconds}

    async def _load_now(self, index: int, manifest: WeightManifest) -> dict[str, Any] | None:
        engine = self.services.engines[index]
        try:
            report = await asyncio.wait_for(self._give(index, engine, manifest), self.health.start_timeout)
        except (ray.exceptions.RayError, TimeoutError) as error:
            if isinstance(error, ray.exceptions.RayError) and not engine_is_gone(error):
                raise
            self.health.engine_lost(index, engine, f"{reason_of(error)} in a weight update")
            return None
        if self.services.engines[index] is not engine:
            return None  # it was replaced meanwhile
        check_report(index, manifest, report)
        self.versions[index] = manifest.version
        self.health.joined(index, engine)
        return report

    async def _give(self, index: int, engine: Any, manifest: WeightManifest) -> dict[str, Any]:
        """The engine's report. On another host it is sent the delta where it holds the version before, and the whole if that fails."""
        if await as_coroutine(engine.host.remote()) == manifest.host:
            return {**await as_coroutine(engine.update.remote(manifest)), "sent": 0}
        holder, held = self._held.pop(index, (None, None))
        sent = 0
        for delta in (True, False):
            entry = manifest.delta
            if delta and (entry is None or holder is not engine or entry.base != held):
                continue
            data = self.services.ranks[0].read_published.remote(manifest, delta)
            report: dict[str, Any] = await as_coroutine(engine.update.remote(manifest, data, delta))
            sent += entry.size if delta and entry is not None else manifest.size
            if not differing(manifest, report):
                self._held[index] = (engine, manifest.name)
                break
        return {**report, "sent": sent}

    async def _send(self, version: int) -> TransferStats:
        started = time.monotonic()
        if not self._joined:
            address, port = await as_coroutine(self.services.ranks[0].address.remote())
            join = (self.backend, self.services.engines, self.workers, address, port)
            await on_ranks(self.services, "join_transfer", *join)
            self._joined = True
        async with AsyncExitStack() as idle:
            drained = await asyncio.gather(*(idle.enter_async_context(self.drained(i)) for i in range(len(self.versions))))
            paused = time.monotonic()
            await on_ranks(self.services, "send")
            await self.services.each(self.services.engines, "update_weight_version", str(version))
            self.versions = [version] * len(self.versions)
        self.ready()
        seconds = time.monotonic() - paused
        return TransferStats(version, 0, 0, seconds, max(drained), seconds, time.monotonic() - started)


@asynccontextmanager
async def at_once(index: int) -> AsyncIterator[float]:
    """An engine takes new weights in the middle of its answers: nothing is waited for."""
    yield 0.0


def check_report(index: int, manifest: WeightManifest, report: dict[str, Any]) -> None:
    """Raises WeightError when an engine's report does not match what was published."""
    if report["missing"]:
        raise WeightError(f"engine {index} left {len(report['missing'])} parameters at an older version, e.g. {report['missing'][0]}")
    if wrong := differing(manifest, report):
        raise WeightError(f"engine {index} read version {manifest.version} with {len(wrong)} tensors that differ, e.g. {wrong[0]}")


def differing(manifest: WeightManifest, report: dict[str, Any]) -> list[str]:
    """Tensors of which an engine has read other bytes than were published."""
    seen = report["fingerprints"]
    return [t.name for t in manifest.tensors if seen.get(t.name) != t.fingerprint]
