"""`kvd top` in a terminal: it draws, fits, scrolls, and leaves the terminal as it was."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvd.faces.ui.history import MAX_RANKS
from tests.support.commands import Ended, run_command
from tests.support.engines import BLOCK_SIZE
from tests.support.forking import fork
from tests.support.other_versions import other_version
from tests.support.pictured import MODEL, Pictured, pictured
from tests.support.ports import find_free_port
from tests.support.processes import clean_environment

PATIENCE_S = 20.0  # for conditions that take milliseconds
WORKERS = 12
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()=>].?|\r")
CLEARED, SHOWN_AGAIN = "\x1b[?1049h", "\x1b[?1049l"  # to the alternate screen, and back


class Terminal:
    """A command in a terminal of this size, and what it writes."""

    def __init__(
        self,
        *command: str,
        width: int = 100,
        height: int = 40,
        kind: str = "xterm-256color",
        encoding: str = "utf-8",
    ) -> None:
        self._outer, inner = os.openpty()
        self.inner = inner
        self.before = termios.tcgetattr(inner)
        self.written = ""
        self._size(width, height)
        environ = clean_environment(TERM=kind, PYTHONUTF8="1", PYTHONIOENCODING=encoding)
        for name in ("COLUMNS", "LINES"):  # they would override the terminal's size
            environ.pop(name, None)
        self.process = fork(["kvd", *command], environ, (inner, inner, inner), session=True)

    def _size(self, width: int, height: int) -> None:
        fcntl.ioctl(self._outer, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def resize(self, width: int, height: int) -> None:
        self.read()
        self.written = ""
        self._size(width, height)

    def press(self, keys: bytes) -> None:
        os.write(self._outer, keys)

    def read(self) -> None:
        while select.select([self._outer], [], [], 0.02)[0]:
            self.written += os.read(self._outer, 1 << 16).decode("utf-8", "replace")

    def until(self, seen: Callable[[str], object]) -> None:
        """Waits until `seen` accepts the text written since the last change of size."""
        deadline = time.monotonic() + PATIENCE_S
        while not seen(ESCAPES.sub("", self.written)):
            assert time.monotonic() < deadline, self.written[-4000:]
            self.read()

    def ended(self) -> int:
        """Returns the exit code, once the command has ended by itself."""
        deadline = time.monotonic() + PATIENCE_S
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline
            self.read()
        self.read()
        return code

    def hang_up(self) -> None:
        """Closes the terminal, as closing its window does."""
        os.close(self._outer)
        self._outer = -1

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._outer >= 0:
            os.close(self._outer)
        os.close(self.inner)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pictured]:
    with pictured(tmp_path_factory.mktemp("fleet"), WORKERS) as found:
        found.ask(20)
        yield found


@contextmanager
def top(
    fleet: Pictured, *flags: str, width: int = 100, height: int = 40, encoding: str = "utf-8"
) -> Iterator[Terminal]:
    off = [f"--{face}-bind=off" for face in ("slot-tracker", "selection", "conductor")]
    bind = f"--indexer-bind=127.0.0.1:{fleet.port}"
    command = "top", bind, *off, "--interval=0.1", *flags
    opened = Terminal(*command, width=width, height=height, encoding=encoding)
    try:
        yield opened
    finally:
        opened.close()


def test_it_draws_the_fleet_and_ends_with_q(fleet: Pictured) -> None:
    with top(fleet) as terminal:
        terminal.until(lambda text: all(f"{n}:0 {MODEL}" in text for n in range(1, WORKERS + 1)))
        terminal.until(lambda text: f"{WORKERS} exact" in text)
        terminal.until(lambda text: "q quits" in text)
        fleet.ask(5)
        terminal.until(lambda text: "cached of prompt" in text and "request-000" in text)
        terminal.press(b"q")
        assert terminal.ended() == 0
        assert terminal.written.index(CLEARED) < terminal.written.rindex(SHOWN_AGAIN)
        assert termios.tcgetattr(terminal.inner) == terminal.before
        assert "Traceback" not in terminal.written


@pytest.mark.parametrize("end", [b"\x03", signal.SIGTERM])
def test_it_leaves_the_terminal_as_it_was(fleet: Pictured, end: bytes | signal.Signals) -> None:
    with top(fleet) as terminal:
        terminal.until(lambda text: "q quits" in text)
        if isinstance(end, bytes):
            terminal.press(end)
        else:
            terminal.process.send_signal(end)
        assert terminal.ended() == 0
        assert SHOWN_AGAIN in terminal.written
        assert termios.tcgetattr(terminal.inner) == terminal.before
        assert "Traceback" not in terminal.written


def test_it_ends_with_its_terminal(fleet: Pictured) -> None:
    with top(fleet) as terminal:
        terminal.until(lambda text: "q quits" in text)
        terminal.hang_up()
        assert terminal.process.wait(PATIENCE_S) == 0


def test_it_draws_in_a_terminal_of_another_encoding(fleet: Pictured) -> None:
    with top(fleet, encoding="ascii") as terminal:
        terminal.until(lambda text: f"1:0 {MODEL}" in text and "#" in text)
        terminal.press(b"q")
        assert terminal.ended() == 0
        assert terminal.written.isascii()


@pytest.mark.parametrize(("width", "height"), [(44, 18), (80, 24), (160, 60), (20, 6)])
def test_it_fits_after_the_terminal_was_resized(fleet: Pictured, width: int, height: int) -> None:
    with top(fleet) as terminal:
        terminal.until(lambda text: "q quits" in text)
        terminal.resize(width, height)
        terminal.until(lambda _: fits(terminal.written, width, height))


def fits(written: str, width: int, height: int) -> bool:
    """Returns whether the last screen fits; earlier ones may have the old size."""
    screens = [ESCAPES.sub("", each) for each in written.split("\x1b[H")]
    whole = [each.split("\n") for each in screens[:-1] if "kvd" in each]  # the last may be partial
    return bool(whole) and len(whole[-1]) <= height and max(map(len, whole[-1])) <= width


def test_keys_scroll_the_workers(fleet: Pictured) -> None:
    with top(fleet, height=16) as terminal:
        terminal.until(lambda text: f"1:0 {MODEL}" in text)
        assert f"{WORKERS}:0 {MODEL}" not in terminal.written
        terminal.press(b" ")
        terminal.until(lambda text: f"{WORKERS}:0 {MODEL}" in text)


def test_a_small_terminal_has_room_for_workers(fleet: Pictured) -> None:
    with top(fleet, width=40, height=10) as terminal:
        terminal.until(lambda text: "\n1:0 " in text)


def test_it_says_that_it_shows_the_first_of_very_many(fleet: Pictured) -> None:
    ids = range(1000, 1000 + MAX_RANKS - WORKERS + 1)
    rows = [
        {
            "worker_id": number,
            "model_name": "wide",
            "endpoint": f"http://worker-{number}:8000",
            "block_size": BLOCK_SIZE,
            "without_kv_events": True,
        }
        for number in ids
    ]
    for row in rows:
        fleet.client.post("/workers", json=row).raise_for_status()
    with top(fleet) as terminal:
        terminal.until(lambda text: f"scroll; the first {MAX_RANKS} ranks" in text)
    for number in ids:
        fleet.client.delete(f"/workers/{number}").raise_for_status()


def test_it_waits_for_a_daemon_that_does_not_answer() -> None:
    off = [f"--{face}-bind=off" for face in ("slot-tracker", "selection", "conductor")]
    terminal = Terminal("top", f"--indexer-bind=127.0.0.1:{find_free_port()}", *off)
    try:
        terminal.until(lambda text: "Connection refused" in text)
        terminal.press(b"q")
        assert terminal.ended() == 0
    finally:
        terminal.close()


def test_it_waits_for_a_daemon_of_its_version() -> None:
    with other_version(b'{"else": 1}') as flags:
        terminal = Terminal("top", *flags)
        try:
            terminal.until(lambda text: "has another form" in text)
            terminal.press(b"q")
            assert terminal.ended() == 0
        finally:
            terminal.close()


def test_it_needs_a_terminal_to_draw_on() -> None:
    terminal = Terminal("top", kind="dumb")
    try:
        assert terminal.ended() == 1
        assert "needs a terminal to draw on" in terminal.written
    finally:
        terminal.close()


def test_it_needs_a_terminal() -> None:
    message = "kvd: kvd top needs a terminal to draw on; `kvd status` writes lines\n"
    assert run_command("top") == Ended(1, "", message)
