"""A daemon to be diagnosed, shared by all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.patients import Patient, running_patient
from tests.support.ports import find_free_port
from tests.support.processes import Server

STALE_S = 0.3  # until a silent engine counts as stale
FLAGS = (
    f"--engine-stale-s={STALE_S}",
    "--engine-connect-timeout-s=0.5",
    "--replay-idle-s=0.2",
    "--replay-spare-s=0",
)


@pytest.fixture(scope="module")
def daemon(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Server, dict[str, str]]]:
    """A daemon with the module's FLAGS, if it has some; else with those above."""
    flags = getattr(request.module, "FLAGS", FLAGS)
    replicas = f"--replica-sync-port={find_free_port()}"
    folder = tmp_path_factory.mktemp("kvd")
    with running_patient(folder, *flags, replicas, "--session-affinity-ttl-secs=60") as running:
        yield running


@pytest.fixture
def patient(daemon: tuple[Server, dict[str, str]]) -> Iterator[Patient]:
    """The module's daemon, without engines; those of the test are unregistered after it."""
    with ExitStack() as opened:
        made = Patient(*daemon, opened)
        yield made
        made.empty()
