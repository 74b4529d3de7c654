"""Writes log lines to a descriptor without ever waiting for it.

    line ──> waiting, MAX_WAITING_BYTES ──> as much as the reader takes at once
                   │ full, or it cannot be written
                   v
              dropped, counted, and reported by a line as soon as there is room for one

The thread that logs also answers requests: a pipe that nobody empties, or a busy journal, must not
hold it up. How this is avoided depends on the kind of descriptor:

    socket (journald)   send(2) with MSG_DONTWAIT
    pipe, terminal      opened once more, non-blocking: the open file that we were given may be
                        shared with other processes, whose own writes would begin to fail
      if that fails     poll(2) first, then write PIPE_BUF bytes at most: a writable pipe has room
      (another user's)  for these
    anything else       write(2), which does not wait for a reader; a slow disk can hold it up
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import time
from collections import deque
from collections.abc import Callable

# Log lines held for a slow reader: some 5,000 lines, 16 times what a pipe holds.
MAX_WAITING_BYTES = 1024 * 1024
FLUSH_LINES = 256  # lines written in a row: about 0.5 ms
PIPE_BUF = 4096  # bytes that a writable pipe takes without waiting, on Linux

# Writes bytes; returns how many were taken, raises BlockingIOError if none were.
Put = Callable[[bytes], int]


class NonBlockingWriter:
    """Writes the lines of one process to `descriptor`."""

    def __init__(self, descriptor: int, notice: Callable[[int], bytes]) -> None:
        """`notice` returns the line which reports that so many lines were dropped."""
        self.dropped = 0
        self._reported = 0  # dropped lines that have been reported
        self._notice = notice
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._begun = False  # what waits begins with the rest of a line
        self._torn = False  # such a rest was dropped: the next line has to end what is written
        self._descriptor = descriptor
        self._opened = contextlib.ExitStack()
        self._put: Put | None = None  # None until the first line

    @property
    def is_behind(self) -> bool:
        """Whether lines wait for the reader."""
        return bool(self._waiting)

    def write(self, line: bytes) -> None:
        """Writes a line now, later or never; never waits, never raises."""
        if self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
            self.flush()
        if self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
            self.dropped += 1
            return
        self._wait(line)
        self.flush()

    def flush(self) -> None:
        """Writes waiting lines as far as the reader takes them at once, FLUSH_LINES at most."""
        if self._put is None:
            self._put = _without_waiting(self._descriptor, self._opened)
        for _ in range(FLUSH_LINES):
            if not self._waiting:
                self._report_dropped(self._put)
                return
            line = self._waiting.popleft()
            try:
                taken = self._put_line(self._put, line)
            except BlockingIOError:
                taken = 0
            except OSError:  # no room on the disk, or nobody is left to read
                self._waiting_bytes -= len(line)
                self.dropped += 1
                self._torn |= self._begun
                self._begun = False
                return
            self._waiting_bytes -= taken
            if taken < len(line):
                self._waiting.appendleft(line[taken:])
                return

    def _put_line(self, put: Put, line: bytes) -> int:
        """Writes a line, or the rest of one; returns how many bytes of it were taken."""
        taken = put(b"\n" + line if self._torn else line) - self._torn
        self._torn = False
        self._begun = taken < len(line) and (self._begun or taken > 0)
        return taken

    def _report_dropped(self, put: Put) -> None:
        """Writes a line that reports dropped lines, if there are new ones and there is room."""
        if self.dropped == self._reported:
            return
        line = self._notice(self.dropped - self._reported)
        with contextlib.suppress(OSError):
            taken = self._put_line(put, line)
            self._reported = self.dropped
            if taken < len(line):
                self._wait(line[taken:])

    def finish(self, seconds: float) -> None:
        """Waits for `seconds` at most until everything is written."""
        end = time.monotonic() + seconds
        self.flush()
        while self._waiting and (left := end - time.monotonic()) > 0:
            _writable(self._descriptor, left)
            self.flush()

    def close(self) -> None:
        """Closes the descriptor that was opened beside the given one, if any."""
        self._opened.close()

    def _wait(self, line: bytes) -> None:
        self._waiting.append(line)
        self._waiting_bytes += len(line)


def _without_waiting(descriptor: int, opened: contextlib.ExitStack) -> Put:
    """Returns a function that writes to `descriptor` as far as is possible without waiting."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:  # closed: every write will fail
        mode = 0
    if stat.S_ISSOCK(mode):
        sock = opened.enter_context(socket.socket(fileno=os.dup(descriptor)))
        return lambda data: sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    if stat.S_ISFIFO(mode) or os.isatty(descriptor):
        with contextlib.suppress(OSError):
            again = os.open(
                f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            )
            opened.callback(os.close, again)
            return lambda data: os.write(again, data)
        return lambda data: _put_polled(descriptor, data)
    return lambda data: os.write(descriptor, data)


def _put_polled(descriptor: int, data: bytes) -> int:
    if not _writable(descriptor, 0):
        raise BlockingIOError
    return os.write(descriptor, data[:PIPE_BUF])


def _writable(descriptor: int, seconds: float) -> bool:
    watched = select.poll()
    watched.register(descriptor, select.POLLOUT)
    return bool(watched.poll(seconds * 1000))
