"""Directories that earlier formats have left: a later kvd reads them.

A change that raises the format adds what a kvd of the new one writes, as `data/states/FORMAT` with
what `kvd state export` says of it, and leaves those that are there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvd.cli.main import main
from kvd.persistence.frames import FORMAT, READABLE

STATES = Path(__file__).parents[2] / "support" / "data" / "states"


def exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Returns what `kvd state export` says, without ages."""
    assert main(["state", "export", str(folder)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    for row in (*found["requests"], *found["sessions"]):
        assert row.pop("age_s") > 0
    return found


def test_every_format_up_to_ours_is_read() -> None:
    assert tuple(range(1, FORMAT + 1)) == READABLE
    assert sorted(path.name for path in STATES.iterdir()) == [str(each) for each in READABLE]


@pytest.mark.parametrize("version", READABLE)
def test_what_an_earlier_kvd_has_left_is_read(
    version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = STATES / str(version)
    assert main(["state", "verify", str(folder)]) == 0
    assert capsys.readouterr().out.count(": ok\n") == 3
    assert exported(folder, capsys) == json.loads((folder / "export.json").read_text())
