"""A daemon loads some modules only when they are needed, not at its start."""

from __future__ import annotations

import subprocess
import sys

from tests.support.processes import REPOSITORY, clean_environment

LOADED = "import sys, kvd.app.daemon; print({'quart', 'hypercorn'} & {*sys.modules})"


def test_a_daemon_that_was_asked_nothing_has_not_loaded_the_application() -> None:
    command = [sys.executable, "-c", LOADED]
    said = subprocess.run(
        command, cwd=REPOSITORY, env=clean_environment(), capture_output=True, check=True
    )
    assert said.stdout == b"set()\n"
