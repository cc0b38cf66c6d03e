"""The Ray shell of one learner rank: joins the process group, fetches its tokens, publishes weights. No logic of its own.

Every method but `address`, `progress`, `abandon`, `fetch`, `release`, `read_published` and `pids` is a collective: the controller
calls it on all ranks at once. The actor has two threads, so that `progress` and `abandon` can be called while a rank works.

What needs torch is imported in the actor's own process, not by whoever names the class: the controller does without its seconds.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from learner.allocator import give_back_unused, keep_freed_memory
from learner.records import Batch, Fetched, StepStats, TrainGroup
from learner.settings import LearnerSettings
from rollout.records import Completion, Prompt
from rollout.weights import WeightManifest
from verifier.records import ScoredGroup

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from learner.publish import ShmPublisher, VllmPublisher
    from learner.step import Learner
    from learner.warmup import Example, WarmupStep

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class LearnerRank:
    """Rank `rank` of `ranks`. `publish_dtype` is the engines' dtype, in which weights travel; `deltas`: whether as what changed."""

    def __init__(self, rank: int, ranks: int, settings: LearnerSettings, *, publish_dtype: str, threads: int, deltas: bool = False) -> None:
        import torch

        self.rank = rank
        self.ranks = ranks
        self.settings = settings
        self.deltas = deltas
        self.publish_dtype: torch.dtype = getattr(torch, publish_dtype)
        gpu = settings.config.learner_gpus > 0
        self.device = torch.device("cuda", 0) if gpu else torch.device("cpu")
        if not gpu:
            torch.set_num_threads(threads)
            keep_freed_memory()
        self.learner: Learner | None = None
        self.publisher: ShmPublisher | None = None
        self.vllm: VllmPublisher | None = None
        self.batch: Batch | None = None  # fetched, and not trained yet
        self._progress: WarmupStep | None = None
        self._listener: socket.socket | None = None

    def address(self) -> tuple[str, int]:
        """Where rank 0 is met by the others: at the node's address alone, which is loopback in a private cluster."""
        host = ray.util.get_node_ip_address()
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        return host, int(self._listener.getsockname()[1])

    def start(self, address: str, port: int) -> dict[str, Any]:
        """Join the process group and load the shards. `address` and `port` are those of rank 0; one rank alone needs neither."""
        import torch.distributed as dist

        from learner.publish import ShmPublisher
        from learner.step import Learner

        backend = "nccl" if self.device.type == "cuda" else "gloo"
        store = self._store(address, port)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.ranks, timeout=COLLECTIVE_TIMEOUT)
        self._use_device()
        self.learner = Learner(self.settings, self.device)
        self.publisher = ShmPublisher(self._weights, rank=self.rank, dtype=self.publish_dtype, deltas=self.deltas)
        return {"host": socket.gethostname(), "parameters": sum(p.numel() for p in self.learner.policy.parameters())}

    def _store(self, address: str, port: int) -> dist.Store:
        """Where the ranks meet. A store left to itself would listen on every network card."""
        import torch.distributed as dist

        if self.ranks == 1:
            return dist.HashStore()
        listener = self._listener.detach() if self._listener is not None else None
        return dist.TCPStore(
            address,
            port,
            self.ranks,
            is_master=self.rank == 0,
            timeout=COLLECTIVE_TIMEOUT,
            master_listen_fd=listener,
            wait_for_workers=False,
        )

    def _use_device(self) -> None:
        if self.device.type == "cuda":  # the current device belongs to the thread, and calls come on several
            import torch

            torch.cuda.set_device(self.device)

    def _started(self) -> Learner:
        assert self.learner is not None, "the learner was not started"
        self._use_device()
        return self.learner

    # -- work -------------------------------------------------------------------------------------------------------

    def fetch(self, index: int, groups: tuple[TrainGroup, ...], names: tuple[str, ...], refs: Mapping[int, ray.ObjectRef]) -> Fetched:
        """Take a batch, with the tokens that this rank needs of it.

        Apart from `train`, since there a rank that lacks its tokens would leave the others waiting. Object refs inside a mapping
        come as refs, so a rank fetches only the groups that it works on.
        """
        started = time.perf_counter()
        needed = self._started().needs(groups)
        tokens: dict[int, ScoredGroup] = {}
        lost = []
        try:  # all at once: one after the other costs a message's way each
            tokens = dict(zip(needed, ray.get([refs[uid] for uid in needed]), strict=True))
        except ray.exceptions.ObjectLostError:
            for uid in needed:
                try:
                    tokens[uid] = ray.get(refs[uid])
                except ray.exceptions.ObjectLostError:
                    lost.append(uid)
        self.batch = Batch(index, groups, names, tokens)
        return Fetched(tuple(lost), time.perf_counter() - started)

    def train(self) -> StepStats:
        """The batch that was fetched."""
        batch, self.batch = self.batch, None
        assert batch is not None, "no batch was fetched"
        stats = self._started().train_batch(batch)
        if self.device.type == "cpu":
            give_back_unused(batch.index + 1)
        return stats

    def abandon(self) -> None:
        """Give up the batch at work, if it has not taken an optimiser step yet: `train` then raises Abandoned."""
        if self.learner is not None:
            self.learner.abandonment.ask()

    def warm_up(self, batches: Sequence[Sequence[Example]], lr: float) -> list[WarmupStep]:
        """The supervised phase."""
        from learner.warmup import sft_steps

        def note(step: WarmupStep) -> None:
            self._progress = step

        return sft_steps(self._started(), batches, steps=len(batches), lr=lr, on_step=note)

    def progress(self) -> WarmupStep | None:
        """The last supervised step taken."""
        return self._progress

    def logprobs(self, prompt: Prompt, completions: Sequence[Completion]) -> list[np.ndarray]:
        """The policy's log-probabilities of answers that an engine gave (float32, one array per answer)."""
        from learner.pack import Answer

        return self._started().logprobs([Answer.of(prompt, c) for c in completions])

    # -- weights ----------------------------------------------------------------------------------------------------

    def _weights(self) -> Any:
        return self._started().weights(self.publish_dtype)

    def publish(self, attempt: int, version: int) -> WeightManifest | None:
        """One version into shared memory; the manifest on rank 0."""
        assert self.publisher is not None
        self._use_device()
        return self.publisher.publish(attempt, version)

    def release(self, manifest: WeightManifest) -> None:
        """Give a version's memory back."""
        assert self.publisher is not None
        self.publisher.release(manifest)

    def read_published(self, manifest: WeightManifest, delta: bool = False) -> np.ndarray:
        """The bytes of a version, or of its delta, for engines on another host."""
        from learner.publish import read_file

        return read_file(manifest, delta=delta)

    def join_transfer(self, backend: str, engines: Sequence[Any], workers: int, address: str, port: int) -> None:
        """Open vLLM's own transfer (`nccl`, `ipc`) to all engines; `workers` counts their GPUs."""
        from learner.publish import VllmPublisher

        metadata = [(name, self.publish_dtype, tuple(tensor.shape)) for name, tensor in self._weights()]
        self.vllm = VllmPublisher(
            backend,
            self._weights,
            metadata,
            rank=self.rank,
            engines=engines,
            address=address,
            port=port,
            world_size=workers + 1,
        )

    def send(self) -> None:
        """Send the current weights over vLLM's own transfer."""
        assert self.vllm is not None
        self._use_device()
        self.vllm.publish()

    # -- keeping ----------------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """This rank's part of a checkpoint."""
        self._started().save(folder)

    def load(self, folder: str) -> int:
        """Go on from a checkpoint; returns the batches trained."""
        return self._started().load(folder).batches

    def export(self, folder: str, dtype: str, tokenizer_folder: str) -> None:
        """An ordinary Hugging Face checkpoint."""
        import torch

        self._started().export(folder, dtype=getattr(torch, dtype), tokenizer_folder=tokenizer_folder)

    def pids(self) -> list[int]:
        """This process."""
        return [os.getpid()]

    def stop(self) -> None:
        """Leave the process group and give shared memory back."""
        import torch.distributed as dist

        if self.publisher is not None:
            self.publisher.close()
        if dist.is_initialized():
            dist.destroy_process_group()
