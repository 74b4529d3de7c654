"""The order of a publisher's standard events, by `event_id`.

`event_id` numbers the events of a stream. An event whose number is not above the last one is stale.
A gap is counted and never waited for, because nothing can bring its events back. Three stale events
with consecutive numbers mean that a backend behind a relay has begun anew, if their numbers are
nearer to the first known number than to the last; otherwise they are repetitions. Events that equal
the stream's first ones, under the same numbers, are repetitions as well, and so are the events that
follow them in the row.

    first ···································· last     known numbers of a stream
       n, n+1, n+2                                       nearer to the first: begun anew,
                                                         if any of them has another content
                                     n, n+1, n+2         nearer to the last: repetitions

An event costs a lookup in a dict of streams. No clock, no sockets, no logging.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from kvd.wire.envelope import StandardEvent, Stream

# Most streams whose last number is remembered, ~300 bytes each; the least recently heard one is
# dropped first. A publisher has one for each backend, medium, rank, adapter and salt.
MAX_STREAMS = 65_536
NEW_BEGINNING = 3  # stale events with consecutive numbers that make a new beginning
# First events of a stream that are recognised when they are repeated; they cost a number each.
RECOGNISED = 8
# Most hashes, token ids and characters of stale events that are kept in case of a new beginning,
# some 60 MB; beyond that all of them are dropped.
MAX_BEHIND = 1_048_576


@dataclass(slots=True)
class _EventPosition:
    """The position in one stream of events."""

    first: int
    last: int
    behind: list[StandardEvent] = field(default_factory=list)  # the present row of stale events
    marks: dict[int, int] = field(default_factory=dict)  # marks of the first events, by number
    repeated: int | None = None  # number of the last stale event, if it was a repetition
    fresh: bool = False  # some event of the row is no repetition of the first events


class KeptStream(NamedTuple):
    """A stream's position, as one process hands it over to its successor."""

    stream: Stream
    first: int
    last: int
    marks: dict[int, int]


class EventOrder:
    """The positions in all streams of one publisher's events."""

    def __init__(self) -> None:
        self._streams: dict[Stream, _EventPosition] = {}
        self._highest = -1  # highest event_id of the publisher
        self._behind = 0  # kept size of stale events, at most MAX_BEHIND
        self.gaps = 0  # gaps in event_id
        self.stale = 0  # events at or below their stream's last number
        self.beginnings = 0  # new beginnings of a backend behind a relay

    def saw(self, number: int | None) -> None:
        """Notes the number of an event that belongs to another registration.

        A publisher with one counter for all events has used a number of it for that event.
        """
        self._highest = max(self._highest, -1 if number is None else number)

    def is_next(self, event: StandardEvent) -> bool:
        """Returns whether an event continues its stream, and counts a gap before it."""
        number = event.event_id
        if number is None:
            return True
        stream = event.stream
        position = self._streams.pop(stream, None)
        if position is None:
            position = _EventPosition(number, number - 1)
        if number <= position.last:
            self._streams[stream] = position
            self.stale += 1
            return False
        if number > position.last + 1 and number != self._highest + 1:
            self.gaps += 1
        position.last = number
        position.repeated = None
        if len(position.marks) < RECOGNISED:
            position.marks[number] = _mark(event)
        self._drop_behind(position)
        self._streams[stream] = position  # now the last of the dict
        if len(self._streams) > MAX_STREAMS:
            self._drop_behind(self._streams.pop(next(iter(self._streams))))
        self._highest = max(self._highest, number)
        return True

    def begins_anew(self, event: StandardEvent) -> list[StandardEvent]:
        """Notes a stale event; returns the events of a new beginning once there is one."""
        assert event.event_id is not None
        position = self._streams[event.stream]
        behind = position.behind
        last = behind[-1].event_id if behind else None
        if event.event_id == last:
            return []
        if last is not None and event.event_id != last + 1:
            self._drop_behind(position)
        repeated = self._is_repeated(position, event)
        if repeated and event.event_id not in position.marks:
            self._drop_behind(position)
            return []
        if not behind and event.event_id - position.first >= position.last - event.event_id:
            return []  # nearer to the last number than to the first: a repetition
        self._behind += event.keep()
        behind.append(event)
        position.fresh = position.fresh or not repeated
        if self._behind > MAX_BEHIND:
            for each in self._streams.values():
                self._drop_behind(each)
        if len(behind) < NEW_BEGINNING or not position.fresh:
            return []
        self.beginnings += 1
        self.stale -= len(behind)
        return list(behind)

    def _is_repeated(self, position: _EventPosition, event: StandardEvent) -> bool:
        """Returns whether a stale event repeats one of the stream's first, or follows such one."""
        number = event.event_id
        assert number is not None
        is_next = position.repeated is not None and number == position.repeated + 1
        known = position.marks.get(number)
        repeated = is_next if known is None else known == _mark(event)
        position.repeated = number if repeated else None
        return repeated

    @property
    def highest(self) -> int:
        """The highest `event_id` of the publisher, -1 before the first."""
        return self._highest

    def kept(self) -> Iterator[KeptStream]:
        """Yields the positions for another process, the least recently heard stream first."""
        for stream, position in list(self._streams.items()):
            yield KeptStream(stream, position.first, position.last, position.marks)

    def take_over(self, highest: int, streams: Iterable[KeptStream]) -> None:
        """Goes on where another process was, before the first event."""
        self._highest = highest
        for stream, first, last, marks in streams:
            self._streams[stream] = _EventPosition(first, last, marks=marks)

    def forget(self, backend: int) -> None:
        """Forgets the streams of a backend."""
        for stream in [each for each in self._streams if each[2] == backend]:
            self._drop_behind(self._streams.pop(stream))

    def clear(self) -> None:
        """Forgets all numbers."""
        self._streams.clear()
        self._behind = 0
        self._highest = -1

    def _drop_behind(self, position: _EventPosition) -> None:
        """Drops the kept stale events of a stream: they are no new beginning."""
        self._behind -= sum(event.size for event in position.behind)
        position.behind.clear()
        position.fresh = False


def _mark(event: StandardEvent) -> int:
    """Returns a mark that tells an event from others of its number, from its time and content."""
    members = event.event
    blocks = members.get("seq_hashes") or members.get("block_hashes") or members.get("object_key")
    ends = (blocks[0], blocks[-1]) if isinstance(blocks, list) else blocks
    # The same in every process, unlike `hash` of a text.
    return crc32(repr((event.kind, members.get("timestamp"), ends)).encode())


def put_in_order(events: list[Any]) -> None:
    """Sorts the standard events of each stream by their numbers; all other events stay in place."""
    positions: dict[Stream, list[int]] = {}
    for at, event in enumerate(events):
        if isinstance(event, StandardEvent) and event.event_id is not None:
            positions.setdefault(event.stream, []).append(at)
    for ats in positions.values():
        if len(ats) > 1:
            ordered = sorted((events[at] for at in ats), key=_number)
            for at, event in zip(ats, ordered, strict=True):
                events[at] = event


def _number(event: object) -> int:
    assert isinstance(event, StandardEvent) and event.event_id is not None
    return event.event_id
