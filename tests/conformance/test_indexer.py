"""The KV indexer's API, scenario by scenario, against a running kvd."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from .not_yet import NOT_YET
from .runner import Scenario, load_all, play
from .steps import Target

SCENARIOS = load_all((Path(__file__).parent / "indexer").glob("*.json"))
PASSING = [scenario for scenario in SCENARIOS if scenario.name not in NOT_YET]


@pytest.mark.parametrize("scenario", PASSING, ids=lambda scenario: scenario.name)
def test_scenario(scenario: Scenario, kvd: Target, client: httpx.Client) -> None:
    play(scenario, kvd, client)


def test_every_scenario_that_waits_exists() -> None:
    assert NOT_YET.keys() <= {scenario.name for scenario in SCENARIOS}
