"""Holds tests to the rules of their folder: a unit test opens no socket, and only tests of whole
daemons start processes.

While such a test runs, calls by which Python starts processes and connects sockets fail it. Sockets
of pyzmq or compiled code go unnoticed. An audit hook would notice more, but Python also calls it
for each import, file and thread: tests took a tenth more time.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

Calls = Sequence[tuple[Any, str]]  # functions, each by its owner and its name

PROCESSES: Calls = (
    (subprocess.Popen, "__init__"),
    *((os, name) for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")),
)
TOOLS = {"openssl", "/sbin/ldconfig"}  # which make a certificate, and find a library for ctypes
# Not every socket: trio wakes itself up by a pair, which is neither bound nor connected.
SOCKETS: Calls = tuple((socket.socket, name) for name in ("bind", "connect", "connect_ex"))


_forbidden: set[tuple[Any, str]] = set()  # now
_guarded: set[tuple[Any, str]] = set()  # calls that `_guard` has replaced


@contextmanager
def forbidding(calls: Calls) -> Iterator[None]:
    """Fails a test at the first of these calls that it makes in the block."""
    for each in calls:
        if each not in _guarded:
            _guard(*each)
    _forbidden.update(calls)
    try:
        yield
    finally:
        _forbidden.difference_update(calls)


def _guard(owner: Any, name: str) -> None:
    """Replaces a call for good: to do so for each test took 1 ms, as Python forgot its caches."""
    allowed = getattr(owner, name)
    call = owner, name

    def guarded(*arguments: Any, **named: Any) -> Any:
        if call in _forbidden and not (owner is subprocess.Popen and arguments[1][0] in TOOLS):
            pytest.fail(f"{owner.__name__}.{name}: such a test stands in another folder")
        return allowed(*arguments, **named)

    setattr(owner, name, guarded)
    _guarded.add(call)
