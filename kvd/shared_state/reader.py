"""Reads the steps of other processes: the stream, and after a gap the views that have the rest.

Every entry up to the position has been applied, is described by a merged view, or belongs to a gap
that is noted, whenever a session may end. So a view that is merged takes the position back to where
its writer had read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple, NoReturn

import trio

from kvd.shared_state.entries import (
    BEGINNING,
    Position,
    StreamEntry,
    Unreadable,
    ViewRequest,
    last_of,
    read_entry,
)
from kvd.shared_state.known import KnownState, SessionPart
from kvd.shared_state.members import Member
from kvd.shared_state.merge import Merge
from kvd.shared_state.server import ServerLink
from kvd.shared_state.views import read_head, read_pieces
from kvd.telemetry.logs import get_logger

READ_PAUSE_S = 0.005  # pause after steps were read
ENTRIES_AT_ONCE = 64  # entries read at once: at most 4 MiB, except with bookings of huge prompts

ENTRY_WAIT = 0.1  # leases that the server waits for new entries at most
REQUEST_AGAIN = 0.2  # leases between two requests for the view of one writer
GIVE_UP = 1.0  # leases after which missing steps of a process that is gone are given up

log = get_logger(__name__)


class Announced(NamedTuple):
    """The number up to which a process has announced that it has a writer's steps."""

    source: str
    writer: str
    number: int


