"""A mesh of replicas: each step of a request goes to any of them, and events take any time.

    client ── add r1 ──> A ───────────────> C     each way keeps its order and waits for no other; a
           └─ free r1 ─> B ──────> C              replica that has stalled may read one way to its
                                                  end before the next

A replica is the real slot tracker and the real selection service, which share their loads, with the
code that applies events to them. Its ways to the others are queues of encoded frames. Nothing is
lost. The oracle notes which steps took effect at the replica that was asked. Once all ways are
empty, every replica must count exactly the requests that no client has ended.
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial

from kvd.errors import NotFound
from kvd.index.partitions import State
from kvd.index.registry import Registry
from kvd.model import PartitionKey
from kvd.replica_sync.replicas import apply_once
from kvd.selection.options import RouterOptions
from kvd.selection.service import Selections
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd.wire.early_ends import EARLY_STEPS_S
from kvd.wire.fields import Refused
from kvd.wire.lifecycle import TOPIC, Face, Lifecycle, Outcome, decode, encode
from kvd_core.json.scan import BodyScanner
from tests.support.idle_listeners import IdleListeners
from tests.support.selecting import BLOCK_SIZE, lookup, worker

KEY = PartitionKey("m", "t")
WORKERS = (1, 2)
OTHERS = 100  # added to hashes of the slot tracker's prompts, so that the faces share no block
EXPIRY_S = 1e9  # so long that no request expires
HASHES = BodyScanner({"sequence_hashes": "i64"}, ())


@dataclass(eq=False)
class Request:
    """The steps that a client will ask for, and the state of the request as the oracle knows it."""

    name: str
    face: Face
    worker: int
    blocks: list[int]
    steps: list[str]  # steps to come, the next one last
    live: bool = False
    prefilling: bool = False


class Replica:
    """One process of kvd without its sockets."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.router_id = number + 1
        self.now = 0.0
        self.ways: dict[int, deque[bytes]] = {}  # events to come, by router_id of the sender
        self.outcomes: Counter[Outcome] = Counter()
        self.receivers: list[Replica] = []  # the replicas that get its events
        ledgers, options, state = Ledgers(), RouterOptions(), State()
        self.slots = SlotTrackers(EXPIRY_S, ledgers)
        self.selections = Selections(
            state,
            Registry(state, IdleListeners()),
            options,
            EXPIRY_S,
            rng,
            lambda: self.now,
            lambda: 0,
            ledgers=ledgers,
        )
        self.slots.steps.subscribe(self._publish_step)
        self.selections.reservations.steps.subscribe(self._publish_step)
        self.faces = {
            Face.SLOT_TRACKER: self.slots.apply,
            Face.SELECTION: self.selections.reservations.apply,
        }

    async def register(self) -> None:
        for worker_id in WORKERS:
            self.slots.register(KEY, worker_id, BLOCK_SIZE, 0, 1)
            await self.selections.workers.put(worker(worker_id, KEY))

    def _publish_step(self, event: Lifecycle) -> None:
        frame = encode(event, self.router_id)
        for receiver in self.receivers:
            receiver.ways[self.router_id].append(frame)

    def hear(self, speaker: int) -> None:
        """Applies the next event of one way."""
        event = decode([TOPIC, self.ways[speaker].popleft()])
        assert not isinstance(event, Refused)
        self.outcomes[apply_once(event, self.now, self.faces)] += 1

    def knows(self, request: Request) -> bool:
        if request.face is Face.SELECTION:
            return request.name in self.selections.reservations.owner_of
        return self.slots.tracker(*KEY).ledger.request(request.name) is not None

    def take(self, request: Request, step: str) -> None:
        """Applies a client's step; if the request is unknown here, checks that it is not found."""
        reservations, tracker = self.selections.reservations, self.slots.tracker(*KEY)
        on_slots = request.face is Face.SLOT_TRACKER
        tokens = len(request.blocks) * BLOCK_SIZE
        if step == "add":
            if on_slots:
                hashes = [OTHERS + block for block in request.blocks]
                HASHES.scan(json.dumps({"sequence_hashes": hashes}).encode())
                booking = request.worker, 0, HASHES, tokens, self.now, None
                assert self.slots.add(tracker, request.name, *booking)
            else:
                prompt = lookup(request.blocks), tokens
                reservations.reserve_on_rank(
                    KEY, request.name, (request.worker, 0), *prompt, predicts=False
                )
            return
        taken = {
            ("complete", True): partial(self.slots.prefill_complete, tracker),
            ("complete", False): reservations.prefill_complete,
            ("free", True): partial(self.slots.end, tracker),
            ("free", False): reservations.free,
        }[step, on_slots]
        known = self.knows(request)
        try:
            taken(request.name)
        except NotFound:
            assert not known

    def loads(self) -> list[tuple[int, int, int]]:
        """Returns prefill tokens, blocks and requests of each worker."""
        ledger = self.slots.tracker(*KEY).ledger
        ledger.verify()
        return [
            (
                row["potential_prefill_tokens"],
                row["potential_decode_blocks"],
                row["active_requests"],
            )
            for row in sorted(json.loads(ledger.project(b"", 0)), key=lambda row: row["worker_id"])
        ]


