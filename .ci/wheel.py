"""Builds kvd as users get it and tries it: a source distribution, a wheel of it, an installation.

All of this happens in a temporary folder, so that no file of the tree is found by accident.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import venv
import zipfile
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
PACKAGES = ("kvd", "kvd_core")
START_DEADLINE_S = 60.0
BUILD_SDIST = "import sys; from setuptools import build_meta as b; b.build_sdist(sys.argv[1])"
IMPORT_ALL = """
import importlib, pkgutil
count = 0
for package in ("kvd", "kvd_core"):
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not found.name.endswith(".__main__"):
            importlib.import_module(found.name)
            count += 1
print(count, "modules imported")
"""
PAGE = "ui/files/*"
FACES = ("indexer", "slot-tracker", "selection", "conductor")


def files(pattern: str) -> set[str]:
    return {
        str(path.relative_to(TREE))
        for package in PACKAGES
        for path in (TREE / package).rglob(pattern)
        if path.is_file()
    }


def run(*command: str | Path, cwd: Path) -> str:
    """Returns the output of a command; exits with that output if the command fails."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
    ended = subprocess.run(
        command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if ended.returncode:
        sys.exit(f"{' '.join(map(str, command))}:\n{ended.stdout[-4000:]}")
    return ended.stdout


def check(condition: object, complaint: str) -> None:
    if not condition:
        sys.exit(complaint)


def build_sdist(folder: Path) -> Path:
    """Builds a source distribution and returns the folder where it is unpacked."""
    run(sys.executable, "-c", BUILD_SDIST, folder, cwd=TREE)
    (archive,) = folder.glob("*.tar.gz")
    run("tar", "-x", "-f", archive, "-C", folder, cwd=folder)  # tarfile of 3.11.2 has no filters
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = files("*.pyx") | files("*.pxd") | files("*.pyi") | files("*.hpp") | files("*.py")
    wanted |= {"packaging/build", "packaging/debian/control", "systemd/kvd.service", "setup.py"}
    wanted |= {"pyproject.toml", "Makefile", "LICENSE", "CHANGELOG.md", ".clang-format"}
    wanted |= files(PAGE)
    check(wanted <= names, f"not in the source distribution: {wanted - names}")
    generated = {name for name in names if name.endswith(".so") or name.startswith("build/")}
    generated |= names & {name.replace(".pyx", ".cpp") for name in files("*.pyx")}
    check(not generated, f"generated, and in the source distribution: {generated}")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


def build_wheel(source: Path, folder: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    options = ("--no-build-isolation", "--no-deps", "--wheel-dir", folder)
    run(*pip, "wheel", *options, source, cwd=folder)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    compiled = {re.sub(r"\.cpython-[^/]*\.so$", ".pyx", name) for name in names if ".so" in name}
    check(compiled == files("*.pyx"), f"compiled modules: {compiled ^ files('*.pyx')}")
    wanted = files("*.py") | files("*.pyi") | files("*.pxd") | files("py.typed")
    wanted |= files(PAGE)
    check(wanted <= names, f"not in the wheel: {wanted - names}")
    check(any(name.endswith("/licenses/LICENSE") for name in names), "no license in the wheel")
    extra = {
        name for name in names - wanted if not re.search(r"\.so$|^kvd-[^/]*\.dist-info/", name)
    }
    check(not extra, f"should not be in the wheel: {extra}")
    return path


def wait_healthy(server: subprocess.Popen[bytes], port: int) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        check(server.poll() is None, f"kvd serve ended with {server.returncode}")
        check(time.monotonic() < deadline, "kvd serve does not answer")
        try:
            with opener.open(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                return check(answer.status == 200, f"/health: {answer.status}")
        except urllib.error.URLError:  # not yet
            time.sleep(0.05)


def serve(kvd: Path, folder: Path) -> None:
    """Runs all faces until each has answered /health, and stops them."""
    sys.path.insert(0, str(TREE))
    from tests.support.ports import find_free_port

    ports = {face: find_free_port() for face in FACES}
    flags = [f"--{face}-bind=127.0.0.1:{port}" for face, port in ports.items()]
    server = subprocess.Popen([kvd, "serve", *flags], cwd=folder)
    try:
        for port in ports.values():
            wait_healthy(server, port)
    finally:
        server.terminate()
    code = server.wait(START_DEADLINE_S)
    check(code == 0, f"kvd serve ended with {code} on SIGTERM")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist, empty = folder / "dist", folder / "empty"
        dist.mkdir()
        empty.mkdir()
        wheel = build_wheel(build_sdist(dist), dist)
        venv.create(folder / "venv", with_pip=True)
        commands = folder / "venv" / "bin"
        quiet = ("-qq", "--disable-pip-version-check")
        run(commands / "python", "-m", "pip", *quiet, "install", f"{wheel}[client]", cwd=empty)
        print(wheel.name, run(commands / "kvd", "--version", cwd=empty), end="")
        print(run(commands / "python", "-c", IMPORT_ALL, cwd=empty), end="")
        serve(commands / "kvd", empty)
        print("all faces answer /health")


main()
