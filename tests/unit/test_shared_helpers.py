"""Helpers of tests are in tests/support: nothing is imported from a test module."""

from __future__ import annotations

import re

from tests.support.processes import REPOSITORY

# Imports on one line, which is enough for modules; parsing all files would take seconds.
FROM_TESTS = re.compile(
    r"^[ \t]*(?:from tests[\w.]*\.test_|import tests[\w.]*\.test_"
    r"|from tests[\w.]* import (?:\w+, )*test_).*",
    re.MULTILINE,
)
SEEN = (
    "from tests.system.test_fleet import Engine",
    "    from tests.system import engines, test_fleet",
    "import tests.unit.core.test_dump",
)
LEFT_ALONE = ("from tests.support.engines import Engine", "from tests.system import engines")


def test_nothing_is_imported_from_a_module_of_tests() -> None:
    assert [bool(FROM_TESTS.search(line)) for line in SEEN] == [True] * len(SEEN)
    assert not any(FROM_TESTS.search(line) for line in LEFT_ALONE)
    found = [
        f"{path.relative_to(REPOSITORY)}: {line.strip()}"
        for folder in ("tests", "bench", "examples")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if path.name != "test_shared_helpers.py"
        for line in FROM_TESTS.findall(path.read_text())
    ]
    assert not found, "move what several modules use to tests/support"
