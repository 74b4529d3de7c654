"""docs/limits.md is written from the code: it lists every bound, as it is now."""

from __future__ import annotations

import subprocess
import sys

from tests.support.processes import REPOSITORY


def test_the_page_of_limits_is_up_to_date() -> None:
    command = [sys.executable, "docs/limits.py"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    page = (REPOSITORY / "docs/limits.md").read_text()
    assert page == ran.stdout, "python docs/limits.py > docs/limits.md"


def test_a_bound_without_a_meaning_is_an_error() -> None:
    """The script says which one, and writes nothing."""
    unexplained = "limits.Bound('kvd.x', 'MAX_X', 1, '')"
    text = f"import limits; limits.bounds = lambda: [{unexplained}]; limits.page()"
    command = [sys.executable, "-c", text]
    ran = subprocess.run(command, cwd=REPOSITORY / "docs", capture_output=True, text=True)
    assert ran.returncode == 1
    assert "kvd.x: MAX_X needs a comment" in ran.stderr
