"""Daemons to be diagnosed, one for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.patients import Patient, running_patient
from tests.support.ports import find_free_port
from tests.support.processes import Server

STALE_S = 0.3  # until a silent engine is said to be so


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str]]]:
    flags = (
        f"--engine-stale-s={STALE_S}",
        "--engine-connect-timeout-s=0.5",
        "--replay-idle-s=0.2",
        "--replay-spare-s=0",
        "--session-affinity-ttl-secs=60",
        f"--replica-sync-port={find_free_port()}",
    )
    with running_patient(tmp_path_factory.mktemp("kvd"), *flags) as running:
        yield running


@pytest.fixture
def patient(daemon: tuple[Server, dict[str, str]]) -> Iterator[Patient]:
    """The daemon without engines."""
    with ExitStack() as opened:
        made = Patient(*daemon, opened)
        yield made
        made.empty()
