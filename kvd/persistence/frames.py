"""The files of a state directory: a header, and frames that each carry a checksum.

    "KVDSTAT1" | frame | frame | ...                 the last byte of the first eight is the version
    frame:  u32 n | u32 CRC-32 of the rest | u8 kind | n - 1 bytes of content       little-endian

The first frame is the header: it says what the file holds, and when and by which process it was
written. A file that is written as a whole ends with an END frame. A file that is appended to may be
cut off at its end, where its process was killed. A fault before the end is damage in both.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import msgpack

from kvd._version import VERSION
from kvd.persistence.clocks import ClockReading

MAGIC = b"KVDSTAT"
FORMAT = 1  # number of the format in which files are written
READABLE = (1,)  # formats that can be read

_HEAD = Struct("<II")

# Longest frame of a state directory's file. Frames stay below 8 MiB except for the hashes of one
# huge prompt, so a longer frame is damage.
MAX_FRAME_BYTES = 256 * 1024 * 1024

# Longest header; headers have some 200 bytes, of which the version and the process's id may grow.
MAX_HEADER_BYTES = 4096

HEADER = ord("H")
END = ord("E")


class Content(StrEnum):
    """The kind of a file's content."""

    JOURNAL = "journal"
    INDEX = "index"
    REGISTRATIONS = "registrations"


class Damaged(Exception):
    """A file is not a whole file as kvd writes it; the text says what is wrong."""


class CutOff(Damaged):
    """A file ends too early."""

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(f"cut off at byte {size}")


class Frame(NamedTuple):
    """One checked part of a file."""

    kind: int
    content: bytes
    end: int  # bytes of the file up to the frame's end


@dataclass(frozen=True, slots=True)
class Header:
    """The writer of a file, and the moment of writing."""

    content: Content
    instance_id: str  # of the process (State.instance_id)
    moments: ClockReading
    number: int = 0  # of a journal in its directory
    version: str = VERSION


def frame(kind: int, content: bytes) -> bytes:
    """Returns the bytes of a frame."""
    body = bytes((kind,)) + content
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def opening(header: Header) -> bytes:
    """Returns the first bytes of a file, up to the end of its header."""
    return MAGIC + b"%d" % FORMAT + frame(HEADER, packed(asdict(header)))


def packed(value: object) -> bytes:
    """Returns a value as msgpack."""
    content: bytes = msgpack.packb(value)
    return content


def unpacked(content: bytes) -> Any:
    """Returns the value of msgpack whose checksum was right; raises Damaged."""
    try:
        return msgpack.unpackb(content, strict_map_key=False)
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise Damaged(f"a part of it is not msgpack: {error}") from None


class Reading:
    """One file, read from its beginning. Raises OSError and Damaged."""

    def __init__(self, path: Path) -> None:
        # A pipe would wait for a writer, and a device may have no end.
        self._file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115  closed by `close`
        self.whole = 0  # bytes of the file that were read and found sound
        try:
            about = os.fstat(self._file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise Damaged("not a regular file")
            self.size = about.st_size
            self.header = self._header()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def frames(self, torn: int | None = None) -> Iterator[Frame]:
        """Yields the frames after the header.

        If `torn` is given, the file has frames of that kind and may have been cut off in the middle
        of a write. It then ends before its first incomplete or faulty frame, unless a sound frame
        follows: that is damage.
        """
        while self.whole < self.size:
            try:
                found = self._frame()
            except Damaged:
                if torn is None or self._sound_behind(torn):
                    raise
                return
            self.whole = found.end
            yield found

    def whole_frames(self) -> Iterator[Frame]:
        """Yields the frames of a file that must end with an END frame; raises Damaged."""
        for found in self.frames():
            if found.kind == END:
                if found.end != self.size:
                    raise Damaged(f"bytes follow its end at byte {found.end}")
                return
            yield found
        raise CutOff(self.size)

    def _header(self) -> Header:
        magic = self._file.read(len(MAGIC) + 1)
        if len(magic) <= len(MAGIC) and MAGIC.startswith(magic):
            raise CutOff(self.size)
        if magic[: len(MAGIC)] != MAGIC:
            raise Damaged("not a file of a kvd state directory")
        version = magic[len(MAGIC) :].decode("latin-1")
        if version not in map(str, READABLE):
            raise Damaged(f"kvd {VERSION} cannot read its format {version!r}")
        self.whole = len(magic)
        first = self._frame(MAX_HEADER_BYTES)
        if first.kind != HEADER:
            raise Damaged("it has no header")
        self.whole = first.end
        members = unpacked(first.content)
        try:
            moments = ClockReading(**members.pop("moments"))
            return Header(Content(members.pop("content")), moments=moments, **members)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise Damaged(f"its header is not understood: {error}") from None

    def _frame(self, most: int = MAX_FRAME_BYTES) -> Frame:
        """Reads the frame at byte `whole`, which may have at most `most` bytes."""
        self._file.seek(self.whole)
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise CutOff(self.size)
        size, checksum = _HEAD.unpack(head)
        if not 0 < size <= most:
            raise Damaged(f"the length at byte {self.whole} is wrong")
        body = self._file.read(size)
        if len(body) < size:
            raise CutOff(self.size)
        if zlib.crc32(body) != checksum:
            raise Damaged(f"the checksum at byte {self.whole} is wrong")
        return Frame(body[0], body[1:], self.whole + _HEAD.size + size)

    def _sound_behind(self, kind: int) -> bool:
        """Returns whether a sound frame follows the faulty one: then the fault is no torn end.

        The faulty frame's length may itself be wrong, so the next frame may begin anywhere. Bytes
        may be a frame if they have the kind, and so has the frame after them, if any; the checksum
        proves it.
        """
        self._file.seek(self.whole)
        rest = self._file.read(self.size - self.whole)
        kinds = bytes((kind,))
        at = rest.find(kinds, _HEAD.size + 1)
        while at != -1:
            size, checksum = _HEAD.unpack_from(rest, at - _HEAD.size)
            end = at + size
            next_kind = rest[end + _HEAD.size : end + _HEAD.size + 1]
            is_likely = size > 0 and (end == len(rest) or next_kind == kinds)
            if is_likely and zlib.crc32(memoryview(rest)[at:end]) == checksum:
                return True
            at = rest.find(kinds, at + 1)
        return False


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
