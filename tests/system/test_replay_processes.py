"""A replay that several processes share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvd.replay.policies import Chooser
from kvd.replay.recording import ReplayError
from kvd.replay.routers import Routing
from kvd.replay.runs import Case, run_all
from kvd.replay.simulation import SimulatedFleet
from kvd.replay.traffic import Traffic
from tests.support.traces import conversations

FLEET = SimulatedFleet(engines=3, capacity=60)


def test_several_processes_find_what_one_does(tmp_path: Path) -> None:
    traffic = Traffic(conversations(tmp_path))
    cases = [
        Case(traffic, FLEET, Routing(Chooser(policy)), seed)
        for policy in ("dynamo", "kvd")
        for seed in (1, 2)
    ]
    served: list[int] = []
    found = [str(run_all(cases, jobs, served.append)) for jobs in (2, 1)]  # nan != nan
    assert found[0] == found[1]
    assert sum(served) == 2 * len(cases) * 48
    with pytest.raises(ReplayError, match="more blocks than an engine has"):
        run_all([replace(case, fleet=SimulatedFleet(1, 5)) for case in cases], 2, served.append)
