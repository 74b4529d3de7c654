"""The API of every face, scenario by scenario, against a running kvd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conformance.packed import PackedDialect
from tests.conformance.runner import Scenario, load_all, play
from tests.conformance.steps import Target
from tests.support.http_client import Client

SCENARIOS = load_all(Path(__file__).parent.glob("*/*.json"))


@pytest.mark.parametrize(
    "scenario", SCENARIOS, ids=lambda scenario: f"{scenario.face}-{scenario.name}"
)
def test_scenario(scenario: Scenario, kvd: Callable[[str], Target], client: Client) -> None:
    play(scenario, kvd(scenario.face), client)


# None of their requests can be translated: they have salts in registrations, or no body at all.
NEVER_PACKED = ("seed_register_unregister", "methods")
CONDUCTOR = [scenario for scenario in SCENARIOS if scenario.face == "conductor"]


@pytest.mark.parametrize("scenario", CONDUCTOR, ids=lambda scenario: scenario.name)
def test_scenario_in_msgpack(
    scenario: Scenario, kvd: Callable[[str], Target], client: Client
) -> None:
    """Requests that msgpack can express have the same effects and answers as in JSON."""
    dialect = PackedDialect()
    play(scenario, replace(kvd("conductor"), packed=dialect), client)
    assert dialect.packed or scenario.name in NEVER_PACKED
