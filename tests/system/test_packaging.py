"""What a wheel and a source distribution hold, looked at in those that the build really makes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.processes import REPOSITORY

SOURCES = (
    "kvd",
    "kvd_core",
    "packaging",
    "systemd",
    "Makefile",
    "MANIFEST.in",
    "LICENSE",
    "README.md",
)
LOCKS = {"runtime": "dependencies", "tools": "requires"}
BUILT = ("build/flavour", "build/lib.*/kvd_core/*.so")  # and kvd_core/*.cpp
MODULES = sorted(path.stem for path in (REPOSITORY / "kvd_core").glob("*.pyx"))


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a fresh wheel and sdist, built from a copy of the tree.

    The copy brings compiled extensions along, dates kept, so that only what changed since the
    last build is compiled; of the rest of build/ nothing, as stale files would get into the wheel.
    """
    tree = tmp_path_factory.mktemp("tree")
    for name in (*SOURCES, "setup.py", "pyproject.toml"):
        copy(REPOSITORY / name, tree / name)
    for pattern in BUILT:
        for path in REPOSITORY.glob(pattern):
            copy(path, tree / path.relative_to(REPOSITORY))
    build = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
    ended = subprocess.run(
        [sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return tree / "dist"


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


@pytest.fixture(scope="session")
def wheel(distributions: Path) -> set[str]:
    (path,) = distributions.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_what_runs_and_what_types(wheel: set[str]) -> None:
    for module in MODULES:
        compiled = [name for name in wheel if name.startswith(f"kvd_core/{module}.")]
        assert sorted(Path(name).suffix for name in compiled) == [".pxd", ".pyi", ".so"], module
    assert {"kvd/py.typed", "kvd_core/py.typed", "kvd/cli/main.py"} <= wheel
    assert any(name.endswith("/licenses/LICENSE") for name in wheel)


def test_the_wheel_holds_no_sources_and_nothing_foreign(wheel: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvd", "kvd_core"}
    allowed = {".py", ".so", ".pxd", ".pyi", ".typed"}
    suffixes = {Path(name).suffix for name in wheel if ".dist-info/" not in name}
    assert suffixes <= allowed, suffixes - allowed


def test_every_python_module_is_in_the_wheel(wheel: set[str]) -> None:
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "kvd").rglob("*.py")}
    assert modules <= wheel


def test_the_source_distribution_builds_and_holds_nothing_generated(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {f"kvd_core/{module}.pyx" for module in MODULES}
    wanted |= {f"kvd_core/{path.name}" for path in (REPOSITORY / "kvd_core").glob("*.hpp")}
    wanted |= {"packaging/build", "packaging/debian/control", "systemd/kvd.service"}
    assert wanted | {"setup.py", "pyproject.toml", "Makefile", "LICENSE"} <= names
    assert not {name for name in names if name.endswith((".cpp", ".so")) or "build/" in name}


@pytest.mark.parametrize("name", LOCKS)
def test_locks_have_what_the_project_asks_for(name: str) -> None:
    """packaging/build installs nothing but these files; packaging/lock makes them anew."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    asked = {**project["project"], **project["build-system"]}[LOCKS[name]]
    text = (REPOSITORY / "packaging" / f"{name}.lock").read_text()
    entries = text.replace("\\\n", "").splitlines()[2:]
    locked = {}
    for entry in entries:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+( +--hash=sha256:[0-9a-f]{64})+", entry), entry
        package, _, version = entry.split()[0].partition("==")
        locked[package] = version
    for each in map(Requirement, asked):
        assert each.specifier.contains(locked[each.name], prereleases=True), each
    assert "://" not in text


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
@pytest.mark.parametrize("module", MODULES)
def test_extensions_are_hardened(module: str) -> None:
    if not (REPOSITORY / "build" / "flavour").read_text().startswith("release"):
        pytest.skip("not a release build")
    (path,) = (REPOSITORY / "kvd_core").glob(f"{module}.cpython-*.so")
    shown = subprocess.run(["readelf", "-dlW", path], capture_output=True, text=True, check=True)
    assert "GNU_RELRO" in shown.stdout
    assert re.search(r"\(FLAGS\).*BIND_NOW|\(BIND_NOW\)", shown.stdout), module
    assert not re.search(r"GNU_STACK.* RWE ", shown.stdout)
