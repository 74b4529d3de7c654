"""A state directory: one owner, and files that are replaced whole.

    lock               held by the process that owns the directory, as long as it lives
    registrations      registrations made by calls       replaced at each change
    index              a snapshot                        replaced at intervals, and at the end
    journal.N          bookings, the largest N newest    appended to
    *.new              a file that is being written, or was when its process was killed

Everything here may wait for a disk, so it is called from threads, or before anything is served.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from kvd.persistence.frames import END, Content, Header, frame, opening, packed

LOCK = "lock"
NEW = ".new"  # ends the name of a file that is being written

_JOURNAL = re.compile(r"journal\.(\d{1,15})")

FILE_RIGHTS = 0o600  # files have hashes of prompts, names of models, addresses


class InUse(OSError):
    """Another process owns the directory."""


class StateDirectory:
    """One state directory, ours until `close`."""

    def __init__(self, path: Path) -> None:
        """Makes the directory if it is missing, and takes it; raises InUse, or another OSError."""
        self.path = path
        self._lock = _taken(path)
        self._one_at_a_time = Lock()
        self._replaced: dict[Content, os.stat_result] = {}  # files that were put in place

    def close(self) -> None:
        give_up(self._lock)

    def file(self, content: Content) -> Path:
        """Returns the path of a file that is replaced whole."""
        return self.path / content

    def journal(self, number: int) -> Path:
        return self.path / f"journal.{number}"

    def journals(self) -> list[tuple[int, Path]]:
        """Returns the directory's journals with their numbers, the oldest first."""
        return journals(self.path)

    def drop_journals(self, before: int | None = None) -> None:
        """Removes all journals, or those of lower numbers."""
        for number, path in self.journals():
            if before is None or number < before:
                with suppress(OSError):  # a journal that stays is read again at the next start
                    path.unlink()

    def drop_journal(self, number: int) -> None:
        """Removes a journal that is not needed."""
        with suppress(OSError):  # the next start passes over a journal that stays
            self.journal(number).unlink()

    def create_journal(self, header: Header) -> tuple[int, int]:
        """Begins a journal; returns its descriptor and its size so far. Raises OSError."""
        self._stay()
        path = self.journal(header.number)
        file = _create(path)
        try:
            put(file, opening(header))
        except BaseException:
            self.drop_journal(header.number)
            give_up(file)
            raise
        return file, len(opening(header))

    def has_journal(self, number: int, file: int) -> bool:
        """Returns whether an open journal is still found under its name."""
        try:
            return os.path.samestat(os.stat(self.journal(number)), os.fstat(file))
        except FileNotFoundError:
            return False

    def has_file(self, content: Content) -> bool:
        """Returns whether the file that was put in place last is still found under its name."""
        try:
            return os.path.samestat(os.stat(self.file(content)), self._replaced[content])
        except FileNotFoundError:
            return False

    def begin(self, header: Header) -> NewFile:
        """Begins a file that is to take the place of another; raises OSError."""
        self._stay()
        return NewFile(self.file(header.content), header)

    def _stay(self) -> None:
        """Takes the directory again if it has been removed or moved meanwhile.

        Raises InUse if another process owns the directory that is there now, or another OSError.
        """
        with self._one_at_a_time:  # threads write several files at once
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.path / LOCK), os.fstat(self._lock)):
                    return
            former, self._lock = self._lock, _taken(self.path)
            give_up(former)

    def replace(self, header: Header, frames: Iterable[bytes]) -> int:
        """Writes a file whole, puts it in place of the last one, and returns its size.

        If that fails with OSError, the last file stays.
        """
        writing = self.begin(header)
        try:
            for each in frames:
                writing.write(each)
        except BaseException:
            writing.drop()
            raise
        size = writing.finish()
        self._replaced[header.content] = os.stat(self.file(header.content))
        return size


class NewFile:
    """A file that is being written to replace another."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._new = path.with_name(path.name + NEW)
        self._file = _create(self._new)
        self._frames = 0
        self.size = 0
        try:
            self._put(opening(header))
        except BaseException:
            self.drop()
            raise

    def write(self, framed: bytes) -> None:
        """Appends a frame."""
        self._put(framed)
        self._frames += 1

    def finish(self) -> int:
        """Replaces the old file by this one, durably; returns its size."""
        try:
            self._put(frame(END, packed(self._frames)))
            os.fsync(self._file)
            os.replace(self._new, self._path)
        except BaseException:
            self.drop()
            raise
        os.close(self._file)
        sync_directory(self._path.parent)
        return self.size

    def drop(self) -> None:
        """Gives the new file up."""
        give_up(self._file)
        with suppress(OSError):  # the next start removes what stays
            self._new.unlink()

    def _put(self, data: bytes) -> None:
        put(self._file, data)
        self.size += len(data)


def journals(path: Path) -> list[tuple[int, Path]]:
    """Returns the journals of a directory with their numbers, the oldest first."""
    found = ((_JOURNAL.fullmatch(each.name), each) for each in path.iterdir())
    return sorted((int(match[1]), each) for match, each in found if match is not None)


def put(file: int, data: bytes) -> None:
    """Writes all of the data."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def give_up(file: int) -> None:
    """Closes a file whose content nobody needs any more, or is on the disk."""
    with suppress(OSError):  # a disk in the network may report a fault this late
        os.close(file)


def sync_directory(path: Path) -> None:
    """Puts the names of a directory's files on the disk, so that they survive a power loss."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_RIGHTS)


def _taken(path: Path) -> int:
    """Makes a directory if it is missing, and takes it; returns the descriptor of its lock."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_RIGHTS)
    try:
        _take(lock)
        for left in path.glob(f"*{NEW}"):
            if not left.is_dir():  # kvd makes no directories; writing the file will report it
                left.unlink()
    except BaseException:
        os.close(lock)
        raise
    return lock


def _take(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
        raise InUse(errno.EBUSY, f"it is in use by process {owner or 'unknown'}") from None
    with suppress(OSError):  # only a message needs the number, and the disk may be full
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
