"""The Ray shell of the verifier pool: no logic. `ray.remote(VerifierActor).options(num_cpus=…, max_concurrency=…)`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict

from rollout.records import Group
from verifier.config import VerifyConfig
from verifier.pool import VerifierPool
from verifier.records import GroupSummary, ScoredGroup, summarise
from verifier.score import score_group


class VerifierActor:
    """An async actor with a pool of killable processes of its own."""

    def __init__(self, config: VerifyConfig, prewarm: Sequence[str] = ()) -> None:
        """Start the processes; `ready` waits for the first."""
        self.config = config
        self.pool = VerifierPool(config, prewarm)

    async def ready(self) -> list[int]:
        """Pids of the pool's processes, once one of them is ready. Raises RuntimeError when none comes up."""
        await asyncio.to_thread(self.pool.wait_ready)
        return self.pool.pids()

    async def score(self, group: Group) -> tuple[GroupSummary, ScoredGroup]:
        """The group scored, and what the controller needs of it. Call with `num_returns=2`."""
        scored = await score_group(self.pool, group, self.config)
        return summarise(scored), scored

    async def notes(self) -> list[str]:
        """What the verifiers say of this machine, for the log at the start: which code sandbox holds."""
        return self.pool.notes

    async def pids(self) -> list[int]:
        """Pids of the living processes."""
        return self.pool.pids()

    async def stats(self) -> dict[str, int]:
        """Counts since the start (`PoolStats`)."""
        return asdict(self.pool.stats)

    async def close(self) -> None:
        """Kill and reap the processes."""
        await asyncio.to_thread(self.pool.close)
