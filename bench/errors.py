"""The one exception of the benchmark kit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


class BenchError(Exception):
    """A run cannot go on; the text is all that a user needs to see."""


def run(main: Callable[[], None]) -> None:
    """Runs a program; a BenchError ends it with the name of the program and the error's text."""
    try:
        main()
    except BenchError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
