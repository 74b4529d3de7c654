"""Replicas that share state through a server, in virtual time, without faces' calls."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from random import Random
from typing import Any

import trio

from kvd.index.served_models import ServedModels
from kvd.model import PartitionKey
from kvd.persistence.bookings import WHOLE, KeptRequests
from kvd.persistence.clocks import ClockTranslation
from kvd.persistence.journal import SharedUntil
from kvd.replica_sync.deduplication import Deduplicator
from kvd.shared_state.booked import BookedHere, Faces
from kvd.shared_state.catalog import Catalog
from kvd.shared_state.fleet import KnownFleet
from kvd.shared_state.keys import Keys
from kvd.shared_state.known import KnownState
from kvd.shared_state.mirror import Mirror
from kvd.shared_state.outbox import Outbox
from kvd.shared_state.server import ServerLink
from kvd.shared_state.session import Session
from kvd.shared_state.views import Views
from kvd.slots.rebooking import add_outputs, rebook
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd.wire.lifecycle import Face, Outcome
from kvd_core.ledger.journal import Journal, read
from kvd_core.ledger.ledger import ADDED
from tests.simulation.memory_server import MemoryServer
from tests.support.registrations import NoRegistrations

KEY = PartitionKey("m", "default")
OTHER_FACE = {Face.SLOT_TRACKER: Face.SELECTION, Face.SELECTION: Face.SLOT_TRACKER}
RANKS = 3
REPLICAS = 3
LEASE_S = 10.0

Request = tuple[Face, str]  # a face and an id
State = tuple[int, int, bool, int]  # rank, blocks, whether it decodes, output blocks


class OneRegistration:
    """A catalog with one worker."""

    def __init__(self, register: Callable[[], None]) -> None:
        self.changes = 0
        self._register = register

    async def sync(self, *_: object) -> None:
        if not self.changes:
            await trio.sleep(0.01)
            self._register()
            self.changes = 1


class Reservations(SlotTrackers):
    """Requests of the selection service, as far as their ledgers and steps go."""

    face = Face.SELECTION


class Replica:
    """One process: its tracker, and its sessions with the server."""

    def __init__(
        self,
        server: MemoryServer,
        name: str,
        room: int = 1 << 20,
        *,
        restored: int = 0,
        registers: bool = False,
        reserves: bool = False,
        before: Replica | None = None,
    ) -> None:
        """Begins with `restored` requests, or with those of the process `before`.

        `registers`: the catalog registers its worker. `reserves`: it has reservations, too.
        """
        self.name = name
        self.server = server
        journal = self.journal = Journal(room)
        self.kept = Journal(1 << 24)  # that of its state directory, which outlives it
        self._records = b""  # taken from it
        self.deduplicator = Deduplicator(journal, trio.current_time)
        self.deduplicator.pause()
        ledgers = self._ledgers = Ledgers(journals=[journal, self.kept])
        self.slots = SlotTrackers(1e9, ledgers, clock=trio.current_time)
        if not registers:
            self.register()
        self.served = {Face.SLOT_TRACKER: self.slots}
        if reserves:
            reservations = Reservations(1e9, ledgers, clock=trio.current_time)
            reservations.register(KEY, 1, 4, 0, RANKS)
            self.served[Face.SELECTION] = reservations
        faces: Faces = self.served
        here = BookedHere(faces, None, journal, trio.current_time)
        self.mirror = Mirror(name, here, self.deduplicator, lambda key: True, trio.current_time)
        self.outbox = Outbox(journal, self.mirror, ledgers, faces)
        at_rest = trio.Lock()
        self.views = Views(self.mirror, self.outbox, faces, None, [], at_rest)
        self.shared = SharedUntil(self.kept)
        self.fleet = KnownFleet(ServedModels())
        catalog: Any = (
            OneRegistration(self.register) if registers else Catalog(NoRegistrations(), {})  # type: ignore[arg-type]
        )
        self.known = KnownState(self.mirror, self.outbox, self.views, catalog, self.fleet, at_rest)
        self._scope = self._session = trio.CancelScope()
        for number in range(restored):
            self.book(f"old{number}", 0, list(range(128)))
        if before is not None:
            self._restore(before)
        self.mirror.note_restored(self.shared.ended)
        self.deduplicator.resume()
        self.outbox.introduce()

    def register(self) -> None:
        self.slots.register(KEY, 1, 4, 0, RANKS)

    def _restore(self, before: Replica) -> None:
        """Books what the journal of another process has, and begins a new one."""
        kept = KeptRequests()
        kept.begin(before.name, ClockTranslation(0.0))
        for record in read(before.records()):
            kept.take(record)
        kept.end()
        self.shared.restore(kept)
        self.fleet.note_restored(self.shared.last)
        for ((face, _, _), _), booking in kept.live.items():
            outcome = rebook(self.served[face], KEY, 4, booking, booking.booked.admitted_at)
            assert outcome is Outcome.APPLIED
            add_outputs(self.served[face].ledger_of(KEY), booking, 0)
        self.kept.take()
        for face, served in self.served.items():
            ledger, after = served.ledger_of(KEY), 0
            self._ledgers.introduce(self.kept, ledger, face, KEY, 4)
            while after is not None:
                after = ledger.export(self.kept, after, 1 << 20)
        assert not any(self.shared.export())
        self.kept.put(WHOLE, b"")

    def records(self) -> bytes:
        """Returns the records of the state directory's journal."""
        self._records += self.kept.take()
        return self._records

    async def run(self) -> None:
        with trio.CancelScope() as self._scope:
            while True:
                link = ServerLink(self.server, Keys("kvd"), LEASE_S)  # type: ignore[arg-type]
                session = Session(link, self.known, self.shared.note, self.name, None, [])
                with trio.CancelScope() as self._session:
                    try:
                        await session.run(lambda: None, trio.Event())
                    except* OSError:
                        pass
                await trio.sleep(0.2)

    def cut(self) -> None:
        """Ends the connection to the server."""
        self._session.cancel()

    def kill(self) -> None:
        self._scope.cancel()

    @property
    def tracker(self) -> Any:
        return self.slots.trackers[KEY]

    def book(
        self, request_id: str, rank: int, hashes: list[int], face: Face = Face.SLOT_TRACKER
    ) -> None:
        content = array("Q", hashes).tobytes()
        ledger = self.served[face].ledger_of(KEY)
        at = trio.current_time()
        number = ledger.rank_of(1, rank)
        assert number is not None
        assert ledger.add(request_id, number, content, 4 * len(hashes), at) == ADDED

    def live(self, names: list[str]) -> dict[str, State]:
        """Returns the tracker's booked requests of these ids."""
        found = self.booked([(Face.SLOT_TRACKER, name) for name in names])
        return {name: state for (_, name), state in found.items()}

    def booked(self, requests: list[Request]) -> dict[Request, State]:
        """Returns those of some requests that are booked."""
        found = {}
        for face, name in requests:
            live = self.served[face].ledger_of(KEY).request(name)
            if live is not None:
                state = live.dp_rank, live.blocks, live.prefill_complete, live.output_blocks
                found[face, name] = state
        return found


