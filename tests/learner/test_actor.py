"""Where learner ranks meet. The rest of the actor is plumbing, which the end-to-end tests run."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

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
