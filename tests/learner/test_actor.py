"""Where learner ranks meet, and what a rank does with tokens that are lost with their node.

Does not cover: the rest of the actor, which is plumbing that the end-to-end tests run, and real object stores (tests/e2e/test_faults.py).
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch

from learner.actor import LearnerRank


def rank(index: int, ranks: int) -> LearnerRank:
    settings = SimpleNamespace(config=SimpleNamespace(learner_gpus=0))
    return LearnerRank(index, ranks, settings, publish_dtype="float32", threads=1)


def test_ranks_meet_at_the_address_that_rank_0_names_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.actor.ray.util.get_node_ip_address", lambda: "127.0.0.1")
    first, second = rank(0, 2), rank(1, 2)
    address, port = first.address()
    held, joined = first._store(address, port), second._store(address, port)
    joined.set("said by", "1")
    assert held.get("said by") == b"1"
    listening = [c.laddr for c in psutil.Process(os.getpid()).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [at.ip for at in listening if at.port == port] == ["127.0.0.1"]


def test_one_rank_alone_listens_nowhere() -> None:
    before = psutil.Process(os.getpid()).net_connections("tcp")
    store = rank(0, 1)._store("", 0)
    store.set("a", "1")
    assert store.get("a") == b"1" and psutil.Process(os.getpid()).net_connections("tcp") == before


class Stub:
    """A learner that needs groups 1, 2 and 4, and gives back what it is handed."""

    def needs(self, groups: Any) -> list[int]:
        return [1, 2, 4]

    def train_batch(self, batch: Any) -> Any:
        return batch


def test_lost_tokens_are_named_and_the_others_wait_for_train(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(refs: Any) -> Any:
        for ref in [refs] if isinstance(refs, str) else refs:
            if ref in gone:
                raise ray.exceptions.ObjectLostError(ref, None, "")
        return f"tokens of {refs}" if isinstance(refs, str) else [f"tokens of {ref}" for ref in refs]

    monkeypatch.setattr(ray, "get", get)
    one = LearnerRank.__new__(LearnerRank)
    one.device = torch.device("cpu")
    one._started = lambda: Stub()  # type: ignore[method-assign,return-value,assignment]
    refs = {uid: f"group {uid}" for uid in (1, 2, 3, 4)}
    gone = {"group 2", "group 3"}
    assert one.fetch(7, (), ("reward",), refs).lost == (2,)
    gone.clear()
    assert one.fetch(7, (), ("reward",), refs).lost == ()
    batch: Any = one.train()
    assert batch.index == 7 and batch.names == ("reward",) and batch.tokens == {uid: f"tokens of group {uid}" for uid in (1, 2, 4)}
    assert one.batch is None, "a rank holds no tokens beyond their batch"
