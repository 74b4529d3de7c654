"""Imports point downward only: a module may use those of lower layers and of its own package."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY

# From the top down. A package may use those of lower rows, and of its own row if that makes no
# circle. `kvd.client` is for other programs: no package here uses it. `__main__` belongs to the
# command line. The last row has modules that every package may use.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("kvd.client", "kvd.__main__", "kvd.cli"),
    ("kvd.app",),
    (
        *("kvd.fleet_file", "kvd.faces", "kvd.replica_sync", "kvd.replay", "kvd.persistence"),
        *("kvd.shared_state", "kvd.diagnosis"),
    ),
    ("kvd.config",),
    ("kvd.gateway", "kvd.http", "kvd.net"),
    ("kvd.selection", "kvd.slots", "kvd.index"),
    ("kvd.wire", "kvd.platform", "kvd.telemetry"),
    ("kvd.model", "kvd.errors", "kvd._version"),
)
HEIGHT = {name: -depth for depth, names in enumerate(LAYERS) for name in names}

# Packages that must not touch the outside world, with the modules that they must not import.
IO = {"trio", "zmq", "socket", "quart", "quart_trio", "ssl", "httptools", "subprocess"}
FORBIDDEN = {
    "kvd.wire": IO | {"time", "datetime", "logging", "os", "kvd.telemetry.logs"},
    "kvd.faces": (IO - {"trio"}) | {"time", "datetime", "os"},  # trio: long walks checkpoint
    "kvd.index.partitions": {"time", "datetime", "os", "quart", "ssl"},
    "kvd.model": IO | {"time", "datetime", "logging", "os"},
    "kvd.errors": IO | {"time", "datetime", "logging", "os"},
}


def modules() -> dict[str, Path]:
    """Returns every module of kvd by its dotted name."""
    found = {}
    for path in sorted((REPOSITORY / "kvd").rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Returns all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[str]:
    """Yields the names that a file imports, submodules by their full name."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def package(module: str) -> str:
    """Returns the entry of LAYERS that a module belongs to."""
    return ".".join(module.split(".")[:2])


@cache
def package_imports() -> dict[str, set[str]]:
    """Returns the packages that each package uses."""
    found: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        own = package(module)
        used = {package(each) for each in imports(path) if each in MODULES and each != "kvd"}
        found.setdefault(own, set()).update(used - {own})
    return found


def test_there_is_a_place_for_every_package() -> None:
    assert {package(module) for module in MODULES} - {"kvd"} == set(HEIGHT)


def test_packages_use_no_higher_ones() -> None:
    higher = {
        (own, each)
        for own, used in package_imports().items()
        for each in used
        if own != "kvd" and HEIGHT[each] > HEIGHT[own]
    }
    assert not higher


def test_no_package_uses_itself_by_way_of_others() -> None:
    found = package_imports()
    TopologicalSorter(found).prepare()  # raises CycleError, which names the circle


def test_no_module_uses_itself_by_way_of_others() -> None:
    """Not even for annotations: what two modules need of each other belongs into a third."""
    found = {
        module: {each for each in imports(path) if each in MODULES and each not in ("kvd", module)}
        for module, path in MODULES.items()
    }
    TopologicalSorter(found).prepare()


def test_only_the_daemon_uses_the_routes_of_a_face() -> None:
    """What others need of a face, such as how it reads a registration, is not in its routes."""
    for module, path in MODULES.items():
        used = {each for each in imports(path) if re.fullmatch(r"kvd\.faces\.\w+\.routes", each)}
        own = f"{module.rpartition('.')[0]}.routes"
        assert package(module) == "kvd.app" or used <= {own}, module


@cache
def methods() -> set[str]:
    """Returns the names of all functions that are called as methods."""
    found = {
        node.name
        for path in MODULES.values()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list
    }
    return found | {"__len__"}


