"""Log lines about one stream: its name first, each kind of line at most every half minute."""

from __future__ import annotations

from collections.abc import Callable

import trio

from kvd.telemetry.logs import Log, RateLimit

# Pause between two log lines of one kind about one stream; counters show the lines held back.
LOG_EVERY_S = 30.0


class StreamLog:
    """`kind` says what `name` is the name of."""

    __slots__ = ("_kind", "_limit", "_log", "_name")

    def __init__(self, log: Log, kind: str, name: str) -> None:
        self._kind = kind
        self._log = log
        self._name = name
        self._limit = RateLimit(LOG_EVERY_S)

    def info(self, event: str, **fields: object) -> None:
        self._write(self._log.info, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write(self._log.warning, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        self._write(self._log.exception, event, fields)

    def _write(self, write: Callable[..., None], event: str, fields: dict[str, object]) -> None:
        held = self._limit.admit(event, trio.current_time())
        if held is not None:
            write(event, **{self._kind: self._name}, **fields, held=held)
