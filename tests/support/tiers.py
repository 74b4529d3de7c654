"""Holds tests to the folder they stand in: a unit test opens no socket, and only tests of whole
daemons start processes.

Python tells of both by audit events. Sockets that pyzmq or compiled code opens show in none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

PROCESSES = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system"}
)
TOOLS = {"openssl", "/sbin/ldconfig"}  # which make a certificate, and find a library for ctypes
SOCKETS = frozenset({"socket.bind", "socket.connect"})  # trio makes a pair of its own to wake up

_forbidden: frozenset[str] = frozenset()


@cache
def watch() -> None:
    """Has every event looked at, once and for as long as this process lives."""

    def refuse(event: str, details: tuple[Any, ...]) -> None:
        if event in _forbidden and next(iter(details), None) not in TOOLS:
            pytest.fail(f"{event}{details}: such a test stands in another folder")

    sys.addaudithook(refuse)


@contextmanager
def forbidding(events: frozenset[str]) -> Iterator[None]:
    """Fails what causes one of these events inside of it, at that place."""
    global _forbidden
    watch()
    before, _forbidden = _forbidden, events
    try:
        yield
    finally:
        _forbidden = before
