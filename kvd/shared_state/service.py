"""The part of the daemon that shares state: it keeps a session with the server.

    connected ──> Session ── ends by a fault ──> a pause ──> connected ..
       the known state and the steps still to be sent outlive each session

Nothing waits for the server: requests are booked and answered with the state that is known here,
and processes that have missed steps read them later.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from secrets import token_hex
from typing import Any, NoReturn

import trio

from kvd.index.served_models import ServedModels
from kvd.persistence.journal import SharedUntil
from kvd.replica_sync.deduplication import Deduplicator
from kvd.selection.service import Selections
from kvd.shared_state.booked import BOUND, BookedHere, Faces
from kvd.shared_state.catalog import Catalog
from kvd.shared_state.fleet import KnownFleet
from kvd.shared_state.keys import Keys
from kvd.shared_state.known import KnownState
from kvd.shared_state.metrics import shared_state_families
from kvd.shared_state.mirror import Mirror
from kvd.shared_state.outbox import Outbox
from kvd.shared_state.server import ServerError, ServerLink, connected
from kvd.shared_state.session import Session
from kvd.shared_state.views import Views
from kvd.shared_state.writer import FLUSH_S
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd.telemetry.logs import get_logger
from kvd.telemetry.metrics import Family
from kvd.wire import affinity as sessions
from kvd.wire.affinity import Bound
from kvd.wire.lifecycle import Face
from kvd.wire.state_address import StateServer
from kvd_core.ledger.journal import Journal

# Pauses before the server is tried again, each twice the last; the longest is in leases.
FIRST_PAUSE_S, LONGEST_PAUSE = 0.2, 0.5
STOP_S = 2.0  # time that the server has at the end to take the last steps

log = get_logger(__name__)


class SharedState:
    """Shares this process's state from its start to its end."""

    def __init__(
        self,
        server: StateServer,
        journal: Journal,
        ledgers: Ledgers,
        deduplicator: Deduplicator,
        slots: SlotTrackers,
        selections: Selections,
        served: ServedModels,
        catalog: Catalog,
        shared_until: SharedUntil,
    ) -> None:
        """The ledgers record in the `journal`, which is for this alone.

        `deduplicator` has it paused until `prepare`. Restored bookings up to `shared_until` were
        sent before this process began.
        """
        faces: Faces = {Face.SLOT_TRACKER: slots, Face.SELECTION: selections.reservations}
        writer = token_hex(8)
        self._server = server
        self._keys = Keys(server.prefix)
        self._served = served
        self._journal = journal
        self._deduplicator = deduplicator
        affinity, at_rest = selections.affinity, trio.Lock()
        here = BookedHere(faces, affinity, journal, trio.current_time)
        mirror = Mirror(writer, here, deduplicator, served.serves, trio.current_time)
        outbox = Outbox(journal, mirror, ledgers, faces)
        views = Views(mirror, outbox, faces, affinity, served.listed, at_rest)
        self._known = KnownState(mirror, outbox, views, catalog, KnownFleet(served), at_rest)
        self._mirror = mirror
        self._outbox = outbox
        self._fleet = self._known.fleet
        self._shared_until = shared_until
        self._stopping = trio.Event()
        self._ended = trio.Event()
        self._joined = trio.Event()  # the state of the others has been read
        self._losses = 0  # sessions that ended by a fault
        self._fault: str | None = None  # why there is no session, as logged last
        if affinity is not None:
            affinity.bindings.subscribe(self._note_binding)

    def _note_binding(self, bound: Bound) -> None:
        self._journal.put(BOUND, sessions.encode(bound))

    async def prepare(self) -> None:
        """Notes the restored state and begins to record, before any call can have arrived."""
        self._fleet.note_restored(self._shared_until.last)
        self._mirror.note_restored(self._shared_until.ended)
        self._deduplicator.resume()
        self._outbox.introduce()
        await self._known.catalog.note_restored()

    async def run(self) -> None:
        """Keeps a session with the server until `finish`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._gather)
            await self._keep_sessions()
            nursery.cancel_scope.cancel()
        self._ended.set()

    async def _gather(self) -> NoReturn:
        """Numbers steps as they come: numbering all steps of an outage at once would take long."""
        while True:
            await trio.sleep(FLUSH_S)
            await self._outbox.drain()

    async def _keep_sessions(self) -> None:
        pause_s, lease_s = FIRST_PAUSE_S, self._server.lease_s
        while not self._stopping.is_set():
            began_at = trio.current_time()
            try:
                async with connected(self._server) as client:
                    session = Session(
                        ServerLink(client, self._keys, lease_s),
                        self._known,
                        self._shared_until.note,
                        platform.node(),
                        self._server.advertised,
                        self._served.listed,
                    )
                    await session.run(self._welcome, self._stopping)
            except* ServerError as faults:
                self._lost(faults)
            except* Exception as faults:  # the client may raise anything on a malformed answer
                self._crashed(faults)
            if trio.current_time() - began_at > lease_s:  # shorter ones may end by the same fault
                pause_s = FIRST_PAUSE_S
            with trio.move_on_after(pause_s):
                await self._stopping.wait()
            pause_s = min(LONGEST_PAUSE * lease_s, 2 * pause_s)

    def _welcome(self) -> None:
        """Notes that a session has begun, and the state of the others has been read."""
        log.info("shared_state_connected", server=str(self._server.address))
        self._fleet.is_connected = True
        self._fault = None
        self._joined.set()

    def _lost(self, faults: BaseExceptionGroup[BaseException]) -> None:
        """Notes why there is no session, and logs each reason once."""
        fault = str(_first(faults)) or type(_first(faults)).__name__
        if self._fleet.is_connected or fault != self._fault:
            log.warning("shared_state_lost", server=str(self._server.address), reason=fault)
        self._note_fault(fault)

    def _crashed(self, faults: BaseExceptionGroup[BaseException]) -> None:
        """Notes a bug, here or in the client: it costs the session; repetitions are not logged."""
        fault = repr(_first(faults))
        if fault != self._fault:
            log.exception("shared_state_crashed", server=str(self._server.address))
        self._note_fault(fault)

    def _note_fault(self, fault: str) -> None:
        self._losses += self._fleet.is_connected
        self._fleet.is_connected = False
        self._fault = fault

    async def finish(self) -> None:
        """Ends the session after its last steps are written, or after STOP_S."""
        self._stopping.set()
        with trio.move_on_after(STOP_S):
            await self._ended.wait()

    # ---- the fleet and the status

    async def addresses(self, wait_s: float) -> list[str]:
        """Returns addresses of other processes' indexes, once known or after `wait_s`."""
        with trio.move_on_after(wait_s):
            await self._joined.wait()
        members = self._fleet.members.values()
        return sorted(each.address for each in members if each.address is not None)

    def shown(self) -> dict[str, Any]:
        """Returns the members of a status."""
        refusals = iter(self._fleet.refusals.values())
        return {
            "server": str(self._server.address),
            "connected": self._fleet.is_connected,
            "replicas": len(self._fleet.members),
            "behind": len(self._mirror.progress.behind),
            "fault": next(refusals, None) if self._fleet.is_connected else self._fault,
        }

    def families(self) -> Iterator[Family]:
        """Yields the families of /metrics."""
        return shared_state_families(self._known, self._losses)


def _first(faults: BaseException) -> BaseException:
    while isinstance(faults, BaseExceptionGroup):
        faults = faults.exceptions[0]
    return faults
