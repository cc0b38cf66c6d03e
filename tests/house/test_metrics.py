"""House rule 4: only cluster/metrics.py spells a logged name, and each has one row saying what it means.

Looked for are names with a slash, as string constants; the four without one (`reward`, ...) are words that occur anywhere.
"""

from __future__ import annotations

import ast

from cluster.metrics import HEADLINE, TABLE
from tests.house.source import Module, docstrings, modules

NAMES = {metric.name for metric in TABLE}


def spelled(module: Module) -> list[str]:
    skip = docstrings(module.tree)
    constants = [node for node in ast.walk(module.tree) if isinstance(node, ast.Constant) and id(node) not in skip]
    return [f"{module.path}:{node.lineno} {node.value!r}" for node in constants if "/" in str(node.value) and node.value in NAMES]


def test_only_the_table_spells_a_logged_name() -> None:
    assert [line for module in modules() if module.path != "cluster/metrics.py" for line in spelled(module)] == []


def test_the_search_finds_a_name() -> None:
    code = '"""train/lr"""\nlog({"train/lr": 1.0})'
    assert spelled(Module("learner/x.py", code, ast.parse(code))) == ["learner/x.py:2 'train/lr'"]


def test_every_row_is_whole_and_no_name_or_field_comes_twice() -> None:
    assert len(NAMES) == len({metric.field for metric in TABLE}) == len(TABLE)
    assert [metric.name for metric in TABLE if not metric.unit or len(metric.meaning) < 5] == []


def test_four_names_stand_at_the_top_and_all_others_under_a_prefix() -> None:
    assert [name for name in NAMES if "/" not in name] and {name for name in NAMES if "/" not in name} == set(HEADLINE)
