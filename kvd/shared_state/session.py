"""The tasks that run while the server is connected.

    write   within FLUSH_S      own steps ──> stream
    read    as they come        stream ──> Mirror, and after a gap: views
    keep    ten times a lease   our lease, the other processes, our view, the catalog

A session ends with the first fault of the server or of the network to it. Steps that are not yet
written stay, and the next session goes on at the position up to which this one has read. If the
server only refuses to write, since it is full, the session goes on and reads.

Two invariants hold whenever a session may end, also while it joins:

1. Every entry up to the position has been applied, is described by a merged view, or belongs to a
   gap that is noted. So a view that is merged takes the position back to where its writer had read.
2. A restored booking counts as ended only if all steps that its process knew when it was last
   shared are in the mirror: what has these and not the booking has seen its end. The server having
   had it proves nothing, since the server may have lost it before anyone read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import trio
from coredis.exceptions import ReadOnlyError, ResponseError, WrongTypeError
from coredis.tokens import PureToken

from kvd.index.served_models import ServedModels
from kvd.persistence.bookings import SharedPoint
from kvd.shared_state import members
from kvd.shared_state.catalog import Catalog
from kvd.shared_state.entries import (
    BEGINNING,
    Position,
    StreamEntry,
    Unreadable,
    ViewRequest,
    last_of,
    read_entry,
)
from kvd.shared_state.keys import Keys
from kvd.shared_state.members import Member
from kvd.shared_state.mirror import Merge, Mirror
from kvd.shared_state.outbox import Outbox
from kvd.shared_state.server import Client, WrongKey, check_types, time_of
from kvd.shared_state.views import Views, read_head, read_pieces
from kvd.telemetry.logs import get_logger

READ_PAUSE_S = 0.005  # pause after steps were read
FLUSH_S = 0.01  # pause between two writes: a command takes 0.2 ms of CPU, however many steps it has
ENTRIES_AT_ONCE = 64  # entries read at once: at most 4 MiB, except with bookings of huge prompts

# Approximate size of the stream, within MIN_ENTRIES and MAX_ENTRIES: older entries are dropped. A
# process that was away for longer reads views instead.
STREAM_BYTES = 64 * 1024 * 1024
MIN_ENTRIES, MAX_ENTRIES = 1024, 65_536

VIEW_EVERY_S = 60.0  # greatest age of our view while anything changes
PRUNE_S = 30.0  # pause between two checks for requests that ended unseen: 2 us a live request

TICK = 0.1  # leases between two checks of the fleet, and between two announcements of our own
ENTRY_WAIT = 0.1  # leases that the server waits for new entries at most
REQUEST_AGAIN = 0.2  # leases between two requests for the view of one writer
GIVE_UP = 1.0  # leases after which missing steps of a process that is gone are given up
WRITE_AGAIN = 0.1  # leases before a refused write is tried again

# Difference from which the server's clock counts as set anew: ages are off by less until then.
CLOCK_STEP_S = 0.5

log = get_logger(__name__)


@dataclass(slots=True)
class SessionStats:
    """The cost of the stream; plain numbers for metrics."""

    entries_written: int = 0
    bytes_written: int = 0
    entries_read: int = 0
    bytes_read: int = 0
    unreadable: int = 0
    unknown_form: int = 0  # entries of another version of kvd
    refused: int = 0  # writes, by a server that is full or may not be written to
    lost_stream: int = 0  # how often the server had fewer entries than had been read
    wrong_keys: int = 0  # sessions that did not begin, since a key was of another type
    given_up: int = 0  # gaps given up because their process is gone


@dataclass(slots=True)
class KnownFleet:
    """Knowledge about the fleet that outlives a session."""

    served: ServedModels  # is notified of the models that others serve
    members: dict[str, Member] = field(default_factory=dict)
    stats: SessionStats = field(default_factory=SessionStats)
    has_begun: bool = False  # the stream is read from some position on
    has_joined: bool = False  # the state that others had at our start has been read
    has_settled: bool = False  # restored bookings have been shared with all, or dropped
    shared: SharedPoint | None = None  # up to where restored bookings had been sent to the server
    is_connected: bool = False
    described_holes: int = 0  # holes in our steps that a view of ours has described
    refusals: dict[str, str] = field(default_factory=dict)  # why the server refuses, by kind

    def note_members(self, found: dict[str, Member]) -> None:
        """Notes which other processes there are, and what they serve."""
        self.members = found
        self.served.note_others(
            {each.address: each.serves for each in found.values() if each.address is not None}
        )

    def note_restored(self, shared: SharedPoint | None) -> None:
        """Notes up to where restored bookings had been sent to the server, if any."""
        self.shared = shared


class Session:
    """The work of one connection to the server."""

    def __init__(
        self,
        client: Client,
        keys: Keys,
        mirror: Mirror,
        outbox: Outbox,
        views: Views,
        catalog: Catalog,
        at_rest: trio.Lock,
        fleet: KnownFleet,
        note_shared: Callable[[SharedPoint], None],
        name: str,
        address: str | None,
        served: Collection[tuple[str, str | None]],
        lease_s: float,
    ) -> None:
        self._client = client
        self._keys = keys
        self._mirror = mirror
        self._outbox = outbox
        self._views = views
        self._catalog = catalog
        self._at_rest = at_rest
        self._fleet = fleet
        self._note_shared = note_shared
        self._about = name, address, tuple(served)
        self._lease_s = lease_s
        self._stats = fleet.stats
        self._viewed_at = -VIEW_EVERY_S
        self._viewed_numbers: dict[str, int] = {}
        self._read_since_view = 0
        self._view_wanted = trio.Event()  # a new view of ours is wanted
        self._request_at: dict[str, float] = {}  # by writer: when its view may be requested again
        self._behind_since: dict[str, float] = {}
        # Announcements a tick ago: a process, and the number up to which it has a writer's steps.
        self._expected: list[tuple[str, str, int]] = []
        self._source: dict[str, str] = {}  # by writer with a gap: whose view has more of its steps
        self._entry_bytes = 1024.0  # mean size of the entries read lately
        self._has_logged_unreadable = False
        self._holes = outbox.holes  # number of holes for which a view has been requested
        self._rebooked_at: int | None = None  # the catalog's `changes` at the last rebooking
        self._server_s = 0.0  # the server's clock minus ours

    async def run(self, joined: Callable[[], None], stopping: trio.Event) -> None:
        """Runs until `stopping` is set, and then writes the last steps.

        Calls `joined` when the state of the others has been read. Raises what the client raises,
        perhaps in an exception group.
        """
        await self._note_clock()
        async with trio.open_nursery() as nursery:
            await self._join()
            joined()
            for task in (self._write, self._read, self._keep, self._show):
                nursery.start_soon(task)
            await stopping.wait()
            nursery.cancel_scope.cancel()
        await self.flush()
        await members.leave(self._client, self._keys, self._mirror.writer)

    async def _note_clock(self) -> bool:
        """Compares the server's clock with ours; returns whether it had been set.

        Between two readings the server's clock may be set, or this machine may be suspended. Ages
        by the old difference would let other processes expire live requests. An answer that takes
        long shows a step only if it is larger than that time.
        """
        before = trio.current_time()
        server = await time_of(self._client, self._keys)
        after = trio.current_time()
        if server - after - CLOCK_STEP_S <= self._server_s <= server - before + CLOCK_STEP_S:
            return False
        self._server_s = server - (before + after) / 2
        return True

    def _age_s(self, server_clock: float) -> float:
        """Returns the age in seconds of a moment of the server clock."""
        return max(0.0, trio.current_time() + self._server_s - server_clock)

    # ---- joining

    async def _join(self) -> None:
        """Reads the state of the others, and announces this process.

        Registrations come first, so that the bookings of others find their ranks.
        """
        mirror = self._mirror
        try:
            await check_types(self._client, self._keys)
        except WrongKey:
            self._stats.wrong_keys += 1
            raise
        await self._check_stream()
        await self._sync_catalog()
        if self._fleet.has_joined:
            await self._introduce()
            return
        end = await self._end()
        if not self._fleet.has_begun:  # views have what comes before
            mirror.position = end
            self._fleet.has_begun = True
        await self._catch_up(end)  # from where an earlier session ended while it joined
        found, gone = await members.listed(self._client, self._keys, mirror.writer)
        self._fleet.note_members(found)
        for writer in (*gone, *found):
            mirror.missed(writer, found[writer].numbers.get(writer, 0) if writer in found else 1)
        await self._heal()
        self._expected = self._announced(found)
        self._note_gaps()
        self._fleet.has_joined = True
        await self._settle()
        await self._introduce()

    async def _sync_catalog(self) -> None:
        await self._catalog.sync(self._client, self._keys, partial(self._try, what="catalog"))

    async def _settle(self) -> None:
        """Decides on restored bookings that nobody else knows, once all views have been read.

        If these have all that had been shared, a booking among that ended while this process was
        away. All other bookings are live, as far as anyone knows, and become ours.
        """
        mirror = self._mirror
        if self._fleet.has_settled or mirror.behind:
            return
        async with self._at_rest:
            shared = self._fleet.shared
            if shared is not None and mirror.has_all(shared.numbers):
                await self._in_slices(mirror.drop_unknown(shared.at))
            await self._in_slices(mirror.claim())
        self._fleet.has_settled = True

    async def _in_slices(self, work: Iterator[None]) -> None:
        """Goes through bookings in slices, while clients make new ones."""
        await self._outbox.drain()
        for _ in work:
            await trio.lowlevel.checkpoint()
            await self._outbox.drain()

    async def _introduce(self) -> None:
        await self._write_view()
        await self._announce()

    async def _end(self) -> Position:
        """Returns the position of the last entry of the stream."""
        last = await self._client.xrevrange(self._keys.ops, count=1)
        return Position.of(last[0].identifier) if last else BEGINNING

    async def _check_stream(self) -> None:
        """Reads the stream from its start if the server, emptied or replaced, lost entries."""
        position = self._mirror.position  # before asking, since more may be read meanwhile
        if await self._end() < position:
            self._stats.lost_stream += 1
            self._mirror.position = BEGINNING

    # ---- writing

    async def _write(self) -> NoReturn:
        while True:
            await trio.sleep(FLUSH_S)
            if self._outbox.has_unsent:
                await self.flush()

    async def flush(self) -> None:
        """Writes all steps so far."""
        outbox = self._outbox
        await outbox.drain()
        if outbox.holes != self._holes:
            self._holes = outbox.holes
            self._view_wanted.set()
        while outbox.entries:
            entry = outbox.entries[0]
            writing = self._client.xadd(
                self._keys.ops,
                field_values=entry.fields(self._server_s),
                trim_strategy=PureToken.MAXLEN,
                trim_operator=PureToken.APPROXIMATELY,
                threshold=self._most_entries(),
            )
            if not await self._try(writing, "stream"):
                await trio.sleep(WRITE_AGAIN * self._lease_s)
                continue
            if outbox.entries and outbox.entries[0] is entry:
                outbox.sent()
            self._stats.entries_written += 1
            self._stats.bytes_written += len(entry.records)
        is_all_there = not outbox.has_unsent and outbox.holes == self._fleet.described_holes
        if self._fleet.has_settled and is_all_there:
            mirror = self._mirror
            numbers = mirror.numbers | {mirror.writer: mirror.own}
            self._note_shared(SharedPoint(trio.current_time(), numbers))

    def _most_entries(self) -> int:
        """Returns how many entries the stream keeps, given their mean size."""
        return int(min(MAX_ENTRIES, max(MIN_ENTRIES, STREAM_BYTES / self._entry_bytes)))

    async def _try(self, command: Any, what: str) -> bool:
        """Runs a command that writes; returns False if the server refuses it.

        Raises what else the client raises. The server may refuse some kinds of writes alone, if the
        user has only some rights.
        """
        refusals = self._fleet.refusals
        try:
            await command
        except (ReadOnlyError, WrongTypeError):
            # The server has become a copy, or a key is not ours: a new session finds out more.
            raise
        except ResponseError as error:
            self._stats.refused += 1
            if not refusals:
                log.warning("shared_state_refused", reason=str(error))
            refusals[what] = str(error)
            return False
        if refusals.pop(what, None) is not None and not refusals:
            log.info("shared_state_accepted")
        return True

    # ---- reading

    async def _read(self) -> NoReturn:
        wait_ms = max(1, round(1000 * ENTRY_WAIT * self._lease_s))  # 0 would mean no limit
        while True:
            found = await self._client.xread(
                {self._keys.ops: str(self._mirror.position)}, count=ENTRIES_AT_ONCE, block=wait_ms
            )
            for entries in (found or {}).values():
                for each in entries:
                    await self._take(Position.of(each.identifier), each.field_values)
            if self._mirror.behind:
                await self._heal()
            if found:
                await trio.sleep(READ_PAUSE_S)

    async def _take(self, position: Position, fields: Any) -> None:
        """Applies one entry, even if it is malformed, and moves the position behind it.

        If the session ends meanwhile, the next one applies the rest of the entry.
        """
        self._stats.entries_read += 1
        self._read_since_view += 1
        size = sum(len(value) for value in fields.values())
        self._stats.bytes_read += size
        self._entry_bytes += (size - self._entry_bytes) / 256
        try:
            await self._take_fields(position, fields)
        except ValueError as error:  # Unreadable, or malformed records
            self._note_unreadable(error)
        self._mirror.position = max(self._mirror.position, position)

    async def _take_fields(self, position: Position, fields: Any) -> None:
        """Applies the fields of an entry; raises ValueError if they are malformed."""
        if (settled := last_of(fields, self._mirror.writer)) is not None:
            settled = min(settled, self._mirror.own)  # another client may have forged the entry
            self._mirror.settled = max(self._mirror.settled, settled)
            return
        entry = read_entry(fields)
        if isinstance(entry, ViewRequest):
            if entry.writer == self._mirror.writer:
                self._view_wanted.set()
        elif entry is None:
            self._stats.unknown_form += 1
        else:
            await self._apply(entry, position)

    def _note_unreadable(self, error: ValueError) -> None:
        """Counts an unreadable entry and logs the first of a session."""
        self._stats.unreadable += 1
        if not self._has_logged_unreadable:
            log.warning("shared_state_unreadable", reason=str(error))
        self._has_logged_unreadable = True

    async def _apply(self, entry: StreamEntry, position: Position) -> None:
        async with self._at_rest:
            await self._outbox.drain()
            sent_at = entry.server_clock
            age_s = self._age_s(position.milliseconds / 1000 if sent_at is None else sent_at)
            for _ in self._mirror.take(entry, position, age_s):
                await trio.lowlevel.checkpoint()
                await self._outbox.drain()
            if entry.writer in self._mirror.behind:
                self._caught_up(entry.writer)

    def _caught_up(self, writer: str) -> None:
        mirror = self._mirror
        if mirror.numbers.get(writer, 0) >= mirror.behind.get(writer, 0):
            mirror.behind.pop(writer, None)
            self._source.pop(writer, None)
            self._behind_since.pop(writer, None)

    async def _heal(self) -> None:
        """Merges views that have the missing steps of writers with a gap."""
        now = trio.current_time()
        for writer in list(self._mirror.behind):
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
                self._request_at[source] = now + REQUEST_AGAIN * self._lease_s
                request = ViewRequest(source).fields(self._mirror.writer)
                await self._try(self._client.xadd(self._keys.ops, field_values=request), "stream")

    def _give_up(self, writer: str) -> None:
        """Gives up the gap of a process that is gone; views of others may still have its steps."""
        del self._mirror.behind[writer]
        self._source.pop(writer, None)
        self._behind_since.pop(writer, None)
        self._stats.given_up += 1

    async def _merge(self, writer: str) -> bool:
        """Merges a view that has more steps of a writer; returns whether its gap is closed.

        That is the writer's own view, or if it is gone, the view of a process that has read more.
        """
        mirror = self._mirror
        self._caught_up(writer)
        if writer not in mirror.behind:
            return True
        source = self._source.get(writer, writer)
        head = await read_head(self._client, self._keys, source)
        if head is None or head.numbers.get(writer, 0) <= mirror.numbers.get(writer, -1):
            return False
        merge = Merge(mirror, source, head)
        pieces = read_pieces(self._client, self._keys, source, head, self._views.stats)
        async with aclosing(pieces):
            async for piece in pieces:
                age_s = 0.0 if piece.server_clock is None else self._age_s(piece.server_clock)
                async with self._at_rest:
                    await self._outbox.drain()
                    for _ in merge.take(piece, age_s):
                        await trio.lowlevel.checkpoint()
        async with self._at_rest:
            await self._outbox.drain()
            for _ in merge.finish():
                await trio.lowlevel.checkpoint()
        end, mirror.position = mirror.position, min(mirror.position, head.position)
        await self._catch_up(end)
        self._caught_up(writer)
        return writer not in mirror.behind

    async def _catch_up(self, end: Position) -> None:
        """Reads the stream from our position up to another one, if that is later."""
        while self._mirror.position < end:
            found = await self._client.xrange(
                self._keys.ops,
                start=f"({self._mirror.position}",
                end=str(end),
                count=ENTRIES_AT_ONCE,
            )
            for each in found:
                await self._take(Position.of(each.identifier), each.field_values)
            if not found:  # the rest has been dropped
                self._mirror.position = end

    # ---- keeping

    async def _rest_between(self, work: Iterator[None]) -> None:
        async with self._at_rest:
            for _ in work:
                await trio.lowlevel.checkpoint()

    async def _keep(self) -> NoReturn:
        pruned = trio.current_time()
        while True:
            await trio.sleep(TICK * self._lease_s)
            if await self._note_clock():
                self._view_wanted.set()  # the moments in our last one are by the clock before
            await self._settle()
            await self._announce()
            await self._note_members()
            await self._check_stream()
            await self._sync_catalog()
            if self._rebooked_at != self._catalog.changes:
                self._rebooked_at = self._catalog.changes
                await self._rest_between(self._mirror.rebook_waiting())
            if trio.current_time() - pruned >= PRUNE_S:
                pruned = trio.current_time()
                self._rebooked_at = None  # there may be room again where a bound was reached
                await self._rest_between(self._mirror.prune())
            if await self._is_view_due():
                self._view_wanted.set()

    async def _announce(self) -> None:
        name, address, served = self._about
        numbers = self._mirror.heard_lately() | {self._mirror.writer: self._outbox.shared_number}
        own = Member(self._mirror.writer, name, address, served, numbers, self._views.number)
        await self._try(members.announce(self._client, self._keys, own, self._lease_s), "member")

    async def _note_members(self) -> None:
        """Notes the other processes, and gaps in steps that they had announced a tick ago."""
        self._note_gaps()
        found, _ = await members.listed(self._client, self._keys, self._mirror.writer)
        self._fleet.note_members(found)
        self._expected = self._announced(found)

    def _note_gaps(self) -> None:
        """Notes expected steps that are missing here, and who has them."""
        mirror = self._mirror
        for source, writer, number in self._expected:
            if number > mirror.numbers.get(writer, 0):
                mirror.missed(writer, number)
                self._source[writer] = source

    def _announced(self, found: dict[str, Member]) -> list[tuple[str, str, int]]:
        """Returns who announces which step of which writer; those that are there tell their own."""
        return [
            (source, writer, number)
            for source, member in found.items()
            for writer, number in member.numbers.items()
            if writer != self._mirror.writer and (writer == source or writer not in found)
        ]

    async def _is_view_due(self) -> bool:
        mirror = self._mirror
        was_refused = "view" in self._fleet.refusals
        if was_refused or not await self._client.exists([self._keys.view(mirror.writer)]):
            return True
        has_changed = self._viewed_numbers != mirror.numbers | {mirror.writer: mirror.own}
        is_old = trio.current_time() - self._viewed_at >= VIEW_EVERY_S
        return has_changed and (is_old or self._read_since_view >= self._most_entries() // 2)

    async def _show(self) -> NoReturn:
        """Writes our view whenever a new one is wanted."""
        while True:
            await self._view_wanted.wait()
            self._view_wanted = trio.Event()
            await self._write_view()

    async def _write_view(self) -> None:
        mirror, fleet = self._mirror, self._fleet
        holes = self._outbox.holes if fleet.has_settled else fleet.described_holes
        if self._outbox.holes and fleet.has_settled:
            async with self._at_rest:
                await self._in_slices(mirror.claim())
        self._viewed_at = trio.current_time()
        self._viewed_numbers = mirror.numbers | {mirror.writer: mirror.own}
        self._read_since_view = 0
        if await self._try(self._views.write(self._client, self._keys, self._server_s), "view"):
            fleet.described_holes = holes