def assigned_functions(path: Path) -> Iterator[str]:
    """Yields assignments of functions to attributes of other objects."""
    for node in nodes(path):
        if not isinstance(node, ast.Assign):
            continue
        value = node.value
        is_function = isinstance(value, ast.Lambda) or (
            isinstance(value, ast.Call) and ast.unparse(value.func) == "partial"
        )
        for target in node.targets:
            if not isinstance(target, ast.Attribute) or ast.unparse(target.value) == "self":
                continue
            # A copied setting keeps its name, which may also be that of a method elsewhere.
            is_method = isinstance(value, ast.Attribute) and value.attr in methods() - {target.attr}
            if is_function or is_method:
                yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def kept_functions(path: Path) -> Iterator[str]:
    """Yields methods that keep a function passed to them, except those that subscribe it."""
    for node in nodes(path):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = {
            each.arg
            for each in (*node.args.args, *node.args.kwonlyargs)
            if each.annotation is not None and names(each.annotation) & function_types()
        }
        if not given or node.name in ("__init__", "subscribe"):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign) and names(inner.value) & given:
                targets = [each for each in inner.targets if isinstance(each, ast.Attribute)]
                if any(ast.unparse(each.value) == "self" for each in targets):
                    yield f"{path.name}:{inner.lineno}: {node.name}: {ast.unparse(inner)}"


def names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


