from collections.abc import Callable
from typing import Any, NamedTuple

class Leftover(NamedTuple):
    received: bytes
    unsent: bytes
    persists: bool

class Answerer:
    def __call__(self, body: bytes, captured: bytes = ...) -> bytes | None: ...

def plain_head(
    data: bytes,
) -> tuple[int, bytes, bytes, list[tuple[bytes, bytes]], int, bool, bool] | None: ...

class Lane:
    lines: bytes | None
    created_lines: bytes | None
    def __init__(
        self,
        routes: dict[bytes, Any],
        patterns: list[tuple[bytes, bytes, Any]],
        serve: Callable[
            [Any, Any, bytes, bytes, list[tuple[bytes, bytes]], bytes], tuple[bytes, bool]
        ],
        note: Callable[[Any, Any, int, float], None],
    ) -> None: ...
    def fileno(self) -> int: ...
    def add(self, fd: int) -> None: ...
    def park(self, connection: object, fd: int) -> Leftover | Exception | None: ...
    def unpark(self, fd: int) -> None: ...
    def turn(self, budget_ns: int) -> tuple[list[tuple[Any, Leftover | Exception]], bool]: ...
    def close(self) -> None: ...