class StreamReader(SessionPart):
    """Follows the other writers while the server is connected."""

    def __init__(self, link: ServerLink, known: KnownState, want_view: Callable[[], None]) -> None:
        """Calls `want_view` when another process asks for our view."""
        super().__init__(link, known)
        self._want_view = want_view
        self._request_at: dict[str, float] = {}  # by writer: when its view may be requested again
        self._behind_since: dict[str, float] = {}
        self._expected: list[Announced] = []  # of a tick ago
        self._source: dict[str, str] = {}  # by writer with a gap: whose view has more of its steps
        self._has_logged_unreadable = False

    async def run(self) -> NoReturn:
        wait_ms = max(1, round(1000 * ENTRY_WAIT * self._lease_s))  # 0 would mean no limit
        while True:
            position = str(self._progress.position)
            found = await self._client.xread(
                {self._keys.ops: position}, count=ENTRIES_AT_ONCE, block=wait_ms
            )
            for entries in (found or {}).values():
                for each in entries:
                    await self._take(Position.of(each.identifier), each.field_values)
            if self._progress.behind:
                await self.heal()
            if found:
                await trio.sleep(READ_PAUSE_S)

    # ---- the stream

    async def end(self) -> Position:
        """Returns the position of the last entry of the stream."""
        last = await self._client.xrevrange(self._keys.ops, count=1)
        return Position.of(last[0].identifier) if last else BEGINNING

    async def check_stream(self) -> None:
        """Reads the stream from its start if the server, emptied or replaced, lost entries."""
        position = self._progress.position  # before asking, since more may be read meanwhile
        if await self.end() < position:
            self._fleet.stats.lost_stream += 1
            self._progress.position = BEGINNING

    async def catch_up(self, end: Position) -> None:
        """Reads the stream from our position up to another one, if that is later."""
        while self._progress.position < end:
            found = await self._client.xrange(
                self._keys.ops,
                start=f"({self._progress.position}",
                end=str(end),
                count=ENTRIES_AT_ONCE,
            )
            for each in found:
                await self._take(Position.of(each.identifier), each.field_values)
            if not found:  # the rest has been dropped
                self._progress.position = end

    async def _take(self, position: Position, fields: Mapping[Any, Any]) -> None:
        """Applies one entry, even if it is malformed, and moves the position behind it.

        If the session ends meanwhile, the next one applies the rest of the entry.
        """
        self._fleet.note_entry(sum(len(value) for value in fields.values()))
        try:
            await self._take_fields(position, fields)
        except ValueError as error:  # Unreadable, or malformed records
            self._note_unreadable(error)
        self._progress.position = max(self._progress.position, position)

    async def _take_fields(self, position: Position, fields: Mapping[Any, Any]) -> None:
        """Applies the fields of an entry; raises ValueError if they are malformed."""
        progress = self._progress
        if (settled := last_of(fields, progress.writer)) is not None:
            settled = min(settled, progress.own)  # another client may have forged the entry
            progress.settled = max(progress.settled, settled)
            return
        entry = read_entry(fields)
        if isinstance(entry, ViewRequest):
            if entry.writer == progress.writer:
                self._want_view()
        elif entry is None:
            self._fleet.stats.unknown_form += 1
        else:
            await self._apply(entry, position)

    def _note_unreadable(self, error: ValueError) -> None:
        """Counts an unreadable entry and logs the first of a session."""
        self._fleet.stats.unreadable += 1
        if not self._has_logged_unreadable:
            log.warning("shared_state_unreadable", reason=str(error))
        self._has_logged_unreadable = True

    async def _apply(self, entry: StreamEntry, position: Position) -> None:
        sent_at = entry.server_clock
        async with self._at_rest:
            made_at = self._clock.ours(position.milliseconds / 1000 if sent_at is None else sent_at)
            await self._outbox.go_through(self._mirror.take(entry, position, made_at))
            self._is_caught_up(entry.writer)

    # ---- gaps

    def expect(self, found: Mapping[str, Member]) -> None:
        """Notes the steps that others announce: their own, and those of processes that are gone."""
        self._expected = [
            Announced(source, writer, number)
            for source, member in found.items()
            for writer, number in member.numbers.items()
            if writer != self._progress.writer and (writer == source or writer not in found)
        ]

    def note_gaps(self) -> None:
        """Notes expected steps that are missing here, and who has them."""
        for each in self._expected:
            if each.number > self._progress.numbers.get(each.writer, 0):
                self._progress.missed(each.writer, each.number)
                self._source[each.writer] = each.source

    async def heal(self) -> None:
        """Merges views that have the missing steps of writers with a gap."""
        now = trio.current_time()
        for writer in list(self._progress.behind):
            since = self._behind_since.setdefault(writer, now)
            try:
                is_whole = await self._merge(writer)
            except Unreadable as error:
                self._note_unreadable(error)
                is_whole = False
            if is_whole:
                continue
            source = self._source.get(writer, writer)
            is_there = source in self._fleet.members
            is_late = now - since > GIVE_UP * self._lease_s
            if not is_there and (is_late or not self._fleet.has_joined):
                self._give_up(writer)
            elif is_there and now >= self._request_at.get(source, now):
                await self._request_view(source, now)

    async def _request_view(self, source: str, now: float) -> None:
        self._request_at[source] = now + REQUEST_AGAIN * self._lease_s
        request = ViewRequest(source).fields(self._progress.writer)
        asking = self._client.xadd(self._keys.ops, field_values=request)
        await self._fleet.lets(asking, "stream")

    def _give_up(self, writer: str) -> None:
        """Gives up the gap of a process that is gone; views of others may still have its steps."""
        del self._progress.behind[writer]
        self._forget_gap(writer)
        self._fleet.stats.given_up += 1

    def _is_caught_up(self, writer: str) -> bool:
        if not self._progress.catches_up(writer):
            return False
        self._forget_gap(writer)
        return True

    def _forget_gap(self, writer: str) -> None:
        self._source.pop(writer, None)
        self._behind_since.pop(writer, None)

    async def _merge(self, writer: str) -> bool:
        """Merges a view that has more steps of a writer; returns whether its gap is closed.

        That is the writer's own view, or if it is gone, the view of a process that has read more.
        """
        if self._is_caught_up(writer):
            return True
        progress = self._progress
        source = self._source.get(writer, writer)
        head = await read_head(self._client, self._keys, source)
        if head is None or head.numbers.get(writer, 0) <= progress.numbers.get(writer, -1):
            return False
        merge = Merge(self._mirror, source, head)
        pieces = read_pieces(self._client, self._keys, source, head, self._views.stats)
        async with aclosing(pieces):
            async for piece in pieces:
                at = piece.server_clock
                made_at = trio.current_time() if at is None else self._clock.ours(at)
                async with self._at_rest:
                    await self._outbox.go_through(merge.take(piece, made_at))
        async with self._at_rest:
            await self._outbox.go_through(merge.finish())
        end, progress.position = progress.position, min(progress.position, head.position)
        await self.catch_up(end)
        return self._is_caught_up(writer)
