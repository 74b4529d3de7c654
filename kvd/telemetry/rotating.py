"""Writes lines to a file of bounded size, in a thread, so that the loop never waits for a disk.

    line ──> waiting, MAX_WAITING_BYTES ──> thread ──> FILE, up to max_bytes
                   │ full                                │ full
                   v                                     v
              dropped, counted                 FILE.1, FILE.2 ... , the oldest goes

The thread wakes at most ten times a second. It holds the interpreter only while it joins lines:
other threads run during the write itself.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread

from kvd.telemetry.logs import get_logger

# Lines of the decision log held for a slow disk: some 10,000 choices.
MAX_WAITING_BYTES = 4 * 1024 * 1024
BATCHED_S = 0.1  # pause in which lines of the decision log gather before they are written
MAX_FILES = 1000  # most files of the decision log; a rotation renames each

log = get_logger(__name__)


class RotatingWriter:
    """Writes the lines of one process to a file, and keeps earlier files beside it."""

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        """Appends to a file; keeps `files` of about `max_bytes` each. Raises OSError."""
        self.path = path
        self.max_bytes = max_bytes
        self.files = files
        self.accepted = 0  # lines; each will be written or fail
        self.dropped = 0  # lines that came while too many bytes waited
        self.failed = 0  # lines that could not be written
        self._put_bytes = 0
        self._taken_bytes = 0  # changed by the thread alone
        self._error: str | None = None  # of the last write, set by the thread alone
        self._logged_error: str | None = None
        self._waiting: SimpleQueue[bytes | None] = SimpleQueue()
        self._ending = Event()
        self._open()
        # A daemon thread, because a disk that stands still must not keep the process from ending.
        self._thread = Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        return self._put_bytes - self._taken_bytes

    def write(self, line: bytes) -> None:
        """Takes a line with its end; never waits, never raises."""
        self._log_change()
        if self.waiting_bytes + len(line) > MAX_WAITING_BYTES:
            self.dropped += 1
            return
        self._put_bytes += len(line)
        self.accepted += 1
        self._waiting.put(line)

    def close(self, seconds: float) -> None:
        """Waits for `seconds` at most until everything is written, and ends the thread."""
        self._waiting.put(None)
        self._ending.set()
        self._thread.join(seconds)
        if not self._thread.is_alive():
            os.close(self._file)

    def _log_change(self) -> None:
        """Logs once that lines cannot be written, and once that they can again."""
        error = self._error
        if error == self._logged_error:
            return
        self._logged_error = error
        if error is None:
            log.info("decision_log_resumed", path=str(self.path), failed=self.failed)
        else:
            log.warning("decision_log_failed", path=str(self.path), reason=error)

    # ---- run by the thread, and by __init__ before it starts

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(self.path, flags, 0o600)
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            os.close(file)
            raise OSError("not a regular file")
        self._file, self._size = file, found.st_size
        # A process that was killed may have left half a line.
        self._torn = found.st_size > 0 and os.pread(file, 1, found.st_size - 1) != b"\n"

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            self._ending.wait(BATCHED_S)
            lines: list[bytes] = [line]
            with suppress(Empty):
                while (more := self._waiting.get_nowait()) is not None:
                    lines.append(more)
                self._waiting.put(None)  # puts the end back, for the loop above to find
            self._write_all(lines)

    def _write_all(self, lines: list[bytes]) -> None:
        size = 0
        batch: list[bytes] = []
        for line in lines:
            if batch and self._size + size + len(line) > self.max_bytes:
                self._write_batch(batch)
                size, batch = 0, []
            batch.append(line)
            size += len(line)
        self._write_batch(batch)

    def _write_batch(self, lines: list[bytes]) -> None:
        data = b"".join(lines)
        try:
            if self._size and self._size + len(data) > self.max_bytes:
                self._rotate()
            left = memoryview(b"\n" + data if self._torn else data)
            while left:
                written = os.write(self._file, left)
                self._size += written
                left = left[written:]
        except OSError as error:
            self.failed += len(lines)  # some may be written, or cut short by a full disk
            self._torn = True
            self._error = error.strerror or str(error)
        else:
            self._torn = False
            self._error = None
        self._taken_bytes += len(data)

    def _rotate(self) -> None:
        # The file may have been removed; or the last rotation has moved it, but could not open the
        # next one. Moving the others again would lose the oldest for nothing.
        if self.path.exists():
            for number in range(self.files - 1, 0, -1):
                with suppress(FileNotFoundError):  # there are not so many files yet
                    os.replace(_numbered(self.path, number - 1), _numbered(self.path, number))
            if self.files == 1:
                os.unlink(self.path)
        before = self._file
        self._open()
        os.close(before)


def files_of(path: Path) -> list[Path]:
    """Returns the files of a log that exist, the oldest first.

    A number may be missing in between: a kill during a rotation leaves a hole.
    """
    files = (_numbered(path, number) for number in reversed(range(MAX_FILES)))
    return [file for file in files if file.exists()]


def _numbered(path: Path, number: int) -> Path:
    return path if number == 0 else path.with_name(f"{path.name}.{number}")
