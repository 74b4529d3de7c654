"""The tasks that run while the server is connected.

    write   within FLUSH_S      own steps ──> stream                            writer.py
    read    as they come        stream ──> Mirror, and after a gap: views       reader.py
    keep    ten times a lease   our lease, the other processes, our view, the catalog

A session ends with the first fault of the server or of the network to it. Steps that are not yet
written stay, and the next session goes on at the position up to which this one has read. If the
server only refuses to write, since it is full, the session goes on and reads.

A restored booking counts as ended only if all steps that its process knew when it was last shared
are in the mirror: what has these and not the booking has seen its end. The server having had it
proves nothing, since the server may have lost it before anyone read it. That holds whenever a
session may end, also while it joins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import NoReturn

import trio

from kvd.persistence.bookings import SharedPoint
from kvd.shared_state import members
from kvd.shared_state.entries import Position
from kvd.shared_state.known import KnownState, SessionPart
from kvd.shared_state.members import Member
from kvd.shared_state.reader import StreamReader
from kvd.shared_state.server import ServerLink, WrongKey, check_types
from kvd.shared_state.writer import StreamWriter

VIEW_EVERY_S = 60.0  # greatest age of our view while anything changes
PRUNE_S = 30.0  # pause between two checks for requests that ended unseen: 2 us a live request

TICK = 0.1  # leases between two checks of the fleet, and between two announcements of our own


class Session(SessionPart):
    """The work of one connection to the server."""

    def __init__(
        self,
        link: ServerLink,
        known: KnownState,
        note_shared: Callable[[SharedPoint], None],
        name: str,
        address: str | None,
        served: Collection[tuple[str, str | None]],
    ) -> None:
        """Announces this process by a `name`, the `address` of its index, and what is `served`.

        `address` is None if its index is not offered; `served` has models and tenants, none of
        which means all. `note_shared` gets each point up to which all steps are on the server.
        """
        super().__init__(link, known)
        self._name = name
        self._address = address
        self._served = tuple(served)
        self._writer = StreamWriter(link, known, self._want_view, note_shared)
        self._reader = StreamReader(link, known, self._want_view)
        self._viewed_at = -VIEW_EVERY_S
        self._viewed_numbers: dict[str, int] = {}
        self._viewed_entries = known.fleet.stats.entries_read  # entries read before our last view
        self._view_wanted = trio.Event()  # a new view of ours is wanted
        self._rebooked_at: int | None = None  # the catalog's `changes` at the last rebooking

    async def run(self, joined: Callable[[], None], stopping: trio.Event) -> None:
        """Runs until `stopping` is set, and then writes the last steps.

        Calls `joined` when the state of the others has been read. Raises what the client raises,
        perhaps in an exception group.
        """
        await self._clock.note()
        async with trio.open_nursery() as nursery:
            await self._join()
            joined()
            for task in (self._writer.run, self._reader.run, self._keep, self._show):
                nursery.start_soon(task)
            await stopping.wait()
            nursery.cancel_scope.cancel()
        await self._writer.flush()
        await members.leave(self._client, self._keys, self._progress.writer)

    # ---- joining

    async def _join(self) -> None:
        """Reads the state of the others, and announces this process.

        Registrations come first, so that the bookings of others find their ranks.
        """
        progress, fleet, reader = self._progress, self._fleet, self._reader
        try:
            await check_types(self._client, self._keys)
        except WrongKey:
            fleet.stats.wrong_keys += 1
            raise
        await reader.check_stream()
        await self._sync_catalog()
        if fleet.has_joined:
            await self._introduce()
            return
        end = await reader.end()
        if not fleet.has_begun:  # views have what comes before, as far as it was announced by now
            lately = round(end.milliseconds - 2000 * TICK * self._lease_s)
            progress.position = Position(max(0, lately), 0)
            fleet.has_begun = True
        await reader.catch_up(end)  # from where an earlier session ended while it joined
        found, gone = await members.listed(self._client, self._keys, progress.writer)
        fleet.note_members(found)
        for writer in gone:
            progress.missed(writer, 1)
        for writer, member in found.items():
            progress.missed(writer, member.numbers.get(writer, 0))
        await reader.heal()
        reader.expect(found)
        reader.note_gaps()
        fleet.has_joined = True
        await self._settle()
        await self._introduce()

    async def _sync_catalog(self) -> None:
        await self._catalog.sync(
            self._client, self._keys, partial(self._fleet.lets, what="catalog")
        )

    async def _settle(self) -> None:
        """Decides on restored bookings that nobody else knows, once all views have been read.

        If these have all that had been shared, a booking among that ended while this process was
        away. All other bookings are live, as far as anyone knows, and become ours.
        """
        if self._fleet.has_settled or self._progress.behind:
            return
        shared = self._fleet.shared
        async with self._at_rest:
            if shared is not None and self._progress.has_all(shared.numbers):
                await self._outbox.go_through(self._mirror.drop_unknown(shared.at))
            await self._outbox.go_through(self._mirror.claim())
        self._fleet.has_settled = True

    async def _introduce(self) -> None:
        await self._write_view()
        await self._announce()

    # ---- keeping

    async def _keep(self) -> NoReturn:
        pruned = trio.current_time()
        while True:
            await trio.sleep(TICK * self._lease_s)
            if await self._clock.note():
                self._want_view()  # the moments in our last one are by the clock before
            await self._settle()
            await self._announce()
            await self._note_members()
            await self._reader.check_stream()
            await self._sync_catalog()
            if self._rebooked_at != self._catalog.changes:
                self._rebooked_at = self._catalog.changes
                async with self._at_rest:
                    await self._outbox.go_through(self._mirror.rebook_waiting())
            if trio.current_time() - pruned >= PRUNE_S:
                pruned = trio.current_time()
                self._rebooked_at = None  # there may be room again where a bound was reached
                async with self._at_rest:
                    await self._outbox.go_through(self._mirror.prune())
            if await self._is_view_due():
                self._want_view()

    async def _announce(self) -> None:
        progress = self._progress
        own = Member(
            progress.writer,
            self._name,
            self._address,
            self._served,
            progress.lately_heard() | {progress.writer: self._outbox.shared_number},
            self._views.number,
        )
        announcing = members.announce(self._client, self._keys, own, self._lease_s)
        await self._fleet.lets(announcing, "member")

    async def _note_members(self) -> None:
        """Notes the other processes, and gaps in steps that they had announced a tick ago."""
        self._reader.note_gaps()
        found, _ = await members.listed(self._client, self._keys, self._progress.writer)
        self._fleet.note_members(found)
        self._reader.expect(found)

    # ---- our view

    def _want_view(self) -> None:
        self._view_wanted.set()

    async def _is_view_due(self) -> bool:
        fleet, progress = self._fleet, self._progress
        was_refused = "view" in fleet.refusals
        if was_refused or not await self._client.exists([self._keys.view(progress.writer)]):
            return True
        if self._viewed_numbers == progress.all_numbers():
            return False
        entries = fleet.stats.entries_read - self._viewed_entries
        is_old = trio.current_time() - self._viewed_at >= VIEW_EVERY_S
        return is_old or entries >= fleet.most_entries() // 2

    async def _show(self) -> NoReturn:
        """Writes our view whenever a new one is wanted."""
        while True:
            await self._view_wanted.wait()
            self._view_wanted = trio.Event()
            await self._write_view()

    async def _write_view(self) -> None:
        fleet = self._fleet
        holes = self._outbox.holes if fleet.has_settled else fleet.described_holes
        if holes != fleet.described_holes:
            async with self._at_rest:
                await self._outbox.go_through(self._mirror.claim())
                await self._outbox.go_through(self._mirror.end_lost())
        self._viewed_at = trio.current_time()
        self._viewed_numbers = self._progress.all_numbers()
        self._viewed_entries = fleet.stats.entries_read
        writing = self._views.write(self._client, self._keys, self._clock.ahead_s)
        if await fleet.lets(writing, "view"):
            fleet.described_holes = holes
