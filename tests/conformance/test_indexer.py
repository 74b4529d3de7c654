"""The KV indexer's API, scenario by scenario, against a running kvd."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from .runner import Scenario, load_all, play
from .steps import Target

SCENARIOS = load_all((Path(__file__).parent / "indexer").glob("*.json"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario(scenario: Scenario, kvd: Target, client: httpx.Client) -> None:
    play(scenario, kvd, client)
