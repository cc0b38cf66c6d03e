"""House rules 1 and 2: imports run one way, and each large library has its place.

Seen are import statements and `import_module` with a literal name; not what a name built at run time reaches, nor what a library pulls in.
"""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.house.source import PACKAGES, ROOT, Module, imports, modules, within

# Besides the records: the one class of user errors, and the message in which weights return.
MAY_IMPORT = {
    "rollout": ("rollout",),
    "verifier": ("verifier", "rollout.records", "rollout.errors"),
    "learner": ("learner", "rollout.records", "rollout.errors", "rollout.weights", "rollout.delta", "verifier.records"),
    "cluster": PACKAGES,
}


def breaches(module: Module, library: str) -> list[str]:
    return [f"{module.path}:{found.line} imports {found.name}" for found in imports(module.tree) if within(found.name, library)]


def one_way(module: Module) -> list[str]:
    own = [found for found in imports(module.tree) if within(found.name, *PACKAGES)]
    return [f"{module.path}:{found.line} imports {found.name}" for found in own if not within(found.name, *MAY_IMPORT[module.package])]


def test_imports_run_one_way() -> None:
    assert [line for module in modules() for line in one_way(module)] == []


VLLM_OF_ROLLOUT = [f"rollout/{name}.py" for name in ("engine", "forkserver", "preloaded", "receive")]
LIBRARIES = {
    "ray": lambda path: path.startswith("cluster/") or path.endswith("/actor.py"),
    "vllm": lambda path: path in {"learner/publish.py", *VLLM_OF_ROLLOUT},
    "torch.distributed": lambda path: path in {f"learner/{name}.py" for name in ("model", "step", "checkpoint", "publish", "actor")},
    "wandb": lambda path: path == "cluster/sinks.py",
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_large_library_is_imported_in_its_place_only(library: str) -> None:
    allowed = LIBRARIES[library]
    assert [line for module in modules() if not allowed(module.path) for line in breaches(module, library)] == []
    assert any(breaches(module, library) for module in modules()), f"nothing imports {library}: is that still its name?"


def test_verifiers_import_no_torch() -> None:
    assert [line for module in modules("verifier") for line in breaches(module, "torch")] == []


def test_records_import_no_torch_and_no_ray() -> None:
    """The records that travel are numpy: whoever unpickles them needs neither."""
    records = [module for module in modules() if module.path.endswith("/records.py") and module.package != "learner"]
    assert len(records) == 2
    assert [line for module in records for library in ("torch", "ray") for line in breaches(module, library)] == []


def test_buffer_imports_neither_ray_nor_torch() -> None:
    """By following the project's own imports too: the buffer runs under a fake clock without either."""
    by_name = {module.path.removesuffix(".py").replace("/", "."): module for module in modules()}
    todo, seen = ["learner.buffer"], set()
    while todo:
        name = todo.pop()
        seen.add(name)
        for found in imports(by_name[name].tree):
            assert found.typing_only or not within(found.name, "ray", "torch", "vllm"), f"{name} line {found.line} imports {found.name}"
            if not found.typing_only:
                todo += {candidate for candidate in (found.name, found.name.rpartition(".")[0]) if candidate in by_name} - seen


def test_help_needs_no_large_library() -> None:
    """`winnow --help` and `winnow check`'s parsing answer at once: the command line imports none of them."""
    large = ("torch", "ray", "vllm", "transformers", "datasets")
    code = f"import sys, cluster.launch; print([name for name in {large} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr


@pytest.mark.parametrize(
    ("path", "line", "caught"),
    [
        ("rollout/x.py", "import learner.step", True),
        ("rollout/x.py", "from rollout.records import Group", False),
        ("verifier/x.py", "from rollout.records import Group", False),
        ("verifier/x.py", "from rollout import records", False),
        ("verifier/x.py", "from rollout.engine import Engine", True),
        ("learner/x.py", "def f():\n    from cluster.config import RunConfig", True),
        ("learner/x.py", "importlib.import_module('cluster.loop')", True),
        ("cluster/x.py", "from verifier.pool import Pool", False),
        ("cluster/x.py", "import clusters", False),
    ],
)
def test_the_rule_of_imports_catches_what_it_should(path: str, line: str, caught: bool) -> None:
    assert bool(one_way(Module(path, line, ast.parse(line)))) is caught
