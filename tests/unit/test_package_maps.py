"""Each package's docstring is its map: it names every module of the package, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.processes import REPOSITORY

SUFFIXES = {".py", ".pyx", ".pxd", ".hpp"}
UNNAMED = {"__init__", "__main__", "_version"}
PACKAGES = [
    path.parent
    for room in ("kvd", "kvd_core", "tests/support")
    for path in (REPOSITORY / room).rglob("__init__.py")
]
# A line of a map begins with names, `journal` or `trie.hpp, rank_refs.hpp`, and two spaces.
NAME = r"[a-z]\w*(?:\.\w+)?"
LINE = re.compile(rf"^ {{0,4}}({NAME}(?:, {NAME})*)(?:  +\S.*)?$", re.MULTILINE)


def map_of(package: Path) -> str:
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""


def rooms(package: Path) -> set[str]:
    """Returns the names of a package's modules and packages."""
    modules = {path.stem for path in package.iterdir() if path.suffix in SUFFIXES}
    return {path.parent.name for path in package.glob("*/__init__.py")} | modules - UNNAMED


def test_a_package_names_its_modules() -> None:
    for package in PACKAGES:
        listed = {name for line in LINE.findall(map_of(package)) for name in line.split(", ")}
        assert rooms(package) - {name.partition(".")[0] for name in listed} == set(), package
        assert listed - rooms(package) - {path.name for path in package.iterdir()} == set(), package
