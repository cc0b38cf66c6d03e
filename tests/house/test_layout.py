"""The top level, rule 7 (sizes), names of files, and words that have no place in the repository."""

from __future__ import annotations

import re
import sys

import pytest

from tests.house.source import PACKAGES, ROOT, functions, modules, tracked

TOP = {*PACKAGES, "tests", "docs", "pyproject.toml", "Makefile", "README.md", "LICENSE"}
FILE, FUNCTION = 400, 90
"""Lines at which a file or function is too large to be passed over; about 300 and 60 is what reads well."""

needs_git = pytest.mark.skipif(not tracked(), reason="not a git checkout")


@needs_git
def test_the_top_level_is_as_designed() -> None:
    top = {path.split("/")[0] for path in tracked()}
    assert {name for name in top if not name.startswith(".")} == TOP
    assert ".ci" in top


def test_files_and_functions_have_a_size_that_reads_well() -> None:
    long = [f"{module.path} {len(module.text.splitlines())}" for module in modules() if len(module.text.splitlines()) > FILE]
    for module in modules():
        sizes = [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions(module.tree)]
        long += [f"{module.path} {name} {size}" for name, size in sizes if size > FUNCTION]
    assert long == []


def test_no_file_bears_the_name_of_a_standard_module() -> None:
    names = {path.stem for package in (*PACKAGES, "tests") for path in (ROOT / package).rglob("*.py")} - {"__init__"}
    folders = {path.name for package in (*PACKAGES, "tests") for path in (ROOT / package).rglob("*") if path.is_dir()}
    assert (names | folders | set(PACKAGES)) & sys.stdlib_module_names == set()


def test_tests_mirror_the_source_and_are_no_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= {*PACKAGES, "house", "e2e", "operate", "gpu", "bench", "chaos"}


# Spelled in pieces, so that this file does not contain what it looks for.
REGISTRIES = [name + ".org" for name in ("pypi", "pythonhosted", "registry.npmjs", "deb.debian", "anaconda")]
MACHINE = re.compile(r"(?<![\w.~/-])/(?:work|root|opt|home/\w+|Users/\w+)/")


@needs_git
def test_no_registry_host_and_no_path_of_one_machine() -> None:
    found = []
    for path in tracked():
        try:
            text = (ROOT / path).read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        found += [f"{path}: {host}" for host in REGISTRIES if host in text]
        if path != "tests/house/test_layout.py":
            found += [f"{path}: {match[0]}" for match in MACHINE.finditer(text)]
    assert found == []


@needs_git
def test_the_one_address_that_set_up_falls_back_to_stands_in_one_file() -> None:
    host = ".".join(("download", "pytorch", "org"))
    code = [path for path in tracked() if path.endswith((".py", ".toml", ".txt", "Makefile")) and (ROOT / path).exists()]
    assert [path for path in code if host in (ROOT / path).read_text()] == [".ci/setup.py"]
