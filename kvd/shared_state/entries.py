"""Entries of the stream and pieces of views: as bytes, and read again.

    entry   v: form   w: writer   n: number of its first step   m: of its last
            t: the writer's clock   s: the server's then   l: ledgers   d: dots   r: records
    ask     v: form   w: writer   ask: the writer whose view is wanted

A ledger is the face, the model and tenant, and the block size that a number stands for in the
records of one writer; the records are those of a journal (kvd_core/ledger/records.pxd), byte for
byte. Each of them has a number, from 1 for each writer. A step that is no booking has a dot: it is
of the request that was booked by the record of that writer and number, whatever else has its id.

What is written here is read by other processes, perhaps of other versions: a form that is not known
is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from kvd.model import PartitionKey
from kvd.wire.lifecycle import Face

FORM = 1  # of entries, views and what members say; another one is not read

# Bytes of records in one entry or piece, but for a single longer record: about 1 ms to apply.
ENTRY_BYTES = 64 * 1024

# Bytes of one entry or piece that are read: the longest record is a booking of 2^18 blocks, 2 MiB.
MAX_ENTRY_BYTES = 4 * 1024 * 1024


class LedgerName(NamedTuple):
    """Identifies a ledger on any replica."""

    face: Face
    key: PartitionKey
    block_size: int


class Position(NamedTuple):
    """A position in the stream, as the server numbers it."""

    ms: int
    number: int

    @classmethod
    def of(cls, text: bytes | str) -> Position:
        """Raises ValueError."""
        ms, _, number = (text.decode() if isinstance(text, bytes) else text).partition("-")
        return cls(int(ms), int(number))

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}"


BEGINNING = Position(0, 0)


class Dot(NamedTuple):
    """Identifies a booking: the process that made it first, and its step number."""

    writer: str
    number: int


class Unreadable(ValueError):
    """An entry of another process cannot be read."""


# Errors that malformed entries raise when they are taken to pieces.
_UNFIT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@contextmanager
def understanding(what: str) -> Iterator[None]:
    """Turns each error of reading into Unreadable: any client can write to the server."""
    try:
        yield
    except Unreadable:
        raise
    except _UNFIT as error:
        raise Unreadable(f"{what} is not understood: {error!r}") from None


def number_of(value: Any) -> int:
    """Returns a number of a step or the like, which goes into msgpack again; raises what int does.

    Raises ValueError on one that nobody can have counted to.
    """
    number = int(value)
    if not 0 <= number < 2**63:
        raise ValueError(f"{number} is no number of a step")
    return number


def moment_of(value: Any) -> float:
    """Returns a reading of a clock; raises what float does, and ValueError on an endless one."""
    moment = float(value)
    if not math.isfinite(moment):
        raise ValueError(f"{moment} is no time")
    return moment


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """Steps of one writer, one after the other."""

    writer: str
    first: int  # number of the first of them
    last: int
    clock: float  # seconds, when they were gathered
    ledgers: Mapping[int, LedgerName]
    dots: list[Dot | None]  # one a step; None: only its id is known
    records: bytes
    server_clock: float | None = None  # the server's at `clock`; None: not said

    def fields(self, server_s: float) -> dict[str | bytes, bytes | str | int]:
        """Returns it as the server keeps it, whose clock is `server_s` before the writer's."""
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
    """A replica's wish to read the view of a writer."""

    of: str

    def fields(self, writer: str) -> dict[str | bytes, bytes | str | int]:
        return {"v": FORM, "w": writer, "ask": self.of}


def read_entry(fields: Mapping[Any, Any]) -> StreamEntry | ViewRequest | None:
    """Returns what an entry says, None for a form of another version; raises Unreadable."""
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
    """Returns the number of the last step of an entry of one writer, None if it is of another.

    Raises Unreadable.
    """
    with understanding("the last number of an entry"):
        is_its = fields.get(b"w") == writer.encode() and b"m" in fields
        return number_of(fields[b"m"]) if is_its else None


def packed_dots(dots: list[Dot | None]) -> bytes:
    """Returns them as a list of writers, and for each dot the index there and the number."""
    writers = list(dict.fromkeys(dot.writer for dot in dots if dot is not None))
    indexes = {writer: index for index, writer in enumerate(writers)}
    flat = [None if dot is None else [indexes[dot.writer], dot.number] for dot in dots]
    packed: bytes = msgpack.packb([writers, flat])
    return packed


def read_dots(content: bytes) -> list[Dot | None]:
    """Raises Unreadable."""
    with understanding("a list of dots"):
        writers, flat = unpacked(content)
        return [None if each is None else _dot(writers[each[0]], each[1]) for each in flat]


def packed_ledgers(ledgers: Mapping[int, LedgerName]) -> bytes:
    rows = [[n, each.face.value, *each.key, each.block_size] for n, each in ledgers.items()]
    packed: bytes = msgpack.packb(rows)
    return packed


