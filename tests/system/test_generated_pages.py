"""Pages that are generated from the code are up to date: bounds, routes, findings, the client."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import REPOSITORY


@pytest.mark.parametrize("name", ["limits", "doctor", "api", "client"])
def test_a_page_is_up_to_date(name: str) -> None:
    command = [sys.executable, f"docs/{name}.py"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    page = (REPOSITORY / f"docs/{name}.md").read_text()
    assert page == ran.stdout, f"python docs/{name}.py > docs/{name}.md"


def test_a_bound_without_a_meaning_is_an_error() -> None:
    """The script names the bound, and writes nothing."""
    unexplained = "limits.Bound('kvd.x', 'MAX_X', 1, '')"
    text = f"import limits; limits.bounds = lambda: [{unexplained}]; limits.page()"
    command = [sys.executable, "-c", text]
    ran = subprocess.run(command, cwd=REPOSITORY / "docs", capture_output=True, text=True)
    assert ran.returncode == 1
    assert "kvd.x: MAX_X needs a comment" in ran.stderr
