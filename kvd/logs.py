"""Writes one line per state change to stderr, as key=value fields.

    ts=2026-11-21T11:48:03.120Z level=warning logger=kvd.net.listener event=gap worker=1 missing=4

The first argument of a call names what happened, keyword arguments are its fields. Texts are
quoted and cut where they could break the line. Containers and bytes show as their length only:
token ids, hashes and bodies of clients do not reach a log, whatever a caller passes.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Hashable, Sized
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")

MAX_VALUE_CHARS = 256  # a text field longer than this is cut: one line stays one screen line or two
MAX_LIMITER_KEYS = 4096  # keys a rate limiter remembers, about 0.5 MB; the oldest is forgotten

_BARE = re.compile(r"[A-Za-z0-9_.:/@+-]+")


class Log:
    """A named logger whose calls take an event and its fields."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: object) -> None:
        self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, /, **fields: object) -> None:
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, /, **fields: object) -> None:
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, /, **fields: object) -> None:
        self._logger.error(event, extra={"fields": fields})

    def exception(self, event: str, /, **fields: object) -> None:
        """Logs an error with the traceback of the exception being handled: for bugs only."""
        self._logger.exception(event, extra={"fields": fields})


def get_logger(name: str) -> Log:
    return Log(name)


def setup(level: str, stream: TextIO | None = None) -> None:
    """Sends every logger of the process, foreign ones too, to `stream` (default stderr)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LogfmtFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)


def set_level(level: str) -> None:
    """Writes lines of this level and above from now on."""
    logging.getLogger().setLevel(level.upper())


class LogfmtFormatter(logging.Formatter):
    """Renders a record as one line; only a traceback adds further ones."""

    def format(self, record: logging.LogRecord) -> str:
        own = getattr(record, "fields", {})
        fields: dict[str, object] = {
            "ts": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **own,
        }
        line = " ".join(f"{key}={render(value)}" for key, value in fields.items())
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


def render(value: object) -> str:
    """Returns the text of one field's value: never longer than one quoted, cut text."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Sized) and not isinstance(value, str):
        return f"<{len(value)}>"
    text = str(value)
    if len(text) > MAX_VALUE_CHARS:
        text = f"{text[:MAX_VALUE_CHARS]}..."
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"


class RateLimit:
    """Lets one line per key through every `every_s` seconds and counts those it holds back."""

    def __init__(self, every_s: float) -> None:
        self.forgotten = 0  # keys dropped at MAX_LIMITER_KEYS, each with its count of held lines
        self._every_s = every_s
        self._seen: dict[Hashable, tuple[float, int]] = {}  # key -> last line at, held since

    def admit(self, key: Hashable, now_s: float) -> int | None:
        """Returns how many lines of `key` were held back since its last, or None to hold this one.

        `now_s` is the caller's monotonic clock in seconds.
        """
        last_s, held = self._seen.get(key, (-float("inf"), 0))
        if now_s - last_s < self._every_s:
            self._seen[key] = (last_s, held + 1)
            return None
        self._seen.pop(key, None)  # so that the dict's order stays the order of last lines
        if len(self._seen) >= MAX_LIMITER_KEYS:
            del self._seen[next(iter(self._seen))]
            self.forgotten += 1
        self._seen[key] = (now_s, 0)
        return held
