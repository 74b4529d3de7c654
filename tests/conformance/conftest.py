"""The daemons that all scenarios share, one per face."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.conformance.steps import Target
from tests.support.documented import documented
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server, clean_environment

COMMANDS = {
    "indexer": "indexer",
    "slot_tracker": "slot-tracker",
    "selection": "select-service",
    "conductor": "conductor",
}
FACES = {"slot_tracker": "slot-tracker"}  # the daemon's names, where they differ
# No scenario tests the pause before recovery, and all that have peers would wait for it.
SPAWN_ENVIRON = {"KVD_RECOVERY_DELAY_S": "0"}


@pytest.fixture(scope="session")
def kvd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Target]]:
    """Returns the kvd of a face, started when it is first asked for."""
    with ExitStack() as started:

        @cache
        def of(face: str) -> Target:
            folder = tmp_path_factory.mktemp(face)
            command = [sys.executable, "-m", "kvd", COMMANDS[face]]
            target = started.enter_context(_running(command, folder))
            return replace(target, untrue=documented(FACES.get(face, face)).untrue)

        yield of


@contextmanager
def _running(command: list[str], folder: Path) -> Iterator[Target]:
    port = find_free_port()
    server = Server([*command, "--port", str(port)], folder, port, clean_environment())
    try:
        server.wait_healthy()
        yield Target(server.base_url, spawn_command=command, spawn_environ=SPAWN_ENVIRON)
    finally:
        code = server.stop()
    assert code == 0, server.stderr


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    with Client() as made:
        yield made
