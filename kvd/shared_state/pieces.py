"""Writes the head and the pieces of a view as bytes, and reads them again.

    view:WRITER      head     which steps are in the view, and how many pieces it has
    view:WRITER:N    pieces   live requests and sessions, ended requests

Both are maps in msgpack. Readers pass over a head in a form that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from kvd.model import PartitionKey
from kvd.shared_state.entries import (
    FORM,
    Dot,
    LedgerName,
    Name,
    Outputs,
    Position,
    dot_of,
    moment_of,
    number_of,
    packed_dots,
    packed_ledgers,
    read_dots,
    read_ledgers,
    understanding,
    unpacked,
)
from kvd.wire.lifecycle import Face


@dataclass(frozen=True, slots=True)
class ViewHead:
    """The head of a writer's view: which steps are in it."""

    number: int  # of the view; the key of its pieces contains it
    pieces: int
    size_bytes: int
    numbers: Mapping[str, int]  # by writer: the last step that was in it when it was begun
    position: Position  # up to which the writer had read the stream then
    own: int  # number of the writer's own last step then, sent or not
    served: list[tuple[str, str | None]]  # models and tenants; empty means all

    def packed(self) -> bytes:
        members = {
            "v": FORM,
            "number": self.number,
            "pieces": self.pieces,
            "bytes": self.size_bytes,
            "numbers": dict(self.numbers),
            "position": str(self.position),
            "own": self.own,
            "partial": False,  # earlier versions do not read a view that does not say so
            "served": self.served,
        }
        content: bytes = msgpack.packb(members)
        return content

    @classmethod
    def read(cls, content: bytes) -> ViewHead | None:
        """Returns a view's head, None if its form is not known here; raises Unreadable."""
        with understanding("a view"):
            members = unpacked(content)
            # The numbers of a partial view, which earlier versions write, count what it lacks.
            if members["v"] != FORM or members.get("partial"):
                return None
            return cls(
                number_of(members["number"]),
                number_of(members["pieces"]),
                number_of(members["bytes"]),
                {str(writer): number_of(number) for writer, number in members["numbers"].items()},
                Position.of(members["position"]),
                number_of(members["own"]),
                [(model, tenant) for model, tenant in members["served"]],
            )


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a writer's live requests, as they were at one moment."""

    clock: float  # the writer's clock at that moment
    position: Position  # up to which the writer had read the stream
    own: int  # number of the writer's own last step
    ledgers: Mapping[int, LedgerName] = field(default_factory=dict)
    records: bytes = b""  # bookings, and bindings of sessions
    dots: list[Dot | None] = field(default_factory=list)  # one a booking; None: readers skip it
    # For each booking who has reported its output blocks; None: the view's writer, up to `own`.
    outputs: list[list[Outputs] | None] = field(default_factory=list)
    elsewhere: list[tuple[Name, Dot]] = field(default_factory=list)  # without a rank at the writer
    server_clock: float | None = None  # the server's clock at `clock`; None if not stated
    also: list[list[Dot]] = field(default_factory=list)  # a booking's dots at other processes
    ended: list[Dot] = field(default_factory=list)  # ended bookings beyond the head's numbers

    def packed(self) -> bytes:
        members = {
            "t": self.clock,
            "s": self.server_clock,
            "position": str(self.position),
            "own": self.own,
            "l": packed_ledgers(self.ledgers),
            "r": self.records,
            "dots": packed_dots(self.dots),
            "outputs": self.outputs,
            "elsewhere": [
                [name.face.value, *name.key, name.request_id, dot] for name, dot in self.elsewhere
            ],
            "also": self.also,
            "ended": packed_dots(self.ended),
        }
        content: bytes = msgpack.packb(members)
        return content

    @classmethod
    def read(cls, content: bytes) -> Piece:
        """Returns a piece; raises Unreadable."""
        with understanding("a piece of a view"):
            members = unpacked(content)
            records = members["r"]
            if not isinstance(records, bytes):
                raise TypeError("its records are no bytes")
            return cls(
                moment_of(members["t"]),
                Position.of(members["position"]),
                number_of(members["own"]),
                read_ledgers(members["l"]),
                records,
                read_dots(members["dots"]),
                # Earlier versions do not write `outputs`, `s`, `also` and `ended`.
                [None if each is None else _outputs(each) for each in members.get("outputs", ())],
                list(_elsewhere(members["elsewhere"])),
                None if members.get("s") is None else moment_of(members["s"]),
                [[dot_of(*dot) for dot in each] for each in members.get("also", ())],
                _ended(members),
            )


def _outputs(rows: Any) -> list[Outputs]:
    return [Outputs(str(writer), number_of(number), number_of(n)) for writer, number, n in rows]


def _elsewhere(rows: Any) -> Iterator[tuple[Name, Dot]]:
    for face, model_name, tenant_id, request_id, dot in rows:
        key = PartitionKey(str(model_name), str(tenant_id))
        yield Name(Face(face), key, str(request_id)), dot_of(*dot)


def _ended(members: Any) -> list[Dot]:
    dots = read_dots(members["ended"]) if "ended" in members else []
    return [dot for dot in dots if dot is not None]
