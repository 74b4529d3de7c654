"""Imports point downward only: a module may use those of lower layers and of its own package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import REPOSITORY

# From the top down. A module belongs to the entry that names it or its nearest package.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("kvd.__main__",),
    ("kvd.cli",),
    ("kvd.daemon",),
    ("kvd.services", "kvd.replicating"),
    (
        "kvd.serving",
        "kvd.reloading",
        "kvd.status",
        "kvd.fleet",
        "kvd.room",
        "kvd.memory",
        "kvd.unmatched",
        "kvd.control",
    ),
    ("kvd.config", "kvd.demo", "kvd.desks"),
    ("kvd.configfile", "kvd.configpage", "kvd.tokens", "kvd.fleetfile"),
    ("kvd.settings",),
    ("kvd.parsers",),
    ("kvd.http", "kvd.net", "kvd.faces"),
    ("kvd.selection", "kvd.publishers"),
    ("kvd.registry", "kvd.restore", "kvd.peers", "kvd.replicas", "kvd.slots", "kvd.catalog"),
    ("kvd.metrics",),
    ("kvd.state", "kvd.scheduling", "kvd.ledgers"),
    ("kvd.wire", "kvd.http.types", "kvd.logs", "kvd.descriptors", "kvd.signals"),
    ("kvd.model", "kvd.errors", "kvd.outlet", "kvd.toml", "kvd._version"),
)
HEIGHT = {name: -depth for depth, names in enumerate(LAYERS) for name in names}

# Packages that must not touch the outside world, and what that means for each.
IO = {"trio", "zmq", "socket", "quart", "quart_trio", "ssl", "httptools", "subprocess"}
FORBIDDEN = {
    "kvd.wire": IO | {"time", "datetime", "logging", "os", "kvd.logs"},
    "kvd.faces": (IO - {"trio"}) | {"time", "datetime", "os"},  # trio: long walks checkpoint
    "kvd.scheduling": IO | {"time", "datetime", "logging", "os", "kvd.logs"},
    "kvd.state": {"time", "datetime", "os", "quart", "ssl"},
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


def imports(path: Path) -> Iterator[str]:
    """Yields what a file imports, submodules by their full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def entry(module: str) -> str | None:
    """Returns the line of LAYERS that a module belongs to."""
    while module and module not in HEIGHT:
        module = module.rpartition(".")[0]
    return module or None


@pytest.mark.parametrize("module", [name for name in MODULES if name != "kvd"])
def test_imports_point_downward(module: str) -> None:
    own = entry(module)
    assert own, f"{module} belongs to no layer: give it a place in LAYERS"
    for target in imports(MODULES[module]):
        if target.split(".")[0] != "kvd" or target == "kvd":
            continue
        other = entry(target)
        assert other, f"{target} belongs to no layer"
        same_package = own.split(".")[:2] == other.split(".")[:2]
        # names of one layer stand side by side and do not meet
        assert same_package or HEIGHT[other] < HEIGHT[own], f"{module} imports {target}"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_pure_packages_stay_pure(package: str) -> None:
    for module, path in MODULES.items():
        if module == package or module.startswith(f"{package}."):
            used = {name for target in imports(path) for name in (target, target.split(".")[0])}
            assert not used & FORBIDDEN[package], f"{module} imports {used & FORBIDDEN[package]}"


def test_who_knows_the_wall_clock() -> None:
    """Deadlines, expiry and backoff must not follow a clock that somebody sets.

    Log lines show it, versions of session bindings begin with it, which the daemon passes on for,
    and the demo's engines put it into their batches, as engines do.
    """
    wall = re.compile(
        r"\btime\.time(_ns)?\b|\bfrom time import .*\btime\b|\bdatetime\b|gmtime|localtime"
    )
    using = {module for module, path in MODULES.items() if wall.search(path.read_text())}
    assert using == {"kvd.logs", "kvd.demo.fleet", "kvd.daemon"}
    daemon = MODULES["kvd.daemon"].read_text()
    assert len(wall.findall(daemon)) == 1 and "time.time_ns,\n" in daemon  # to Selections


CORE_SOURCES = [
    path
    for path in sorted((REPOSITORY / "kvd_core").iterdir())
    if path.suffix in {".py", ".pyx", ".pxd", ".pyi"}
]
# Two modules of the core meet IO. The drain receives from sockets that pyzmq owns, so it imports
# that; the lane serves clients' connections by system calls, so it imports nothing.
MEETS_IO = {"drain"}


@pytest.mark.parametrize("path", CORE_SOURCES, ids=lambda path: path.name)
def test_the_core_stands_alone(path: Path) -> None:
    banned = {"kvd"} if path.stem in MEETS_IO else {"kvd", "logging", "time"} | IO
    line = re.compile(r"^\s*(?:c?import|from)\s+(\w+)", re.MULTILINE)
    assert not banned & set(line.findall(path.read_text()))