class SharingWorld:
    """The server, the replicas, and the truth."""

    def __init__(self, seed: int, nursery: trio.Nursery) -> None:
        self.random = Random(seed)
        self.server = MemoryServer(self.random.choice([5, 20, 1000]))
        self._nursery = nursery
        self._started = 0
        self._room = self.random.choice([600, 1 << 20])
        self.is_lossy = False  # bookings may be lost for good
        self.may_revive = False  # what has ended may come back
        self.booked: list[Request] = []
        self.live: dict[Request, State] = {}
        self.replicas = [self.start() for _ in range(REPLICAS)]

    def start(self, before: Replica | None = None) -> Replica:
        self._started += 1
        name = f"w{self._started}"
        replica = Replica(self.server, name, self._room, reserves=True, before=before)
        self._nursery.start_soon(replica.run)
        return replica

    async def act(self) -> None:
        random = self.random
        await trio.sleep(random.choice([0, 0, 0.003, 0.05, 1.5]))
        what = random.random()
        if what < 0.45:
            self.book()
        elif what < 0.85:
            self.go_on()
        elif what < 0.88:
            self.server.freeze()
        elif what < 0.94:
            self.server.come_back()
        elif what < 0.96:
            self.server.is_gone = True
        elif what < 0.97:
            self.server.flush()
        elif what < 0.98:
            self.server.lose(random.randrange(6))
        elif what < 0.985:
            self.server.entries.clear()
        else:
            self.kill()

    async def heal(self) -> None:
        """Brings back what is away."""
        self.server.come_back()

    def book(self) -> None:
        """Books a request, now and then by an id that the other face has used last."""
        random = self.random
        request = random.choice(list(Face)), f"r{len(self.booked)}"
        if self.booked and random.random() < 0.2:
            face, name = self.booked[-1]
            if (OTHER_FACE[face], name) not in self.booked:
                request = OTHER_FACE[face], name
        face, name = request
        rank, blocks = random.randrange(RANKS), random.randrange(1, 12)
        hashes = [random.randrange(4) for _ in range(blocks)]
        random.choice(self.replicas).book(name, rank, hashes, face)
        self.booked.append(request)
        self.live[request] = rank, blocks, False, 0

    def go_on(self) -> None:
        """Has a replica that knows a request advance or end it."""
        replica = self.random.choice(self.replicas)
        known = sorted(replica.booked(list(self.live)))
        if not known:
            return
        request = self.random.choice(known)
        face, name = request
        served = replica.served[face]
        tracker = served.trackers[KEY]
        rank, blocks, prefilled, outputs = self.live[request]
        step = self.random.randrange(4)
        if step == 0:
            served.complete(tracker, name)
            prefilled = True
        elif step == 1:
            tracker.ledger.output_block(name)
            outputs += 1
        elif step > 1:
            served.end(tracker, name)
            del self.live[request]
            return
        self.live[request] = rank, blocks, prefilled, outputs

    def kill(self) -> None:
        """Kills a replica and starts one instead that is empty, or restores its requests."""
        number = self.random.randrange(REPLICAS)
        before = self.replicas[number]
        before.kill()
        kept = self.random.choice([None, before])
        self.may_revive = True
        self.is_lossy |= kept is None
        self.server.breaks_after = self.random.choice([None, self.random.randrange(40)])
        self.replicas[number] = self.start(kept)

    def agree(self) -> bool:
        first, *others = (replica.booked(self.booked) for replica in self.replicas)
        if any(each != first for each in others):
            return False
        if self.may_revive:
            return self.is_lossy or self.live.keys() <= first.keys()
        return first == self.live

    def stretch(self) -> float:
        """Returns the largest difference between replicas in the age of a request."""
        live = [
            [each.served[face].ledger_of(KEY).request(name) for each in self.replicas]
            for face, name in self.booked
        ]
        times = [[each.admitted_at for each in known] for known in live if all(known)]
        return max((max(each) - min(each) for each in times), default=0.0)

    def differences(self) -> str:
        """Returns what the replicas disagree on, and how far each has read the others' entries."""
        found = [] if self.is_lossy else [("truth", self.live)]
        found += [(each.name, each.booked(self.booked)) for each in self.replicas]
        lines = [
            f"{request}: {[(who, live.get(request)) for who, live in found]}"
            for request in self.booked
            if len({str(live.get(request)) for _, live in found}) > 1
        ]
        for each in self.replicas:
            mirror, progress = each.mirror, each.mirror.progress
            lines.append(
                f"{each.name}: own {progress.own} told {each.outbox.shared_number} "
                f"numbers {progress.numbers} behind {progress.behind} dots "
                f"{[(*name, *known.dot) for name, known in mirror.requests.items()]} "
                f"{mirror.stats}"
            )
        return "\n".join(lines)


