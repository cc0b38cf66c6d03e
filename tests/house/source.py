"""The project's own modules, read once and parsed: what the house tests look at."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rollout", "verifier", "learner", "cluster")


class Module(NamedTuple):
    """A source file: its path under the root ("learner/step.py"), its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/")[0]


class Import(NamedTuple):
    """One imported name, as "package.module" or "package.module.attribute", and where."""

    name: str
    line: int
    typing_only: bool


@cache
def modules(*packages: str) -> tuple[Module, ...]:
    """All modules of the packages given (default: of the project), in order of their paths."""
    found = sorted(path for package in packages or PACKAGES for path in (ROOT / package).rglob("*.py"))
    return tuple(Module(str(path.relative_to(ROOT)), path.read_text(), ast.parse(path.read_text())) for path in found)


def imports(tree: ast.Module) -> Iterator[Import]:
    """Everything that a module imports, at its top or inside a function, statically or as `import_module("name")`."""
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    guarded = {id(inner) for guard in guards for statement in guard.body for inner in ast.walk(statement)}
    for node in (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; say the package"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__"):
            names = [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        yield from (Import(name, node.lineno, id(node) in guarded) for name in names)


def within(name: str, *packages: str) -> bool:
    """Whether a dotted name is one of the packages or lies in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def docstrings(tree: ast.Module) -> set[int]:
    """The ids of the string nodes that document something: bare strings, wherever they stand."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


@cache
def tracked() -> tuple[str, ...]:
    """Paths that are in the repository; () where there is none (an unpacked archive)."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return tuple(path for path in listed.stdout.split("\0") if path)
