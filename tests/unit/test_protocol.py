"""bench/protocol.py over a small trace: its tables have every cell, and it draws a picture."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.protocol import CAPACITIES, ENGINES, LOADS, main
from tests.support.traces import conversations

WORKLOADS = 7


@pytest.mark.slow("it replays every cell of the protocol")
def test_every_cell_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, figures = conversations(tmp_path), tmp_path / "figures.json"
    options = ["--rounds=1", "--jobs=1", "--windows=all", "--policy=dynamo", "--policy=kvd"]
    main([str(trace), *options, f"--pictures={tmp_path}", f"--json={figures}"])
    printed = capsys.readouterr().out
    held = json.loads(figures.read_text())
    fleets = len(ENGINES) * len(CAPACITIES) * len(LOADS)
    assert [len(cells) for cells in held.values()] == [fleets, WORKLOADS]
    assert all(
        set(rounds) == {"dynamo", "kvd"} for cells in held.values() for rounds in cells.values()
    )
    assert (
        printed.count("| kvd |") == fleets + WORKLOADS + 2
    )  # each table, and a summary of each kind
    circles = ElementTree.parse(tmp_path / "trace-fleets.svg").findall(".//{*}circle")
    assert len(circles) > fleets
