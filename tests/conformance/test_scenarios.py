"""The API of every face, scenario by scenario, against a running kvd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from .runner import Scenario, load_all, play
from .steps import Target

SCENARIOS = load_all(Path(__file__).parent.glob("*/*.json"))


@pytest.mark.parametrize(
    "scenario", SCENARIOS, ids=lambda scenario: f"{scenario.face}-{scenario.name}"
)
def test_scenario(scenario: Scenario, kvd: Callable[[str], Target], client: httpx.Client) -> None:
    play(scenario, kvd(scenario.face), client)