def read_ledgers(content: bytes) -> dict[int, LedgerName]:
    """Raises Unreadable."""
    found = {}
    with understanding("a list of ledgers"):
        for number, face, model_name, tenant_id, block_size in unpacked(content):
            key = PartitionKey(str(model_name), str(tenant_id))
            found[int(number)] = LedgerName(Face(face), key, int(block_size))
    return found


def unpacked(content: bytes) -> Any:
    """Returns what msgpack says; raises Unreadable."""
    try:
        return msgpack.unpackb(content, use_list=True, strict_map_key=False)
    # TypeError: a map has a key that is a list or a map.
    except (TypeError, ValueError, msgpack.exceptions.UnpackException) as error:
        raise Unreadable(f"an entry or a view is not msgpack: {error!r}") from None


# ---- views


@dataclass(frozen=True, slots=True)
class ViewHead:
    """The head of a writer's view: the steps that it stands for."""

    number: int  # of the view; its pieces carry it in their name
    pieces: int
    size_bytes: int
    numbers: Mapping[str, int]  # up to which steps of each writer were in it when it was begun
    position: Position  # up to which the stream had been read then
    own: int  # number of the writer's own last step that was on its way then
    partial: bool  # it does not have all that lives: what it lacks says nothing
    served: list[tuple[str, str | None]]  # models and tenants; empty is all

    def packed(self) -> bytes:
        said = {
            "v": FORM,
            "number": self.number,
            "pieces": self.pieces,
            "bytes": self.size_bytes,
            "numbers": dict(self.numbers),
            "position": str(self.position),
            "own": self.own,
            "partial": self.partial,
            "served": self.served,
        }
        content: bytes = msgpack.packb(said)
        return content

    @classmethod
    def read(cls, content: bytes) -> ViewHead | None:
        """Returns a view's head, None for a form of another version; raises Unreadable."""
        with understanding("a view"):
            said = unpacked(content)
            if said["v"] != FORM:
                return None
            return cls(
                number_of(said["number"]),
                number_of(said["pieces"]),
                number_of(said["bytes"]),
                {str(writer): number_of(number) for writer, number in said["numbers"].items()},
                Position.of(said["position"]),
                number_of(said["own"]),
                bool(said["partial"]),
                [(model, tenant) for model, tenant in said["served"]],
            )


class Outputs(NamedTuple):
    """Output blocks of one request that one writer has reported."""

    writer: str
    number: int  # of the last step that is in here
    blocks: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of what a writer has live, as it was at one moment."""

    clock: float  # the writer's
    position: Position  # up to which the stream had been read
    own: int  # number of the writer's last own step
    ledgers: Mapping[int, LedgerName] = field(default_factory=dict)
    records: bytes = b""  # bookings, and bindings of sessions
    dots: list[Dot | None] = field(default_factory=list)  # one a booking; None: not to be sent
    # One for each booking: the writers of its output blocks; None: that of the view, up to `own`.
    outputs: list[list[Outputs] | None] = field(default_factory=list)
    # Live bookings without a rank here: a face, model, tenant, request id and dot each.
    elsewhere: list[tuple[str, str, str, str, Dot]] = field(default_factory=list)
    server_clock: float | None = None  # the server's at `clock`; None: not said

    def packed(self) -> bytes:
        said = {
            "t": self.clock,
            "s": self.server_clock,
            "position": str(self.position),
            "own": self.own,
            "l": packed_ledgers(self.ledgers),
            "r": self.records,
            "dots": packed_dots(self.dots),
            "outputs": self.outputs,
            "elsewhere": self.elsewhere,
        }
        content: bytes = msgpack.packb(said)
        return content

    @classmethod
    def read(cls, content: bytes) -> Piece:
        """Raises Unreadable."""
        with understanding("a piece of a view"):
            said = unpacked(content)
            records = said["r"]
            if not isinstance(records, bytes):
                raise TypeError("its records are no bytes")
            return cls(
                moment_of(said["t"]),
                Position.of(said["position"]),
                number_of(said["own"]),
                read_ledgers(said["l"]),
                records,
                read_dots(said["dots"]),
                # Earlier versions do not say `outputs` and `s`.
                [None if each is None else _outputs(each) for each in said.get("outputs", ())],
                list(_elsewhere(said["elsewhere"])),
                None if said.get("s") is None else moment_of(said["s"]),
            )


def _dot(writer: Any, number: Any) -> Dot:
    return Dot(str(writer), number_of(number))


def _outputs(rows: Any) -> list[Outputs]:
    return [Outputs(str(writer), number_of(number), number_of(n)) for writer, number, n in rows]


def _elsewhere(rows: Any) -> Iterator[tuple[str, str, str, str, Dot]]:
    for face, model_name, tenant_id, request_id, dot in rows:
        yield Face(face).value, str(model_name), str(tenant_id), str(request_id), _dot(*dot)
