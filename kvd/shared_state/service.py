"""The part of the daemon that shares state: it keeps a session with the server.

    connected ──> Session ── ends by a fault ──> a pause ──> connected ..
       the known state and the steps still to be sent outlive each session

Nothing waits for the server: requests are booked and answered with the state that is known here,
and processes that have missed steps read them later.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import fields
from secrets import token_hex
from typing import Any, NoReturn

import trio

from kvd.index.served_models import ServedModels
from kvd.persistence.journal import SharedUntil
from kvd.replica_sync.deduplication import Deduplicator
from kvd.selection.service import Selections
from kvd.shared_state.booked import BOUND, BookedHere, Faces
from kvd.shared_state.catalog import Catalog, CatalogStats
from kvd.shared_state.fleet import KnownFleet
from kvd.shared_state.keys import Keys
from kvd.shared_state.mirror import Mirror
from kvd.shared_state.outbox import Outbox
from kvd.shared_state.server import ServerError, connected
from kvd.shared_state.session import Session
from kvd.shared_state.views import Views
from kvd.shared_state.writer import FLUSH_S
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd.telemetry.logs import get_logger
from kvd.telemetry.metrics import Family, by_label, counter, gauge
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
        self._at_rest = trio.Lock()
        self._catalog = catalog
        affinity = selections.affinity
        here = BookedHere(faces, affinity, journal, trio.current_time)
        self._mirror = Mirror(writer, here, deduplicator, served.serves, trio.current_time)
        self._outbox = Outbox(journal, self._mirror, ledgers, faces)
        self._views = Views(
            self._mirror, self._outbox, faces, affinity, served.listed, self._at_rest
        )
        self._shared_until = shared_until
        self._fleet = KnownFleet(served)
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
        self._mirror.note_restored()
        self._deduplicator.resume()
        self._outbox.introduce()
        await self._catalog.note_restored()

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
                        client,
                        self._keys,
                        self._mirror,
                        self._outbox,
                        self._views,
                        self._catalog,
                        self._at_rest,
                        self._fleet,
                        self._shared_until.note,
                        platform.node(),
                        self._server.advertised,
                        self._served.listed,
                        lease_s,
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
        fleet, mirror, outbox = self._fleet, self._mirror, self._outbox
        stats, of_mirror, of_views = fleet.stats, mirror.stats, self._views.stats
        progress = mirror.progress
        help = "Whether the server of the shared state is connected"
        yield gauge("kvd_shared_state_connected", help, int(fleet.is_connected))
        help = "Number of other processes that share this state"
        yield gauge("kvd_shared_state_replicas", help, len(fleet.members))
        help = "Number of other processes whose latest steps have not arrived here"
        yield gauge("kvd_shared_state_behind", help, len(progress.behind))
        help = "Number of live requests whose rank is not registered here"
        yield gauge("kvd_shared_state_waiting_requests", help, len(mirror.waiting))
        help = "Total size of the steps that wait for the server in bytes"
        yield gauge("kvd_shared_state_unsent_bytes", help, len(outbox))
        help = "Number of connections to the server that were lost"
        yield counter("kvd_shared_state_losses_total", help, self._losses)
        for name, help, count in (
            ("entries_written", "Number of entries written to the stream", stats.entries_written),
            ("entries_read", "Number of entries read from the stream", stats.entries_read),
            ("bytes_written", "Total size of the steps written in bytes", stats.bytes_written),
            ("bytes_read", "Total size of the steps read in bytes", stats.bytes_read),
            ("unreadable", "Number of entries and views that could not be read", stats.unreadable),
            (
                "unknown_form",
                "Number of entries skipped because another version wrote them",
                stats.unknown_form,
            ),
            ("refused", "Number of writes that the server refused", stats.refused),
            (
                "wrong_keys",
                "Number of tries to connect that found a key of another program on the server",
                stats.wrong_keys,
            ),
            ("lost_stream", "Number of times that the server had lost entries", stats.lost_stream),
            ("given_up", "Number of gaps given up because their process is gone", stats.given_up),
            ("steps", "Number of steps of other processes applied", of_mirror.steps),
            ("bookings", "Number of requests of other processes booked", of_mirror.bookings),
            ("ended", "Number of requests that a view showed to have ended", of_mirror.ended),
            ("replaced", "Number of bookings that gave way to an earlier one", of_mirror.replaced),
            (
                "left_out",
                "Number of requests of other processes not booked because a limit was reached",
                mirror.left_out,
            ),
            ("gaps", "Number of gaps in the steps of other processes", progress.gaps),
            (
                "holes",
                "Number of times that steps of this process were dropped because too many waited",
                outbox.holes,
            ),
            ("views_read", "Number of views of other processes merged", of_mirror.views),
            ("views_written", "Number of views written", of_views.written),
            ("view_bytes_written", "Total size of written views in bytes", of_views.written_bytes),
            ("view_bytes_read", "Total size of views read in bytes", of_views.read_bytes),
        ):
            yield counter(f"kvd_shared_state_{name}_total", help, count)
        help = "Number of shared registrations, by outcome"
        yield by_label(
            "kvd_shared_registrations_total",
            "counter",
            help,
            "outcome",
            {each.name: getattr(self._catalog.stats, each.name) for each in fields(CatalogStats)},
        )


def _first(faults: BaseException) -> BaseException:
    while isinstance(faults, BaseExceptionGroup):
        faults = faults.exceptions[0]
    return faults