@cache
def function_types() -> set[str]:
    """Returns `Callable`, and the names of type aliases for it."""
    return {"Callable"} | {
        target.id
        for path in MODULES.values()
        for node in nodes(path)
        if isinstance(node, ast.Assign) and "Callable" in names(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


@pytest.mark.parametrize("ways", [assigned_functions, kept_functions])
def test_what_a_part_calls_comes_through_its_constructor_or_a_subscription(
    ways: Callable[[Path], Iterator[str]],
) -> None:
    """A function that is set from outside is a dependency that no import or signature shows."""
    assert [each for path in MODULES.values() for each in ways(path)] == []


PRIVATE_NAMES = REPOSITORY / "docs/decisions/2026-11-22-private-names-and-library-internals.md"
PUBLIC = {"_asdict", "_exit", "_fields", "_replace"}  # documented, despite their names
PRIVATE = re.compile(r"(?<!\w)_[A-Za-z]\w*(?<!__)\b")
CYTHON = [
    path
    for package in ("kvd", "kvd_core")
    for path in sorted((REPOSITORY / package).rglob("*.p[xy][dx]"))
]
# Code that defines names in Cython: declarations, assignments and loops.
MADE = re.compile(r"^\s*(?:cdef|cpdef|def|class|for)\b.*|\w+(?=\s*=[^=])", re.MULTILINE)


@cache
def cython(path: Path) -> str:
    """Returns the code of a file, without comments and strings."""
    return re.sub(r'""".*?"""|"[^"\n]*"|#[^\n]*', "", path.read_text(), flags=re.DOTALL)


def own_names(paths: Iterable[Path]) -> set[str]:
    """Returns the names that these files define."""
    own = {name for module in MODULES for name in module.split(".")}
    for path in paths:
        if path in CYTHON:
            own.update(*(PRIVATE.findall(line) for line in MADE.findall(cython(path))))
            continue
        for node in nodes(path):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    own.add(name)
                case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(value=ast.Name(), attr=name, ctx=ast.Store()):
                    own.add(name)
    return own


def used_names(path: Path) -> Iterator[str]:
    """Yields the private names that a file uses of other modules, also in dotted strings."""
    if path in CYTHON:
        yield from PRIVATE.findall(cython(path))
        return
    for node in nodes(path):
        match node:
            case ast.Attribute(attr=name) | ast.alias(name=name):
                yield from name.split(".")
            case ast.Constant(value=str(text)) if re.fullmatch(r"\w+(\.\w+)+", text):
                yield from text.split(".")


def listed_names() -> Iterator[tuple[list[Path], set[str]]]:
    """Yields the files and the private names of each row of the list."""
    for line in PRIVATE_NAMES.read_text().splitlines():
        if line.startswith("| `"):
            _, places, depends, *_ = line.split("|")
            paths = [REPOSITORY / each for each in re.findall(r"`(.+?)`", places)]
            yield paths, set(PRIVATE.findall(depends))


@pytest.mark.slow("reads each name in every module")
def test_private_names_of_libraries_are_in_the_row_of_their_file() -> None:
    listed: dict[Path, set[str]] = {path: set() for path in (*MODULES.values(), *CYTHON)}
    for paths, names in listed_names():
        texts = [path.read_text() for path in paths]
        assert not {name for name in names if not any(name in text for text in texts)}, paths
        for path in paths:
            if path.suffix != ".hpp":
                listed.setdefault(path, set()).update(names)
    allowed = own_names(listed) | PUBLIC
    for path, names in listed.items():
        used = {name for name in used_names(path) if PRIVATE.fullmatch(name)}
        assert used <= allowed | names, path


@pytest.mark.parametrize("package", FORBIDDEN)
def test_pure_packages_stay_pure(package: str) -> None:
    for module, path in MODULES.items():
        if module == package or module.startswith(f"{package}."):
            used = {name for target in imports(path) for name in (target, target.split(".")[0])}
            assert not used & FORBIDDEN[package], f"{module} imports {used & FORBIDDEN[package]}"


def test_what_is_imported_is_installed() -> None:
    """Tests have more packages installed than users, and kvd must not need those."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    of_clients = distributions(project["optional-dependencies"]["client"])
    known = distributions(project["dependencies"]) | {"kvd", "kvd_core"} | sys.stdlib_module_names
    for module, path in MODULES.items():
        used = {each.partition(".")[0] for each in imports(path)}
        assert not used - known - (of_clients if package(module) == "kvd.client" else set()), module


def distributions(declared: list[str]) -> set[str]:
    """Returns the modules of requirements, without their versions."""
    names = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in declared}
    return {"zmq" if name == "pyzmq" else name for name in names}


def test_the_client_and_the_daemon_need_nothing_of_each_other() -> None:
    """The client imports kvd's compiled hashes, and none of the code that answers."""
    assert not [own for own, used in package_imports().items() if "kvd.client" in used]
    used = {
        each
        for module, path in MODULES.items()
        if package(module) == "kvd.client"
        for each in imports(path)
        if each.startswith("kvd")
    }
    others = {each for each in used if package(each) != "kvd.client"}
    assert others == {"kvd._version", "kvd_core.base.hashing"}


def test_who_knows_the_wall_clock() -> None:
    """Deadlines, expiry and backoff must not use a clock that can be set.

    Log lines and answers show the wall clock. Versions of session bindings and lines of the
    decision log begin with it; the daemon passes it on for them. After a reboot it alone shows how
    long a restart took.
    """
    wall = re.compile(
        r"\btime\.time(_ns)?\b|\bfrom time import .*\btime\b|\bdatetime\b|gmtime|localtime"
    )
    using = {module for module, path in MODULES.items() if wall.search(path.read_text())}
    shown = {"kvd.telemetry.logs", "kvd.http.front"}
    assert using == {*shown, "kvd.app.assembly", "kvd.persistence.clocks"}
    assembly = MODULES["kvd.app.assembly"].read_text()
    assert wall.findall(assembly) == ["_ns"] * 2  # to Selections and to the decision log
    assert "time.time_ns,\n" in assembly and "writer, time.time_ns, " in assembly


def test_the_examples_use_kvd_from_outside() -> None:
    for path in (REPOSITORY / "examples").rglob("*.py"):
        used = {name.split(".")[0] for name in imports(path) if name != "kvd.client"}
        assert not used & {"kvd", "kvd_core"}, path


CORE_SOURCES = [
    path
    for path in sorted((REPOSITORY / "kvd_core").rglob("*"))
    if path.suffix in {".py", ".pyx", ".pxd", ".pyi"}
]
# The drain receives from pyzmq's sockets, so it imports pyzmq.
MEETS_IO = {"drain"}


def test_the_core_stands_alone() -> None:
    line = re.compile(r"^\s*(?:c?import|from)\s+(\w+)", re.MULTILINE)
    for path in CORE_SOURCES:
        banned = {"kvd"} if path.stem in MEETS_IO else {"kvd", "logging", "time"} | IO
        assert not banned & set(line.findall(path.read_text())), path