@dataclass
class Mesh:
    """Some replicas, the requests so far, and which replicas have stalled."""

    rng: random.Random
    replicas: list[Replica]
    stalled: set[Replica] = field(default_factory=set)
    requests: list[Request] = field(default_factory=list)

    @classmethod
    async def made(cls, seed: int) -> Mesh:
        rng = random.Random(seed)
        replicas = [Replica(number, rng) for number in range(rng.randint(2, 5))]
        for one in replicas:
            await one.register()
            one.receivers = [other for other in replicas if other is not one]
            one.ways = {other.router_id: deque() for other in one.receivers}
        return cls(rng, replicas)

    def live_a_while(self, names: list[str]) -> None:
        """Sends requests of these names through their lives, and delivers all events."""
        rng = self.rng
        waiting = [self._request(name) for name in names]
        self.requests += waiting
        while waiting:
            self._pass(rng.choice((0.0, 0.001, 0.1)))
            request = rng.choice(waiting[:8])  # at most 8 requests are under way at once
            self._step(request)
            if not request.steps:
                waiting.remove(request)
            for _ in range(rng.randrange(6)):
                self._deliver()
        self.stalled.clear()
        while any(any(one.ways.values()) for one in self.replicas):
            self._deliver()

    def rest(self) -> None:
        """Lets so much time pass that request ids may be used again."""
        self._pass(EARLY_STEPS_S + 1.0)

    def _pass(self, seconds: float) -> None:
        for one in self.replicas:
            one.now += seconds

    def _request(self, name: str) -> Request:
        rng = self.rng
        steps = ["complete"] * rng.choice((0, 1, 2)) + ["free"] * rng.choice((0, 1, 1, 1, 2))
        rng.shuffle(steps)
        blocks = [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        where = rng.choice(list(Face)), rng.choice(WORKERS), blocks
        return Request(name, *where, [*steps, "add"])

    def _step(self, request: Request) -> None:
        """Asks any replica that has not stalled for the next step, and notes its effect."""
        rng = self.rng
        if rng.random() < 0.05:
            self.stalled ^= {rng.choice(self.replicas)}
        awake = [one for one in self.replicas if one not in self.stalled]
        if not awake:
            self.stalled.clear()
            return
        replica, step = rng.choice(awake), request.steps.pop()
        if step == "add":
            request.live = request.prefilling = True
        elif not replica.knows(request):  # the replica answers NotFound, so the step has no effect
            replica.take(request, step)
            return
        elif step == "free":
            request.live = False
        else:
            request.prefilling = False
        replica.take(request, step)

    def _deliver(self) -> None:
        """Has a replica that has not stalled read one event, or now and then all of one way."""
        rng = self.rng
        awake = [one for one in self.replicas if one not in self.stalled and any(one.ways.values())]
        if not awake:
            return
        one = rng.choice(awake)
        speaker = rng.choice([router_id for router_id, way in one.ways.items() if way])
        for _ in range(len(one.ways[speaker]) if rng.random() < 0.1 else 1):
            one.hear(speaker)

    def expected(self) -> list[tuple[int, int, int]]:
        """Returns what every replica must count for each worker."""
        rows = []
        for worker_id in WORKERS:
            live = [one for one in self.requests if one.live and one.worker == worker_id]
            tokens = sum(len(one.blocks) * BLOCK_SIZE for one in live if one.prefilling)
            rows.append((tokens, _blocks(live), len(live)))
        return rows

    def check(self) -> None:
        for one in self.replicas:
            assert one.loads() == self.expected(), (one.router_id, one.loads(), self.expected())


def _blocks(live: list[Request]) -> int:
    """Counts the different blocks of each face, by their path."""
    return len(
        {
            (one.face, *one.blocks[:length])
            for one in live
            for length in range(1, len(one.blocks) + 1)
        }
    )
