"""House rule 5: every recipe that is shipped loads. What it does when it runs is tested elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.load import load
from tests.house.source import ROOT

RECIPES = sorted((ROOT / "cluster" / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_by_path_and_by_name(path: Path) -> None:
    assert load(str(path)) == load(path.stem)


def test_the_two_recipes_of_the_readme_are_there_and_short() -> None:
    lines = {path.stem: len(path.read_text().splitlines()) for path in RECIPES}
    assert {"arithmetic", "gsm8k_qwen3"} <= set(lines)
    assert lines["gsm8k_qwen3"] <= 40
