"""Writes this process's steps to the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import trio
from coredis.tokens import PureToken

from kvd.persistence.bookings import SharedPoint
from kvd.shared_state.known import KnownState, SessionPart
from kvd.shared_state.server import ServerLink

FLUSH_S = 0.01  # pause between two writes: a command takes 0.2 ms of CPU, however many steps it has
WRITE_AGAIN = 0.1  # leases before a refused write is tried again


class StreamWriter(SessionPart):
    """Writes the entries of the outbox while the server is connected."""

    def __init__(
        self,
        link: ServerLink,
        known: KnownState,
        want_view: Callable[[], None],
        note_shared: Callable[[SharedPoint], None],
    ) -> None:
        """Calls `want_view` when steps were dropped, `note_shared` when all are on the server."""
        super().__init__(link, known)
        self._want_view = want_view
        self._note_shared = note_shared
        self._holes = known.outbox.holes  # number of holes for which a view has been requested
        self._noted: dict[str, int] = {}  # the numbers that were noted as shared last

    async def run(self) -> NoReturn:
        while True:
            await trio.sleep(FLUSH_S)
            if self._outbox.has_unsent:
                await self.flush()
            else:
                self._note()

    async def flush(self) -> None:
        """Writes all steps so far."""
        outbox, fleet = self._outbox, self._fleet
        await outbox.drain()
        if outbox.holes != self._holes:
            self._holes = outbox.holes
            self._want_view()
        while outbox.entries:
            entry = outbox.entries[0]
            writing = self._client.xadd(
                self._keys.ops,
                field_values=entry.fields(self._clock.ahead_s),
                trim_strategy=PureToken.MAXLEN,
                trim_operator=PureToken.APPROXIMATELY,
                threshold=fleet.most_entries(),
            )
            if not await fleet.lets(writing, "stream"):
                await trio.sleep(WRITE_AGAIN * self._lease_s)
                continue
            if outbox.entries and outbox.entries[0] is entry:
                outbox.sent()
            fleet.stats.entries_written += 1
            fleet.stats.bytes_written += len(entry.records)
        self._note()

    def _note(self) -> None:
        """Notes up to where bookings are shared, if no step waits and no view is being merged."""
        outbox, fleet, progress = self._outbox, self._fleet, self._progress
        is_all_there = not outbox.has_unsent and outbox.holes == fleet.described_holes
        if not fleet.has_settled or not is_all_there or progress.behind:
            return
        numbers = progress.all_numbers()
        if numbers != self._noted:
            self._noted = numbers
            self._note_shared(SharedPoint(trio.current_time(), numbers))
