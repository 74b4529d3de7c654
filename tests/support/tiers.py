"""Holds tests to the folder they stand in: a unit test opens no socket, and only tests of whole
daemons start processes.

While such a test runs, what Python starts processes and connects sockets by fails it. Sockets that
pyzmq or compiled code opens are not seen. An audit hook would see more functions, but Python calls
it for each import, file and thread as well: tests took a tenth more time.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

Calls = Sequence[tuple[Any, str]]  # functions, each by its owner and its name

PROCESSES: Calls = (
    (subprocess.Popen, "__init__"),
    *((os, name) for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")),
)
TOOLS = {"openssl", "/sbin/ldconfig"}  # which make a certificate, and find a library for ctypes
# trio wakes itself up by a pair of sockets, which are neither bound nor connected.
SOCKETS: Calls = tuple((socket.socket, name) for name in ("bind", "connect", "connect_ex"))


@contextmanager
def forbidding(calls: Calls) -> Iterator[None]:
    """Fails a test that makes one of these calls inside of it, at that place."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in calls:
            patch.setattr(owner, name, _refusing(owner, name))
        yield


def _refusing(owner: Any, name: str) -> Callable[..., Any]:
    allowed = getattr(owner, name)

    def refuse(*arguments: Any, **named: Any) -> Any:
        if owner is subprocess.Popen and arguments[1][0] in TOOLS:
            return allowed(*arguments, **named)
        pytest.fail(f"{owner.__name__}.{name}: such a test stands in another folder")

    return refuse
