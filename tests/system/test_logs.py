"""Log lines: one line each, fields that survive any text, and no contents that clients send."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvd.telemetry import logs
from kvd.telemetry import stderr as outlet
from kvd.telemetry.stderr import NonBlockingWriter
from tests.support.full_disks import no_longer_files
from tests.support.loglines import logged
from tests.support.processes import REPOSITORY, clean_environment

Written = Callable[[], str]


@pytest.fixture
def written() -> Iterator[Written]:
    """A function that returns what the test has logged so far."""
    with logged() as lines:
        yield lines


def test_a_line_holds_the_event_and_its_fields(written: Written) -> None:
    logs.get_logger("kvd.test").warning("stream gap", worker=1, missing=4, up=True, error=None)
    line = written()
    assert line.endswith(
        'level=warning logger=kvd.test event="stream gap" worker=1 missing=4 up=true error=null\n'
    )
    assert line.startswith("ts=20")


def test_levels_below_the_set_one_are_silent(written: Written) -> None:
    logs.get_logger("kvd.test").debug("noise")
    assert written() == ""


def test_no_text_breaks_a_line_and_no_container_is_shown(written: Written) -> None:
    log = logs.get_logger("kvd.test")
    log.info("x", text='a\n"b" c=d', tokens=[11, 12, 13], payload=b"\x93", long="y" * 1000)
    line = written()
    assert line.count("\n") == 1
    assert r'text="a\n\"b\" c=d" tokens=<3> payload=<1>' in line
    assert "y" * logs.MAX_VALUE_CHARS + "..." in line
    assert len(line) < 500


def fail() -> None:
    """Logs a bug."""
    try:
        raise LookupError("lost")
    except LookupError:
        logs.get_logger("kvd.test").exception("handler failed", path="/query")


def test_a_bug_is_logged_with_its_traceback(written: Written) -> None:
    fail()
    assert 'event="handler failed" path=/query\nTraceback' in written()
    assert "LookupError: lost" in written()


def test_foreign_loggers_come_out_the_same_way(written: Written) -> None:
    logging.getLogger("quart.error").warning("listening on %s", "x:1")
    assert 'logger=quart.error event="listening on x:1"' in written()
    record = logging.LogRecord("quart.app", logging.ERROR, "", 0, "%d%%", ("no number",), None)
    logging.getLogger().handlers[0].emit(record)
    assert 'logger=quart.app event="%d%%"' in written()


def test_json_says_the_same_in_one_line() -> None:
    with logged(form="json") as written:
        log = logs.get_logger("kvd.test")
        log.info(
            "x", text='a\n"b"', tokens=[1, 2], n=3, f=0.5, up=True, none=None, inf=float("inf")
        )
        fail()
        first, second = map(json.loads, written().splitlines())
    assert first.pop("ts").endswith("Z")
    assert first == {
        "level": "info",
        "logger": "kvd.test",
        "event": "x",
        "text": 'a\n"b"',
        "tokens": "<2>",
        "n": 3,
        "f": 0.5,
        "up": True,
        "none": None,
        "inf": "inf",
    }
    assert second["level"] == "error" and "LookupError: lost" in second["traceback"]


def test_the_form_can_change(written: Written) -> None:
    log = logs.get_logger("kvd.test")
    for form in ("json", "logfmt"):
        logs.set_output("error", form)
        log.error(form)
        log.info("noise")
    json_line, logfmt_line = written().splitlines()
    assert json.loads(json_line)["event"] == "json"
    assert logfmt_line.endswith("level=error logger=kvd.test event=logfmt")


def test_the_journal_gets_priorities_on_every_line_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    with path.open("wb") as file, logged():
        found = os.fstat(file.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        logs.setup("debug", descriptor=file.fileno())
        assert logging.getLogger().handlers[0].style.journal  # type: ignore[attr-defined]
        log = logs.get_logger("kvd.test")
        for write in (log.debug, log.info, log.warning, log.error):
            write("x")
        logging.getLogger("quart").critical("over")
        fail()
    lines = path.read_text().splitlines()
    assert [line[:3] for line in lines[:5]] == ["<7>", "<6>", "<4>", "<3>", "<2>"]
    assert lines[0] == "<7>level=debug logger=kvd.test event=x"
    assert len(lines) > 7 and all(line.startswith("<3>") for line in lines[5:])


def test_why_kvd_does_not_start_is_an_error_in_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with path.open("wb") as file:
        found = os.fstat(file.fileno())
        environ = clean_environment(JOURNAL_STREAM=f"{found.st_dev}:{found.st_ino}")
        command = [sys.executable, "-m", "kvd", "config", "check", "--config", "nowhere"]
        assert subprocess.call(command, env=environ, cwd=REPOSITORY, stderr=file) == 1
    assert path.read_text() == "<3>kvd: cannot read nowhere: No such file or directory\n"


@pytest.mark.parametrize("value", [None, "", "1:2", "x"])
def test_another_descriptor_than_the_journals_is_none(
    value: str | None, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {} if value is None else {"JOURNAL_STREAM": value}
    assert not logs.is_journal(2, environ)
    assert not logs.is_journal(9999, environ)


# ---- readers that do not read


def notice(count: int) -> bytes:
    return b"lost %d\n" % count


Make = Callable[[int], NonBlockingWriter]


@pytest.fixture
def make() -> Iterator[Make]:
    """A function that makes writers, which are closed after the test."""
    with ExitStack() as made:
        yield lambda descriptor: made.enter_context(closing(NonBlockingWriter(descriptor, notice)))


LINE = b"x" * 99 + b"\n"


def read_all(descriptor: int) -> bytes:
    """Returns all that can be read without waiting."""
    found = b""
    while select.select([descriptor], [], [], 0)[0]:
        found += os.read(descriptor, 2**16)
    return found


@pytest.fixture(params=["pipe", "polled pipe", "socket"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A reading and a writing end, of each kind of descriptor that can block."""
    if request.param == "socket":
        found = [each.detach() for each in socket.socketpair()]
    else:
        found = list(os.pipe())
    if request.param == "polled pipe":  # as if another user owned the pipe

        def refuse(*_: object) -> int:
            raise PermissionError

        monkeypatch.setattr(outlet.os, "open", refuse)
    yield found
    for each in found:
        os.close(each)


