"""Test processes beside one another, such as workers of pytest-xdist, get different ports."""

from __future__ import annotations

import subprocess
import sys

from tests.support.ports import BLOCK, find_free_port
from tests.support.processes import REPOSITORY

OTHERS = f"""
from tests.support.ports import find_free_port
print(*(find_free_port() for _ in range({BLOCK})))
"""


def test_no_two_processes_get_the_same_port() -> None:
    command = [sys.executable, "-c", OTHERS]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not {int(port) for port in ended.stdout.split()} & {
        find_free_port() for _ in range(BLOCK)
    }
