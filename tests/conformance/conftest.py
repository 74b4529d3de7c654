"""The daemon that all scenarios share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import httpx
import pytest
from processes import Server, clean_environment, find_free_port

from .steps import Target

KVD = [sys.executable, "-m", "kvd", "indexer"]
# No scenario looks at the pause before recovery; all that have peers would wait for it.
SPAWNED = ["env", "KVD_RECOVERY_DELAY_S=0", *KVD]


@pytest.fixture(scope="session")
def kvd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A kvd that is started once."""
    port = find_free_port()
    command = [*KVD, "--port", str(port)]
    server = Server(command, tmp_path_factory.mktemp("kvd"), port, clean_environment())
    try:
        server.wait_healthy()
        yield Target(server.base_url, spawn_command=SPAWNED)
    finally:
        code = server.stop()
    assert code == 0, server.stderr


@pytest.fixture(scope="session")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False) as made:
        yield made