def test_lines_after_a_full_disk_begin_on_a_line_of_their_own(tmp_path: Path, make: Make) -> None:
    file = tmp_path / "log"
    with file.open("wb") as opened:
        out = make(opened.fileno())
        with no_longer_files(3 * len(LINE) // 2):
            for _ in range(4):
                out.write(LINE)
        out.flush()  # the last line waits
    assert out.dropped == 2
    assert file.read_bytes() == LINE + LINE[: len(LINE) // 2] + b"\n" + LINE + notice(2)


def test_a_reader_that_stands_still_is_not_waited_for(ends: list[int], make: Make) -> None:
    reading, writing = ends
    out = make(writing)
    lines = 2 * outlet.MAX_WAITING_BYTES // len(LINE)
    for _ in range(lines):
        out.write(LINE)  # a blocking write would hang here
    assert out.dropped > 0
    before = out.dropped
    found = b""
    while piece := read_all(reading):
        found += piece
        out.flush()
    assert found == LINE * (lines - before) + notice(before)
    assert out.dropped == before
    out.write(LINE)
    assert read_all(reading) == LINE


def test_lines_longer_than_the_reader_has_room_for_come_whole(ends: list[int], make: Make) -> None:
    reading, writing = ends
    out = make(writing)
    long = b"y" * 300_000 + b"\n"
    out.write(long)
    out.write(LINE)
    found = b""
    while piece := read_all(reading):
        found += piece
        out.flush()
    assert found == long + LINE


def test_the_descriptor_we_were_given_still_blocks(ends: list[int], make: Make) -> None:
    _, writing = ends
    make(writing).write(LINE)
    assert os.get_blocking(writing)


def test_the_end_waits_for_a_reader_a_moment_only(ends: list[int], make: Make) -> None:
    reading, writing = ends
    out = make(writing)
    for _ in range(10_000):
        out.write(LINE)
    out.finish(0.01)  # nobody reads
    assert len(read_all(reading)) < 10_000 * len(LINE)


def test_a_full_disk_costs_lines_and_nothing_else(make: Make) -> None:
    with open("/dev/full", "wb") as full:
        out = make(full.fileno())
        for _ in range(3):
            out.write(LINE)
        assert out.dropped >= 3


def test_no_reader_and_no_descriptor_cost_lines_and_nothing_else(make: Make) -> None:
    reading, writing = os.pipe()
    out = make(writing)
    out.write(LINE)
    os.close(reading)
    out.write(LINE)
    assert out.dropped >= 1
    os.close(writing)
    closed = make(writing)
    closed.write(LINE)
    assert closed.dropped >= 1


# ---- lines that repeat


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
