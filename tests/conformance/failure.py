"""Names the failures of a scenario, and waits for conditions within a limit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

SHOWN_CHARACTERS = 300  # of a value in a failure's text
FIRST_POLL_S = 0.002
LAST_POLL_S = 0.05


class Failure(AssertionError):
    """The server does not behave as the scenario says."""


class BadScenario(Exception):
    """The scenario is not as FORMAT.md says."""


def show(value: Any) -> str:
    """Returns a value as short JSON."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def wait_until(check: Callable[[], str | None], within_s: float) -> None:
    """Polls until `check` returns None; its last text is the Failure when time is up."""
    deadline = time.monotonic() + within_s
    pause = FIRST_POLL_S
    while (wrong := check()) is not None:
        if time.monotonic() > deadline:
            raise Failure(f"after {within_s} s: {wrong}")
        time.sleep(pause)
        pause = min(pause * 1.5, LAST_POLL_S)
