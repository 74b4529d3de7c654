"""The locks of packages fit the project, extensions are hardened; `.ci/wheel.py` tries a wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.processes import REPOSITORY

LOCKS = {"runtime": "dependencies", "tools": "requires"}
EXTENSIONS = [
    path.relative_to(REPOSITORY).with_suffix("")
    for package in ("kvd", "kvd_core")
    for path in sorted((REPOSITORY / package).rglob("*.pyx"))
]


@pytest.mark.parametrize("name", LOCKS)
def test_locks_have_what_the_project_asks_for(name: str) -> None:
    """packaging/build installs only what these files list; packaging/lock writes them anew."""
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
def test_extensions_are_hardened() -> None:
    if not (REPOSITORY / "build" / "flavour").read_text().startswith("release"):
        pytest.skip("not a release build")
    for extension in EXTENSIONS:
        (path,) = REPOSITORY.glob(f"{extension}.cpython-*.so")
        command = ["readelf", "-dlW", path]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "GNU_RELRO" in shown, path
        assert re.search(r"\(FLAGS\).*BIND_NOW|\(BIND_NOW\)", shown), path
        assert not re.search(r"GNU_STACK.* RWE ", shown), path


# A compiler that knows all headers and compiles nothing.
PROBED_ONLY = """#!/bin/sh
case " $* " in *" -fsyntax-only "*) exit 0;; *) exit 1;; esac
"""
PROJECT = """
[project]
name = "kvd"
version = "1"
[tool.setuptools]
packages = ["kvd"]
"""


def test_an_editable_installation_takes_what_is_built_in_place(tmp_path: Path) -> None:
    """`make` builds in place first, and then installs kvd, without building it once more."""
    shutil.copy(REPOSITORY / "setup.py", tmp_path)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "kvd").mkdir()
    (tmp_path / "kvd/__init__.py").touch()
    (tmp_path / "kvd/one.pyx").write_text("cdef int one = 1\n")
    compiler = tmp_path / "compiler"
    compiler.write_text(PROBED_ONLY)
    compiler.chmod(0o755)
    install = "from setuptools import build_meta; build_meta.build_editable('.')"
    for command, environ in (
        (["setup.py", "-q", "build_ext", "--inplace"], {}),
        (["-c", install], {"CC": str(compiler), "CXX": str(compiler)}),
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("kvd/one.*.so")) and list(tmp_path.glob("kvd-1-*.whl"))
