"""State directories in earlier formats can be read by a later kvd.

A change that raises the format adds a directory written in the new one, `data/states/FORMAT`, with
the output of `kvd state export` for it, and leaves the older ones as they are.
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
    """Returns the output of `kvd state export`, without ages."""
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
