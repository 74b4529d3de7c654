from collections.abc import Callable
from typing import Any, NamedTuple

from kvd.http.permits import ClientTrust, PermitRules
from kvd.http.serving import Streamed
from kvd.http.untasked import Untasked
from kvd.telemetry.counts import RequestCounts

class PlainRequest(NamedTuple):
    route: Any
    path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

class Handoff(NamedTuple):
    received: bytes
    unsent: bytes
    persists: bool
    undo: Callable[[], None] | None = None
    rest: Untasked | Streamed | None = None

def plain_head(
    data: bytes,
) -> tuple[int, bytes, bytes, list[tuple[bytes, bytes]], int, bool, bool] | None: ...
def has_left(fd: int) -> bool: ...
def names_host(value: bytes) -> bool: ...

class Parkable:
    checks_host: bool
    since: float
    trust: ClientTrust

    def __init__(self, checks_host: bool) -> None: ...
    def note_granted(self, scope: int) -> None: ...

class FastPath:
    lines: bytes | None
    created_lines: bytes | None
    logged: bool
    def __init__(
        self,
        routes: dict[bytes, Any],
        patterns: list[tuple[bytes, bytes, Any]],
        serve: Callable[
            [Any, Any, bytes, bytes, list[tuple[bytes, bytes]], bytes, Exception | None],
            tuple[bytes, bool, Callable[[], None] | None] | Handoff,
        ],
        log: Callable[[Any, Any, int, float, int, list[tuple[bytes, bytes]]], bytes],
        wake: Callable[[Any, Handoff | Exception], None],
        relay: Callable[[Any, PlainRequest], Handoff | Exception | None],
        permits: PermitRules,
        shared: Any,
        counts: RequestCounts,
    ) -> None: ...
    def fileno(self) -> int: ...
    def add(self, fd: int) -> None: ...
    def park(self, connection: Parkable, fd: int) -> Handoff | Exception | None: ...
    def unpark(self, fd: int) -> None: ...
    def is_arriving(self, fd: int) -> bool: ...
    def sweep(self) -> None: ...
    def serve_ready(self, budget_ns: int) -> int: ...
    def close(self) -> None: ...
