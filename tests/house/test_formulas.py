"""House rules 3 and 6: the formulas are formulas, and something new has one place to go.

That the formulas return sums is pinned by value in tests/learner; here only that they cannot log, read settings, or reach beyond
themselves.
"""

from __future__ import annotations

import ast

import pytest

from learner.variants import PRESETS
from tests.house.source import ROOT, Module, imports, modules, within
from verifier import VERIFIERS

FORMULAS = ("advantage", "aggregate", "denominators", "diagnostics", "gae", "layout", "logprob", "objective", "ratios")
MAY_IMPORT = ("__future__", "collections.abc", "dataclasses", "functools", "math", "typing", "numpy", "torch", "rollout.errors")


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_file_imports_formulas_only(name: str) -> None:
    (module,) = [module for module in modules("learner") if module.path == f"learner/{name}.py"]
    allowed = (*MAY_IMPORT, *(f"learner.{formula}" for formula in FORMULAS))
    run_time = [found.name for found in imports(module.tree) if not found.typing_only]
    assert [name for name in run_time if not within(name, *allowed) or within(name, "torch.distributed")] == []


def configs_read(module: Module) -> set[str]:
    return {found.name for found in imports(module.tree) if ".config." in f".{found.name}."}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_reads_no_config_wider_than_its_own(name: str) -> None:
    (module,) = [module for module in modules("learner") if module.path == f"learner/{name}.py"]
    assert configs_read(module) <= {"learner.config.ObjectiveConfig"}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_file_logs_nothing(name: str) -> None:
    (module,) = [module for module in modules("learner") if module.path == f"learner/{name}.py"]
    called = {ast.unparse(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
    assert not called & {"print", "warnings.warn", "logging.getLogger"}


def compared(module: Module, names: set[str]) -> list[str]:
    """Places where one of the names is compared with, as a branch on a variant's or data set's name would."""
    found = []
    for node in ast.walk(module.tree):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        values = [inner.value for side in sides for inner in ast.walk(side) if isinstance(inner, ast.Constant)]
        found += [f"{module.path}:{node.lineno} {value!r}" for value in values if value in names and isinstance(node, ast.Compare)]
    return found


def test_a_variant_is_a_row_of_presets_and_nothing_branches_on_its_name() -> None:
    values = {"cispo", "sapo", "gdpo"}  # also values of an objective flag, which the formulas do branch on
    assert [line for module in modules() if module.path != "learner/variants.py" for line in compared(module, set(PRESETS) - values)] == []


def test_a_verifier_is_one_file_one_line_and_its_test() -> None:
    files = [entry.module for entry in VERIFIERS.values()]
    assert len(set(files)) == len(files)
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "verifier").rglob("*.py"))
    for name, entry in VERIFIERS.items():
        assert (ROOT / (entry.module.replace(".", "/") + ".py")).is_file()
        assert f'"{name}"' in tests or entry.module in tests, f"no test under tests/verifier names the verifier {name}"
    # Nothing outside the package knows a verifier's file. Reaching one by name goes through the registry.
    reached = [f"{m.path}: {i.name}" for m in modules("rollout", "learner", "cluster") for i in imports(m.tree) if within(i.name, *files)]
    assert reached == []


def test_every_variant_has_a_test() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if "house" not in path.parts)
    assert [name for name in PRESETS if f'"{name}"' not in tests and "in PRESETS" not in tests] == []
