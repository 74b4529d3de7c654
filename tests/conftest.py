"""Fixtures that several test modules share: free ports, a running kvd, a live peer.

A test marked `peer` compares with a live Dynamo. It needs KVD_PEER_PYTHON, an interpreter that has
`dynamo.indexer`; without it the test is skipped, and the end of the run says so.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.asking import make_certificate
from tests.support.budget import scaled
from tests.support.ports import find_free_port
from tests.support.processes import REPOSITORY, Server, clean_environment
from tests.support.publishing import Running, running_conductor

PEER_VARIABLE = "KVD_PEER_PYTHON"

# Under `nohup` this process ignores SIGHUP, and so would every process that a test starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Many container images forbid Python to write bytecode. Each daemon that a test starts would then
# compile all of kvd again, so bytecode is written after all, but outside the source tree.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.fspath(REPOSITORY / "build" / "pycache")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # `python -B` does not set it

# Every run tries the same examples, and none fails because the machine is busy.
hypothesis.settings.register_profile(
    "kvd", derandomize=True, deadline=None, max_examples=scaled(20)
)
hypothesis.settings.load_profile("kvd")

# Modules and collected tests live to the end of the run. Looking for garbage while they are loaded
# would take a quarter of that time; `pytest_collection_finish` enables it again.
gc.disable()
# Rarer than by default: syntax trees and models have many long-lived objects, which would be walked
# over and over.
COLLECT_AFTER = (10_000, 20, 20)


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that returns a loopback TCP port nobody listened on a moment ago."""
    return find_free_port


@pytest.fixture
def kvd_process(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """A function that starts a face of kvd with these flags, and waits until it is healthy.

    After the test each process must end with exit code 0 on SIGTERM, unless the test ended it.
    """
    servers: list[Server] = []

    def start(*flags: str, face: str = "indexer", environ: dict[str, str] | None = None) -> Server:
        port = find_free_port()
        command = [sys.executable, "-m", "kvd", face, "--port", str(port), *flags]
        servers.append(Server(command, tmp_path, port, clean_environment(**environ or {})))
        servers[-1].wait_healthy()
        return servers[-1]

    yield start
    ended_here = [server for server in servers if server.process.poll() is None]
    codes = [server.stop() for server in servers]
    for server, code in zip(servers, codes, strict=True):
        if server in ended_here:
            assert code == 0, f"exit code {code} on SIGTERM:\n{server.stderr}"


@pytest.fixture(scope="module")
def conductor_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A conductor for a module's tests; a module that needs other flags overrides this fixture."""
    with running_conductor(tmp_path_factory.mktemp("conductor")) as running:
        yield running


@pytest.fixture
def conductor(conductor_process: Running) -> Iterator[Running]:
    """The module's conductor, without publishers; those of the test are removed after it."""
    yield conductor_process
    conductor_process.end()


@pytest.fixture
def peer_process(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """A function that starts a service of Dynamo with these flags; waits until it is healthy."""
    servers: list[Server] = []

    def start(
        *flags: str, service: str = "indexer", environ: dict[str, str] | None = None
    ) -> Server:
        port = find_free_port()
        module = f"dynamo.{service}"
        command = [os.environ[PEER_VARIABLE], "-m", module, "--port", str(port), *flags]
        servers.append(Server(command, tmp_path, port, clean_environment(**environ or {})))
        servers[-1].wait_healthy()
        return servers[-1]

    yield start
    for server in servers:
        server.stop(signal.SIGKILL)  # it handles no gentler signal


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with cert.pem and key.pem for 127.0.0.1."""
    path = tmp_path_factory.mktemp("certificate")
    make_certificate(path)
    return path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="fail unit tests that take more CPU time than they may"
    )


def pytest_xdist_auto_num_workers() -> int:
    """Returns two workers per CPU for `-n auto`: while one waits for a daemon, another can run."""
    return 2 * (os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get(PEER_VARIABLE):
        for item in items:
            if item.get_closest_marker("peer"):
                item.add_marker(pytest.mark.skip(reason=f"{PEER_VARIABLE} is not set"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # later collections skip all objects that exist now
    gc.set_threshold(*COLLECT_AFTER)
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reason = f"{PEER_VARIABLE} is not set"
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", ())
        if reason in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.write_line(
            f"NOT COMPARED WITH A LIVE PEER: {len(skipped)} tests skipped, {reason}.", yellow=True
        )
