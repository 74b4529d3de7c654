"""Log lines about one stream: each names it, and each event is logged once in half a minute."""

from __future__ import annotations

from collections.abc import Callable

import trio

from kvd.telemetry.logs import Log, RateLimit

# Pause between two log lines of one event about one stream; a line counts those held back before.
LOG_EVERY_S = 30.0


class StreamLog:
    """Logs with the field `kind` = `name`, such as `listener`."""

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