class Storm(SharingWorld):
    """A world in which the server is killed again and again, and replicas with it.

    A server comes back empty or with an old copy of its data, perhaps with another clock, and a
    replica with what its state directory has. Nothing that has ended comes back.
    """

    def __init__(self, seed: int, nursery: trio.Nursery) -> None:
        super().__init__(seed, nursery)
        self._away: list[Replica] = []  # killed, and not yet started again
        self._copy = self.server.copy()

    async def act(self) -> None:
        random = self.random
        await trio.sleep(random.choice([0, 0, 0.003, 0.05, 0.5]))
        what = random.random()
        if what < 0.4:
            if self.replicas:
                self.book()
        elif what < 0.76:
            if self.replicas:
                self.go_on()
        elif what < 0.84:
            self.server.come_back()
        elif what < 0.87:
            self.kill_server()
        elif what < 0.89:
            self._copy = self.server.copy()
        elif what < 0.91:
            self.server.loses_answer = True
        elif what < 0.95:
            self.kill()
        elif what < 0.96:
            self.kill_server()
            for _ in range(random.randrange(1, REPLICAS)):
                self.kill()
        else:
            self.start_again()

    async def heal(self) -> None:
        while self._away:
            self.start_again()
            await trio.sleep(self.random.choice([0, 1]))
        await super().heal()

    def kill_server(self) -> None:
        """Kills the server, which will come back without its data or with an old copy of them."""
        self.server.is_gone = True
        for each in self.replicas:
            each.cut()
        if self.random.random() < 0.7:
            self.server.flush()
            self.server.ahead_s = self.random.choice([0.0, 0.4, 3600.0, -3600.0])
        else:
            self.server.restore(self._copy)

    def kill(self) -> None:
        if self.replicas:
            killed = self.replicas.pop(self.random.randrange(len(self.replicas)))
            killed.kill()
            self._away.append(killed)

    def start_again(self) -> None:
        if self._away:
            self.replicas.append(self.start(self._away.pop(0)))

    def agree(self) -> bool:
        """Returns whether all have exactly the live requests, in the same state.

        Output blocks may be lost with the process that had them reported.
        """
        first, *others = (replica.booked(self.booked) for replica in self.replicas)
        return _prefilled(first) == _prefilled(self.live) and all(each == first for each in others)


def _prefilled(requests: dict[Request, State]) -> dict[Request, bool]:
    return {request: is_prefilled for request, (_, _, is_prefilled, _) in requests.items()}


class Scene:
    """Replicas on a server that keeps every entry; a test may set another one at its begin."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.server: Any = MemoryServer(1000)

    def make(self, *names: str, **options: Any) -> list[Replica]:
        """Makes replicas that have no session."""
        return [Replica(self.server, name, **options) for name in names]

    def start(self, *names: str, **options: Any) -> list[Replica]:
        """Makes replicas with sessions."""
        made = self.make(*names, **options)
        self.run(*made)
        return made

    def run(self, *replicas: Replica) -> None:
        for each in replicas:
            self.nursery.start_soon(each.run)


def count(replica: Replica, prefix: str, names: int) -> int:
    return len(replica.live([f"{prefix}{number}" for number in range(names)]))
