"""A tiny model, groups made by code, and a process group of one rank, for the tests of the learner."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def making() -> ModuleType:
    """The functions of `making.py`, which the processes of the two-rank test use as well."""
    spec = importlib.util.spec_from_file_location("making", Path(__file__).with_name("making.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, making: ModuleType) -> Path:
    """A checkpoint folder: Qwen3, 2 layers of width 32, vocabulary 40, tied head."""
    from learner.model import build_tiny

    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(folder, making.TINY, seed=0)
    return folder


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The default process group, of this process alone."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if not dist.is_initialized():
        store = tmp_path_factory.mktemp("store") / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
