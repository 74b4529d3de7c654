"""Log lines: one line each, fields that survive any text, and nothing of what clients send."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from kvd import logs


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What is logged during a test; the root logger is as before afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.setup("info", stream)
    yield stream
    root.handlers[:], root.level = handlers, level


def test_a_line_holds_the_event_and_its_fields(written: io.StringIO) -> None:
    logs.get_logger("kvd.test").warning("stream gap", worker=1, missing=4, up=True, error=None)
    line = written.getvalue()
    assert line.endswith(
        'level=warning logger=kvd.test event="stream gap" worker=1 missing=4 up=true error=null\n'
    )
    assert line.startswith("ts=20")


def test_levels_below_the_set_one_are_silent(written: io.StringIO) -> None:
    logs.get_logger("kvd.test").debug("noise")
    assert written.getvalue() == ""


def test_no_text_breaks_a_line_and_no_container_is_shown(written: io.StringIO) -> None:
    log = logs.get_logger("kvd.test")
    log.info("x", text='a\n"b" c=d', tokens=[11, 12, 13], payload=b"\x93", long="y" * 1000)
    line = written.getvalue()
    assert line.count("\n") == 1
    assert r'text="a\n\"b\" c=d" tokens=<3> payload=<1>' in line
    assert "y" * logs.MAX_VALUE_CHARS + "..." in line
    assert len(line) < 500


def test_a_bug_is_logged_with_its_traceback(written: io.StringIO) -> None:
    try:
        raise LookupError("lost")
    except LookupError:
        logs.get_logger("kvd.test").exception("handler failed", path="/query")
    assert 'event="handler failed" path=/query\nTraceback' in written.getvalue()
    assert "LookupError: lost" in written.getvalue()


def test_foreign_loggers_come_out_the_same_way(written: io.StringIO) -> None:
    logging.getLogger("hypercorn.error").warning("listening on %s", "x:1")
    assert 'logger=hypercorn.error event="listening on x:1"' in written.getvalue()


def test_the_limiter_lets_one_through_and_counts_the_rest() -> None:
    limit = logs.RateLimit(every_s=10.0)
    assert limit.admit("a", 0.0) == 0
    assert [limit.admit("a", now) for now in (1.0, 5.0, 9.9)] == [None, None, None]
    assert limit.admit("b", 5.0) == 0
    assert limit.admit("a", 10.0) == 3
    assert limit.admit("a", 20.0) == 0


def test_the_limiter_remembers_a_bounded_number_of_keys() -> None:
    limit = logs.RateLimit(every_s=10.0)
    for key in range(logs.MAX_LIMITER_KEYS + 5):
        assert limit.admit(key, 0.0) == 0
    assert limit.forgotten == 5
    assert limit.admit(logs.MAX_LIMITER_KEYS, 1.0) is None
    assert limit.admit(0, 1.0) == 0
