"""Writes entries of the stream as bytes, and reads them again.

    entry   v: form   w: writer   n: number of its first step   m: of its last
            t: the writer's clock   s: the server's then   l: ledgers   d: dots   r: records
    ask     v: form   w: writer   ask: the writer whose view is wanted

The list of ledgers says for which face, model, tenant and block size each ledger number stands in
the writer's records. The records are those of a journal (kvd_core/ledger/records.pxd), byte for
byte. Each writer numbers its records from 1. A step that is no booking has a dot: the writer and
number of the record that booked its request, so that another request with the same id is not meant.

Other processes read what is written here, perhaps in other versions of kvd. They pass over entries
in a form that they do not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from kvd.model import PartitionKey
from kvd.wire.lifecycle import Face

FORM = 1  # number of the form of entries, views and members; other forms are not read

# Bytes of records in one entry or piece, unless a single record is longer: about 1 ms to apply.
ENTRY_BYTES = 64 * 1024

# Longest entry or piece that is read: the longest record is a booking of 2^18 blocks, 2 MiB.
MAX_ENTRY_BYTES = 4 * 1024 * 1024


class LedgerName(NamedTuple):
    """Identifies a ledger on any replica."""

    face: Face
    key: PartitionKey
    block_size: int


class Name(NamedTuple):
    """Names a request, with the face through which it was booked."""

    face: Face
    key: PartitionKey
    request_id: str


class Position(NamedTuple):
    """A position in the stream, as the server numbers it."""

    milliseconds: int
    number: int

    @classmethod
    def of(cls, text: bytes | str) -> Position:
        """Returns the position that the server's text names; raises ValueError."""
        ms, _, number = (text.decode() if isinstance(text, bytes) else text).partition("-")
        return cls(int(ms), int(number))

    def __str__(self) -> str:
        return f"{self.milliseconds}-{self.number}"


BEGINNING = Position(0, 0)


class Dot(NamedTuple):
    """Identifies a booking: the process that made it first, and the number of that step."""

    writer: str
    number: int


class Outputs(NamedTuple):
    """The output blocks of one request that one writer has reported."""

    writer: str
    number: int  # of the last of its steps that is counted here
    blocks: int


class Unreadable(ValueError):
    """An entry of another process cannot be read."""


# Errors that malformed entries may raise when they are read.
_UNFIT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@contextmanager
def understanding(what: str) -> Iterator[None]:
    """Turns errors of reading into Unreadable, since any client may have written to the server."""
    try:
        yield
    except Unreadable:
        raise
    except _UNFIT as error:
        raise Unreadable(f"{what} is not understood: {error!r}") from None


def number_of(value: Any) -> int:
    """Returns a step number or a count, as an integer that fits into msgpack again.

    Raises what int raises, and ValueError on a number out of range.
    """
    number = int(value)
    if not 0 <= number < 2**63:
        raise ValueError(f"{number} is no number of a step")
    return number


def dot_of(writer: Any, number: Any) -> Dot:
    """Returns a dot of these parts; raises what `number_of` raises."""
    return Dot(str(writer), number_of(number))


def moment_of(value: Any) -> float:
    """Returns a reading of a clock; raises what float raises, and ValueError if not finite."""
    moment = float(value)
    if not math.isfinite(moment):
        raise ValueError(f"{moment} is no time")
    return moment


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """Consecutive steps of one writer."""

    writer: str
    first: int  # number of the first step
    last: int
    clock: float  # seconds of the writer's clock when the entry was made
    ledgers: Mapping[int, LedgerName]
    dots: list[Dot | None]  # one for each step that is no booking; None: only its id is known
    records: bytes
    server_clock: float | None = None  # the server's clock at `clock`; None if not stated

    def fields(self, server_s: float) -> dict[str | bytes, bytes | str | int]:
        """Returns the server's fields; its clock is `server_s` ahead of the writer's."""
        return {
            "v": FORM,
            "w": self.writer,
            "n": self.first,
            "m": self.last,
            "t": repr(self.clock),
            "s": repr(self.clock + server_s),
            "l": packed_ledgers(self.ledgers),
            "d": packed_dots(self.dots),
            "r": self.records,
        }


@dataclass(frozen=True, slots=True)
class ViewRequest:
    """A replica's request for a new view of a writer."""

    writer: str

    def fields(self, writer: str) -> dict[str | bytes, bytes | str | int]:
        return {"v": FORM, "w": writer, "ask": self.writer}


def read_entry(fields: Mapping[Any, Any]) -> StreamEntry | ViewRequest | None:
    """Returns the content of an entry, None if its form is not known here; raises Unreadable."""
    with understanding("an entry of the stream"):
        if int(fields[b"v"]) != FORM:
            return None
        if b"ask" in fields:
            return ViewRequest(fields[b"ask"].decode())
        if len(fields[b"r"]) > MAX_ENTRY_BYTES:
            raise Unreadable(f"an entry is longer than {MAX_ENTRY_BYTES} bytes")
        return StreamEntry(
            fields[b"w"].decode(),
            number_of(fields[b"n"]),
            number_of(fields[b"m"]),
            moment_of(fields[b"t"]),
            read_ledgers(fields[b"l"]),
            read_dots(fields[b"d"]),
            fields[b"r"],
            moment_of(fields[b"s"]) if b"s" in fields else None,
        )


def last_of(fields: Mapping[Any, Any], writer: str) -> int | None:
    """Returns the number of an entry's last step if it is of this writer, else None.

    Raises Unreadable.
    """
    with understanding("the last number of an entry"):
        is_its = fields.get(b"w") == writer.encode() and b"m" in fields
        return number_of(fields[b"m"]) if is_its else None


def packed_dots(dots: Sequence[Dot | None]) -> bytes:
    """Packs dots as a list of writers, and for each dot its index in that list and its number."""
    writers = list(dict.fromkeys(dot.writer for dot in dots if dot is not None))
    indexes = {writer: index for index, writer in enumerate(writers)}
    flat = [None if dot is None else [indexes[dot.writer], dot.number] for dot in dots]
    packed: bytes = msgpack.packb([writers, flat])
    return packed


def read_dots(content: bytes) -> list[Dot | None]:
    """Returns packed dots; raises Unreadable."""
    with understanding("a list of dots"):
        writers, flat = unpacked(content)
        return [None if each is None else dot_of(writers[each[0]], each[1]) for each in flat]


def packed_ledgers(ledgers: Mapping[int, LedgerName]) -> bytes:
    rows = [[n, each.face.value, *each.key, each.block_size] for n, each in ledgers.items()]
    packed: bytes = msgpack.packb(rows)
    return packed


def read_ledgers(content: bytes) -> dict[int, LedgerName]:
    """Returns packed names of ledgers by number; raises Unreadable."""
    found = {}
    with understanding("a list of ledgers"):
        for number, face, model_name, tenant_id, block_size in unpacked(content):
            key = PartitionKey(str(model_name), str(tenant_id))
            found[int(number)] = LedgerName(Face(face), key, int(block_size))
    return found


def unpacked(content: bytes) -> Any:
    """Returns the value of msgpack; raises Unreadable."""
    try:
        return msgpack.unpackb(content, use_list=True, strict_map_key=False)
    # TypeError comes from a map with a key that is a list or a map.
    except (TypeError, ValueError, msgpack.exceptions.UnpackException) as error:
        raise Unreadable(f"an entry or a view is not msgpack: {error!r}") from None
