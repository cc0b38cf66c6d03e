"""One version of the weights from the learner to every engine: published once, loaded everywhere, compared by fingerprint."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from cluster.services import Services, as_coroutine
from rollout.weights import WeightManifest


class WeightError(RuntimeError):
    """An engine has other weights than the learner."""


@dataclass(frozen=True)
class TransferStats:
    """One transfer, in seconds: the learner's part, the engines' pause (the longest), and all of it."""

    version: int
    size: int  # bytes
    seconds_publish: float
    seconds_paused: float
    seconds: float


class WeightSync:
    """One transfer at a time. `versions` holds what each engine has acknowledged; -1: nothing yet."""

    def __init__(self, services: Services, backend: str, workers: int) -> None:
        """`backend`: shm, nccl or ipc; `workers` counts the GPUs of all engines."""
        self.services = services
        self.backend = backend
        self.workers = workers
        self.versions = [-1] * len(services.engines)
        self.attempt = 0
        self.hosts: list[str] = []
        self._joined = False

    async def publish(self, version: int) -> WeightManifest | TransferStats:
        """The learner's part: when it returns, the learner is free again. Over `nccl` and `ipc` it is the whole transfer."""
        if self.backend != "shm":
            return await self._send(version)
        manifests = await self.services.each(self.services.ranks, "publish", self.attempt, version)
        return next(m for m in manifests if m is not None)

    async def load(self, published: WeightManifest | TransferStats, seconds_publish: float) -> TransferStats:
        """Every engine's part. Raises WeightError when one has read other bytes, or left a parameter as it was."""
        if isinstance(published, TransferStats):
            return published
        started = time.monotonic()
        reports = await asyncio.gather(*(self._load_one(i, published) for i in range(len(self.services.engines))))
        await self.services.each(self.services.ranks[:1], "release", published)
        return TransferStats(
            published.version,
            published.size,
            seconds_publish,
            max(r["seconds_paused"] for r in reports),
            seconds_publish + time.monotonic() - started,
        )

    async def transfer(self, version: int) -> TransferStats:
        """Publish and load."""
        started = time.monotonic()
        published = await self.publish(version)
        return await self.load(published, time.monotonic() - started)

    async def _load_one(self, index: int, manifest: WeightManifest) -> dict[str, Any]:
        engine = self.services.engines[index]
        data = None
        if self.hosts and self.hosts[index] != manifest.host:
            data = self.services.ranks[0].read_published.remote(manifest)
        report: dict[str, Any] = await as_coroutine(engine.update.remote(manifest, data))
        check_report(index, manifest, report)
        self.versions[index] = manifest.version
        return report

    async def _send(self, version: int) -> TransferStats:
        started = time.monotonic()
        if not self._joined:
            address, port = await as_coroutine(self.services.ranks[0].address.remote())
            join = (self.backend, self.services.engines, self.workers, address, port)
            await self.services.each(self.services.ranks, "join_transfer", *join)
            self._joined = True
        await self.services.each(self.services.ranks, "send")
        await self.services.each(self.services.engines, "update_weight_version", str(version))
        self.versions = [version] * len(self.versions)
        seconds = time.monotonic() - started
        return TransferStats(version, 0, seconds, seconds, seconds)


def check_report(index: int, manifest: WeightManifest, report: dict[str, Any]) -> None:
    """Raises WeightError when an engine's report does not match what was published."""
    if report["missing"]:
        raise WeightError(f"engine {index} left {len(report['missing'])} parameters at an older version, e.g. {report['missing'][0]}")
    seen = report["fingerprints"]
    wrong = [t.name for t in manifest.tensors if seen.get(t.name) != t.fingerprint]
    if wrong:
        raise WeightError(f"engine {index} read version {manifest.version} with {len(wrong)} tensors that differ, e.g. {wrong[0]}")
