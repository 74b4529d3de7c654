"""Names follow the glossary of docs/contributing.md, and lines have one maximum width."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY

GLOSSARY = REPOSITORY / "docs/contributing.md"
DEFINITION = re.compile(
    r"^\s*(?:(?:async|cdef|cpdef)\s+)*(?:class|def|cdef|cpdef)\s+(?:[\w\[\]*]+\s+)*?(\w+)\s*[(:]",
    re.MULTILINE,
)
CLASS = re.compile(r"^(?:cdef )?class ([A-Za-z]\w*)", re.MULTILINE)
# Declarations in C++ and in a .pxd: types and functions, not their calls.
DECLARATION = re.compile(
    r"^[ \t]*(?:cdef[ ]+)?(?:cppclass|class|struct|union|enum(?:[ ]class)?)[ ]+(\w+)"
    r"|^[ \t]*(?!return|else|throw|delete)(?:[\w:<>,&*]+[ ]+)+[&*]?(\w+)[(]",
    re.MULTILINE,
)
FOLDERS = ("kvd", "kvd_core", "tests", "bench", "examples", "docs", "packaging")
SOURCES = [
    path
    for folder in ("kvd", "kvd_core")
    for path in sorted((REPOSITORY / folder).rglob("*.py*"))
    if path.suffix in {".py", ".pyx", ".pyi"}
]
# Types that C++ and Cython define; indented ones are inside a class.
TYPES = {
    ".hpp": re.compile(
        r"^( *)(?:class|struct|union|enum(?: class)?) (\w+)(?: final)?(?: : [^;{()]*)? \{"
        r"|^()using (\w+) =",
        re.MULTILINE,
    ),
    ".pxd": re.compile(r"^()cdef (?:struct|union|enum) (\w+):", re.MULTILINE),
}
TYPES[".pyx"] = TYPES[".pxd"]
# A comment, a string or a name of Cython or C++.
TOKEN = re.compile(
    r'''(?:#|//)[^\n]*|"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|\b([A-Za-z_]\w*)''', re.DOTALL
)
# The same of Python. Files have a method `tell`.
PYTHON_TOKEN = re.compile(
    r"""
    \#[^\n]*
    | "{3} [^"\\]* (?: (?: \\. | "(?!"") ) [^"\\]* )* "{3}
    | '{3} [^'\\]* (?: (?: \\. | '(?!'') ) [^'\\]* )* '{3}
    | " [^"\\]* (?: \\. [^"\\]* )* "
    | ' [^'\\]* (?: \\. [^'\\]* )* '
    | \.tell\b
    | \b([A-Za-z_]\w*)
    """,
    re.DOTALL | re.VERBOSE,
)
STATS = re.compile(r"self\.(\w+)(?:: [^=\n]+)? = (?:\w+\.)?\w+Stats\(")
DECLARATIONS = [
    path
    for folder in ("kvd", "kvd_core")
    for suffix in ("hpp", "pxd")
    for path in sorted((REPOSITORY / folder).rglob(f"*.{suffix}"))
]
OTHER_SOURCES = [
    path
    for folder in FOLDERS[2:]
    for path in sorted((REPOSITORY / folder).rglob("*.*"))
    if path.suffix in {".py", ".cpp", ".hpp"}
]


def forbidden() -> set[str]:
    """Returns the words in the first column of the glossary's table of overloaded words."""
    (table,) = re.findall(
        r"^\| not \| but \|\n\|---\|---\|\n((?:\|.*\n)+)", GLOSSARY.read_text(), re.M
    )
    return {
        word.strip() for row in table.splitlines() for word in row.split("|")[1].split(",") if word
    }


@cache
def words(name: str) -> set[str]:
    """Returns the words of a name in snake_case or CamelCase."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def definitions(text: str, suffix: str) -> list[str]:
    """Returns the names of the classes and functions of a file."""
    if suffix in {".hpp", ".pxd"}:
        return [kind or function for kind, function in DECLARATION.findall(text)]
    return DEFINITION.findall(text)


def everywhere() -> dict[str, set[str]]:
    """Returns, by folder, the words that no name in it may have, from the table after that one."""
    (table,) = re.findall(
        r"^\| in no name of \| not \| but \|\n\|---\|---\|---\|\n((?:\|.*\n)+)",
        GLOSSARY.read_text(),
        re.M,
    )
    found: dict[str, set[str]] = {}
    for row in table.splitlines():
        _, folders, not_these, *_ = row.split("|")
        for folder in re.findall(r"`(\w+)`", folders) or FOLDERS:
            found.setdefault(folder, set()).update(re.findall(r"\w+", not_these))
    return found


def names_in(path: Path) -> set[str]:
    """Returns the names that a file defines or uses, but not those of tests, which are sentences.

    Names in f-strings are left out: they are defined elsewhere.
    """
    token = PYTHON_TOKEN if path.suffix in {".py", ".pyi"} else TOKEN
    names = set(token.findall(path.read_text()))
    return {name for name in names if not name.startswith("test_")}


def test_definitions_have_no_overloaded_words() -> None:
    overloaded = forbidden()
    for path in SOURCES + DECLARATIONS:
        names = definitions(path.read_text(), path.suffix)
        assert not {name for name in names if words(name) & overloaded}, path


@pytest.mark.slow("reads every name of the tree")
def test_names_have_no_vague_words() -> None:
    """`kvd.client` is exempt: its names are for those who write programs with it."""
    vague = everywhere()
    for path in SOURCES + DECLARATIONS + OTHER_SOURCES:
        folder, beside, *_ = path.relative_to(REPOSITORY).parts
        if (folder, beside) != ("kvd", "client") and any(
            map(path.read_text().lower().count, vague[folder])
        ):
            assert not {name for name in names_in(path) if words(name) & vague[folder]}, path


def test_a_name_is_of_one_class() -> None:
    """A C++ class may share the name of the class that wraps it, and each face has its handlers.

    `kvd.client` is exempt: its names are for those who write programs with it.
    """
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        place = path.relative_to(REPOSITORY)
        if path.suffix != ".pyi" and path.stem != "handlers" and place.parts[1] != "client":
            for name in CLASS.findall(path.read_text()):
                found.setdefault(name, []).append(str(place))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_a_name_is_of_one_type() -> None:
    """C++ types, their aliases and Cython structs, also those in classes: `Trace::RankHistory`.

    Only `Entry`, of a class's table, and `Hash`, of its keys, may recur inside classes, where they
    are read together with their class. A file may have two forms of a type, by `#if`.
    """
    found: dict[str, set[str]] = {}
    for path in DECLARATIONS + SOURCES:
        if path.suffix in TYPES:
            for indent, *names in TYPES[path.suffix].findall(path.read_text()):
                name = "".join(names)
                is_helper = indent and name in {"Entry", "Hash"}
                found.setdefault(name, set()).add("in classes" if is_helper else str(path))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_stats_are_called_so() -> None:
    """Only `ingest` has another name, which the core uses, too."""
    for path in SOURCES:
        names = {name for name in STATS.findall(path.read_text()) if "stats" not in words(name)}
        assert names <= {"ingest"}, path


def test_lines_of_other_languages_are_as_wide_as_those_of_python() -> None:
    """clang-format leaves comments as they are, since it would break pictures."""
    width = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["ruff"][
        "line-length"
    ]
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for folder in ("kvd", "kvd_core", "bench", "tests")
        for suffix in ("hpp", "cpp", "js", "css")
        for path in sorted((REPOSITORY / folder).rglob(f"*.{suffix}"))
        if not path.with_suffix(".pyx").exists()  # generated by Cython
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > width
    ]
    assert found == []


def test_what_is_a_definition() -> None:
    text = (
        "class Desk:\n    async def follow_it(self):\n    cdef int _turn(self, int64_t budget):\n"
    )
    assert definitions(text, ".py") == ["Desk", "follow_it", "_turn"]
    text = "struct Tally {\n  Rank& find(int id) const {\n    return lane(id);\n"
    assert definitions(text, ".hpp") == ["Tally", "find"]
    assert definitions("    cppclass CTally:\n        void lend(int)\n", ".pxd") == [
        "CTally",
        "lend",
    ]
    assert words("_followHTTPDesk") == {"follow", "http", "desk"}
    assert {"desk", "tend"} <= forbidden()
