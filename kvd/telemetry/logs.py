"""Writes one line per state change to stderr, as key=value fields or as JSON.

    ts=2026-11-21T11:48:03.120Z level=warning logger=kvd.net.listener event=batches_lost missing=4
    {"ts":"2026-11-21T11:48:03.120Z","level":"warning","logger":"kvd.net.listener","event":"batches_lost"...
    <4>level=warning logger=kvd.net.listener event=batches_lost missing=4      to systemd's journal

The first argument of a call names the event; keyword arguments are its fields. Texts are quoted and
cut where they could break the line. Containers and bytes show as their length only: token ids,
hashes and bodies of clients do not reach a log, whatever a caller passes. The journal takes a
line's priority from its prefix (sd-daemon(3)), and has a clock of its own. Writing a line never
waits (kvd.telemetry.stderr).
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Hashable, Mapping, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from kvd.telemetry.stderr import NonBlockingWriter

LEVELS = ("debug", "info", "warning", "error")
FORMS = ("logfmt", "json")
STDERR = 2

# Priorities of syslog(3) by level; anything worse than an error is critical.
PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3}
CRITICAL = 2

# Time allowed for the last lines when kvd ends; a live reader takes them in 1 ms.
FINISH_SECONDS = 0.5

MAX_VALUE_CHARS = 256  # longest text field of a line; a longer one is cut
MAX_LIMITER_KEYS = 4096  # keys a rate limiter remembers, about 0.5 MB; the oldest is forgotten

_encode = json.JSONEncoder(separators=(",", ":")).encode
_BARE = re.compile(r"[A-Za-z0-9_.:/@+-]+|<[0-9]+>")


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

    def always(self, event: str, /, **fields: object) -> None:
        """Writes a line of level info whatever the level is: for lines with their own switch."""
        _handler.put(LogEntry("info", self._logger.name, event, fields, time.time()))


def get_logger(name: str) -> Log:
    return Log(name)


class LogEntry(NamedTuple):
    """The content of a line, and the traceback behind it."""

    level: str
    logger: str
    event: str
    fields: Mapping[str, object]
    seconds: float
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Style:
    """The form of lines, and whether the journal reads them."""

    form: str = "logfmt"
    journal: bool = False

    def line(self, entry: LogEntry) -> str:
        """Returns a line with its end; only a traceback in logfmt adds further ones."""
        level, logger, event, fields, seconds, traceback = entry
        members: dict[str, object] = {} if self.journal else {"ts": _utc(seconds)}
        members |= {"level": level, "logger": logger, "event": event, **fields}
        if self.form == "json":
            shown = {key: json_value(value) for key, value in members.items()}
            if traceback:
                shown["traceback"] = traceback
            text = _encode(shown)
        else:
            text = " ".join(f"{key}={render(value)}" for key, value in members.items())
            if traceback:
                text = f"{text}\n{traceback}"
        if self.journal:
            prefix = f"<{PRIORITIES.get(level, CRITICAL)}>"
            text = prefix + text.replace("\n", f"\n{prefix}")
        return text + "\n"


class LineHandler(logging.Handler):
    """Writes records, foreign ones too, as lines of `style` to a descriptor."""

    def __init__(self, descriptor: int, style: Style) -> None:
        super().__init__()
        self.style = style
        self.writer = NonBlockingWriter(descriptor, self._notice)

    def emit(self, record: logging.LogRecord) -> None:
        info = record.exc_info
        traceback = logging.Formatter().formatException(info) if info else ""
        level, fields = record.levelname.lower(), getattr(record, "fields", {})
        entry = LogEntry(level, record.name, _message(record), fields, record.created, traceback)
        self.put(entry)

    def put(self, entry: LogEntry) -> None:
        self.writer.write(self.style.line(entry).encode(errors="backslashreplace"))

    def close(self) -> None:
        self.writer.close()
        super().close()

    def _notice(self, count: int) -> bytes:
        entry = LogEntry("warning", __name__, "lines_dropped", {"lines": count}, time.time())
        return self.style.line(entry).encode()


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # another package's record, whose arguments do not fit
        return str(record.msg)


_handler = LineHandler(STDERR, Style())


def setup(level: str, form: str = "logfmt", descriptor: int = STDERR) -> None:
    """Sends every logger of the process, foreign ones too, to `descriptor`."""
    global _handler  # a process has one log
    _handler = LineHandler(descriptor, Style(form, is_journal(descriptor, os.environ)))
    logging.getLogger().handlers[:] = [_handler]
    set_output(level, form)


def set_output(level: str, form: str) -> None:
    """Writes lines of this level and above from now on, in this form."""
    logging.getLogger().setLevel(level.upper())
    _handler.style = replace(_handler.style, form=form)


def flush() -> bool:
    """Writes lines that wait for their reader, as far as it takes them; call it now and then.

    Returns whether any still wait.
    """
    _handler.writer.flush()
    return _handler.writer.is_behind


def finish() -> None:
    """Waits for FINISH_SECONDS at most until the reader has taken the last lines."""
    _handler.writer.finish(FINISH_SECONDS)


def dropped() -> int:
    """Returns how many lines were dropped."""
    return _handler.writer.dropped


def complain(error: Exception | str) -> None:
    """Writes an error as one line to stderr, in one write: where there is no log yet."""
    prefix = f"<{PRIORITIES['error']}>" if is_journal(STDERR, os.environ) else ""
    write_error(f"{prefix}kvd: {plain(str(error))}\n")


def write_error(line: str) -> None:
    """Writes a line to stderr, if that is possible: the exit code says that there is an error."""
    try:
        sys.stderr.write(line)
    except OSError:
        # Otherwise Python would try to write the line again at its exit, and end with 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)


def plain(text: str) -> str:
    """Returns a text as one line of printable characters, which cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def is_journal(descriptor: int, environ: Mapping[str, str]) -> bool:
    """Returns whether a descriptor leads to systemd's journal (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def json_value(value: object) -> object:
    """Returns a value for JSON: numbers as they are, else the text that `render` shows."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, int) else _text(value)


def render(value: object) -> str:
    """Returns the text of a field's value, cut, and quoted where necessary."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    text = _text(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _text(value: object) -> str:
    """Returns the value as a text, cut; of a container or bytes only the length."""
    if not isinstance(value, str) and isinstance(value, Sized):
        return f"<{len(value)}>"
    text = str(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def _utc(seconds: float) -> str:
    return f"{_utc_second(int(seconds))}.{int(seconds * 1000) % 1000:03d}Z"


@lru_cache(maxsize=2)  # lines of one second come in a row
def _utc_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class RateLimit:
    """Lets one line per key through every `every_s` seconds and counts those it holds back."""

    def __init__(self, every_s: float) -> None:
        self.forgotten = 0  # keys dropped at MAX_LIMITER_KEYS, each with its count of held lines
        self._every_s = every_s
        self._seen: dict[Hashable, tuple[float, int]] = {}  # key -> time of last line, held since

    def admit(self, key: Hashable, now_s: float) -> int | None:
        """Returns how many lines of `key` were held back since its last; None: hold this one back.

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
