"""The order of a publisher's standard events, by `event_id`.

`event_id` numbers the events of a stream. An event that is not behind the last one is stale; a hole
is counted and never waited for, because nothing can bring the event back. Three stale ones in a row
that follow each other are a backend that has begun anew behind a relay, if their numbers are nearer
to the first one heard than to the last: else they are repeated. So are those that say what the
first ones of the stream have said, under the same numbers, and whatever follows them in the row.

    first ···································· last     what has been heard of a stream
       n, n+1, n+2                                       nearer to the first: begun anew,
                                                         if any of these says something else
                                     n, n+1, n+2         nearer to the last: repeated

An event costs a lookup in a dict of streams. No clock, no sockets, no logging.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from kvd.wire.envelope import StandardEvent, Stream

# Streams whose last number is remembered, ~300 bytes each; the one heard longest ago goes first. A
# publisher has one for each backend, medium, rank, adapter and salt.
MAX_STREAMS = 65_536
NEW_BEGINNING = 3  # stale events in a row, numbered one by one, that mean one
# Events at the beginning of a stream that are recognised when they come again; a number each.
RECOGNISED = 8
# Hashes, token ids and characters of stale events that are kept for a new beginning, some 60 MB;
# when there are more, none of them will be one.
MAX_BEHIND = 1_048_576


@dataclass(slots=True)
class _EventPosition:
    """The position in one stream of events."""

    first: int
    last: int
    behind: list[StandardEvent] = field(default_factory=list)  # stale ones that follow each other
    marks: dict[int, int] = field(default_factory=dict)  # of the first events, by number
    repeated: int | None = None  # the number of the last stale one, if that was repeated
    fresh: bool = False  # one of those behind says something else than the first events


class KeptStream(NamedTuple):
    """A stream's position, as one process hands it to its successor."""

    stream: Stream
    first: int
    last: int
    marks: dict[int, int]


class EventOrder:
    """The positions in all streams of one publisher's events."""

    def __init__(self) -> None:
        self._streams: dict[Stream, _EventPosition] = {}
        self._highest = -1  # event_id of the publisher
        self._behind = 0  # of MAX_BEHIND
        self.gaps = 0  # holes in event_id
        self.stale = 0  # events at or below their stream's last number
        self.beginnings = 0  # of the publisher behind a relay

    def saw(self, number: int | None) -> None:
        """Takes note of an event that is not this registration's.

        A publisher that has one counter has used a number of it for that.
        """
        self._highest = max(self._highest, -1 if number is None else number)

    def is_next(self, event: StandardEvent) -> bool:
        """Returns whether an event goes on with its stream; notes what is missing before it."""
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
        self._let_go(position)
        self._streams[stream] = position  # now the last of the dict
        if len(self._streams) > MAX_STREAMS:
            self._let_go(self._streams.pop(next(iter(self._streams))))
        self._highest = max(self._highest, number)
        return True

    def begins_anew(self, event: StandardEvent) -> list[StandardEvent]:
        """Takes note of a stale event; returns those of a new beginning once it is one."""
        assert event.event_id is not None
        position = self._streams[event.stream]
        behind = position.behind
        last = behind[-1].event_id if behind else None
        if event.event_id == last:
            return []
        if last is not None and event.event_id != last + 1:
            self._let_go(position)
        repeated = self._is_repeated(position, event)
        if repeated and event.event_id not in position.marks:
            self._let_go(position)
            return []
        if not behind and event.event_id - position.first >= position.last - event.event_id:
            return []  # nearer to the end of what has been heard: a repetition
        self._behind += event.keep()
        behind.append(event)
        position.fresh = position.fresh or not repeated
        if self._behind > MAX_BEHIND:
            for each in self._streams.values():
                self._let_go(each)
        if len(behind) < NEW_BEGINNING or not position.fresh:
            return []
        self.beginnings += 1
        self.stale -= len(behind)
        return list(behind)

    def _is_repeated(self, position: _EventPosition, event: StandardEvent) -> bool:
        """Returns whether a stale event is one of the stream's first, or in a row with one."""
        number = event.event_id
        assert number is not None
        goes_on = position.repeated is not None and number == position.repeated + 1
        known = position.marks.get(number)
        repeated = goes_on if known is None else known == _mark(event)
        position.repeated = number if repeated else None
        return repeated

    @property
    def highest(self) -> int:
        """The highest `event_id` of the publisher, -1 before the first."""
        return self._highest

    def kept(self) -> Iterator[KeptStream]:
        """Yields what another process has to know, the stream heard longest ago first."""
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
            self._let_go(self._streams.pop(stream))

    def clear(self) -> None:
        """Forgets all numbers."""
        self._streams.clear()
        self._behind = 0
        self._highest = -1

    def _let_go(self, position: _EventPosition) -> None:
        """Forgets the stale events of a stream: they are no new beginning."""
        self._behind -= sum(event.size for event in position.behind)
        position.behind.clear()
        position.fresh = False


def _mark(event: StandardEvent) -> int:
    """Returns what identifies an event among others of its number: its time and its content."""
    said = event.event
    blocks = said.get("seq_hashes") or said.get("block_hashes") or said.get("object_key")
    ends = (blocks[0], blocks[-1]) if isinstance(blocks, list) else blocks
    # The same in every process, as `hash` of a text is not.
    return crc32(repr((event.kind, said.get("timestamp"), ends)).encode())


def put_in_order(events: list[Any]) -> None:
    """Puts the standard events of each stream in the order of their numbers."""
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
