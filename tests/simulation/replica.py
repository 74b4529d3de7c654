"""A replica: kvd's own parts, over simulated sockets and a simulated way to its peer.

The HTTP server is left out. `simulated` replaces libzmq by network.py and the HTTP client by
`fetch` here; everything in between is real.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import trio

import kvd.faces.common.slices
import kvd.index.dumps
import kvd.index.restore
import kvd.net.listener
import kvd.net.recovery
import kvd.net.replay
import kvd.net.sessions
import kvd.net.zmq_link
import kvd.net.zmtp_link
import kvd.wire.losses
from kvd.faces.indexer import routes as indexer
from kvd.http.messages import Request
from kvd.index.partitions import State
from kvd.index.publishers import Publishers
from kvd.index.registry import Registration, Registry
from kvd.model import RankKey
from kvd.net.fetch import FetchError
from kvd.net.link import LinkOptions
from kvd.net.listeners import ListenerTasks
from kvd.net.recovery import RecoveryStats, confirm_restored, recover
from kvd.wire.event_stream import EventStream, StreamHealth
from kvd_core.index.prefix_index import ALL_TIERS, CLEARED, Stream
from tests.simulation.engine import BLOCK, Engine
from tests.simulation.network import (
    Network,
    SimulatedArrivals,
    SimulatedSubscriber,
    SimulatedZSocket,
    Wire,
    fill,
    fill_frames,
    is_plain,
    stream_socket,
)

# Of each stream: the process and number of its last batch, and its restarts.
StreamPositions = dict[RankKey, tuple[int, int, int]]

FROZEN = "its lost connection is not noticed yet"
UNANSWERED = ("silent", "late", "too_much", "failed")  # ReplayEnds that show nothing of the engine


class Repeated(Exception):
    """A batch was applied twice, or out of order."""


class Tap:
    """Wraps a stream and notes which process's batches were applied to it."""

    def __init__(self, stream: Stream, engine: Engine, wire: Wire) -> None:
        self._wire = wire
        self._stream = stream
        self._engine = engine
        self.listener: EventStream | None = None
        self.last: tuple[int, int] | None = None  # process and number of the last batch
        self._at_pause: int | None = None  # the process known when the listener was paused
        self._unanswered = 0  # replays without an answer until the last batch
        self._unanswered_before = 0  # replays without an answer until the last lost connection
        self._losses = 0  # lost connections
        self.mixed = ""  # why batches of two processes were mixed unnoticed, empty if they were not
        self._mixed_ranks: set[int] = set()  # ranks that have not cleared everything since
        self.restarts = 0
        self.first: tuple[int, int] | None = None  # process and number of the first batch
        self.unbroken = False  # no batch since `first` is missing

    def flaw(self) -> str:
        return self._stream.flaw()

    def rank(self) -> int | None:
        return self._stream.rank()

    def names_ranks(self) -> bool:
        return self._stream.names_ranks()

    def cleared(self) -> int:
        return self._stream.cleared()

    def names_restored(self, payload: bytes) -> bool:
        return self._stream.names_restored(payload)

    def restored(self) -> bool:
        return self._stream.restored()

    @property
    def ignored(self) -> dict[str, int]:
        return self._stream.ignored

    def misfit(self) -> str:
        return self._stream.misfit()

    def drop_restored(self) -> bool:
        return self._stream.drop_restored()

    def apply(self, payload: bytes) -> int:
        process, seq = self._engine.where[payload]
        if self.last is not None and process == self.last[0] and seq <= self.last[1]:
            raise Repeated(f"{self._engine.key}: batch {seq} came behind {self.last[1]}")
        self._look_at_losses()
        if self.last is not None:
            self._compare(process)
        shown = self._stream.apply(payload)
        if shown & CLEARED and self._stream.cleared() == ALL_TIERS:
            self._unmix(self._stream.rank())
        if self.last is None:
            self.first, self.unbroken = (process, seq), True
        else:
            self.unbroken = self.unbroken and self.last == (process, seq - 1)
        self.last = process, seq
        self._at_pause = None
        self._unanswered = self._count_unanswered()
        return shown

    def _unmix(self, rank: int | None) -> None:
        """Notes a clear; batches of two processes stop mattering once all ranks have cleared.

        kvd has the same rule: a loss ends when each rank has cleared, one after the other.
        """
        self._mixed_ranks.discard(self._engine.key.dp_rank if rank is None else rank)
        if not self._mixed_ranks:
            self.mixed = ""

    def clear(self) -> None:
        self.last = None
        self.mixed = ""
        self.restarts += 1
        self._stream.clear()

    def pause(self) -> None:
        if self._at_pause is not None:
            return
        frozen = self._wire.is_frozen(self._engine.endpoint)
        self._at_pause = self.last[0] if self.last and frozen else self._engine.process.number

    def _compare(self, process: int) -> None:
        """Notes whether a batch of another process follows, and why that could go unnoticed."""
        assert self.last is not None
        engine, wire = self._engine, self._wire
        asked = wire.asked_frozen.get(engine.replay_endpoint or "", False)
        frozen = asked or wire.is_frozen(engine.endpoint)
        if process != self.last[0]:
            self._mixed_ranks = set(engine.ranks)
        if self.mixed == FROZEN and not frozen:
            self.mixed = self._why_unnoticed(process)
        elif process != self.last[0] and not self.mixed:
            self.mixed = FROZEN if frozen else self._why_unnoticed(process)

    def _why_unnoticed(self, process: int) -> str:
        """Names the documented limit that let a restart pass; "nothing" is a bug."""
        assert self.last is not None
        if not self._engine.has_replay:
            return "no replay endpoint" if process > self.last[0] else "nothing"
        if self._count_unanswered() != self._unanswered_before:
            return "replay not answered"
        if self._at_pause is not None and process > self._at_pause:
            return "paused"
        return "proxied" if self._engine.proxied else "nothing"

    def _look_at_losses(self) -> None:
        losses = 0 if self.listener is None else self.listener.stats.losses
        if losses != self._losses:
            self._losses, self._unanswered_before = losses, self._unanswered

    def _count_unanswered(self) -> int:
        if self.listener is None:
            return 0
        replays = self.listener.stats.replays
        return sum(replays.get(end, 0) for end in UNANSWERED) + self.listener.stats.spared_replays


class TappedState(State):
    """A state with a tap at every registered stream."""

    def __init__(self, engines: dict[RankKey, Engine], wire: Wire) -> None:
        super().__init__()
        self._wire = wire
        self._engines = engines
        self.taps: dict[RankKey, Tap] = {}

    def add_rank(self, key: RankKey, block_size: int) -> Any:
        tap = self.taps[key] = Tap(
            super().add_rank(key, block_size), self._engines[key], self._wire
        )
        return tap


class Replica:
    """One process of kvd; after its end another process takes its name."""

    def __init__(self, name: str, network: Network, engines: Iterable[Engine], kind: bool) -> None:
        self.name = name
        self.url = f"http://{name}:1"
        self.network = network
        self.engines = {engine.key: engine for engine in engines}
        self.wire = Wire(network, name, cut_replays=not kind)
        self.state = TappedState(self.engines, self.wire)
        self.recovery = RecoveryStats()
        self.registry: Registry
        self.tasks: ListenerTasks
        self.ready = trio.Event()
        # What its peer had applied of the streams that it has restored.
        self.restored: StreamPositions = {}
        self.departed: set[RankKey] = set()  # unregistered during recovery
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    async def run(
        self,
        peers: list[str],
        at_start: list[Engine],
        recovered: Callable[[str | None], None] = lambda peer: None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Runs as the daemon does, from its start to its end."""
        with self._scope:
            async with trio.open_nursery() as listening:
                self.tasks = ListenerTasks(
                    listening, self.wire.resources(), self.ready, LinkOptions()
                )
                self.registry = Registry(self.state, self.tasks)
                self.publishers = Publishers(self.state, self.tasks)
                for engine in at_start:
                    self.register(engine)
                task_status.started()
                recovered(await recover(self.state, peers, self.recovery))
                self.ready.set()
                await confirm_restored(self.state, self.registry, self.publishers)
                await trio.sleep_forever()
        self._ended.set()

    async def stop(self) -> None:
        self._scope.cancel()
        await self._ended.wait()

    def register(self, engine: Engine) -> None:
        self.registry.register(engine.key, engine.endpoint, BLOCK, engine.replay_endpoint)
        self.state.taps[engine.key].listener = self.registration(engine).listener

    def registration(self, engine: Engine) -> Registration:
        found = self.find(engine)
        assert found is not None
        return found

    def find(self, engine: Engine) -> Registration | None:
        known = self.registry.registrations()
        return next((each for each in known if each.key == engine.key), None)

    def places(self) -> StreamPositions:
        """Returns the process and number of the last batch that each exact stream has applied."""
        now = trio.current_time()
        return {
            each.key: (*tap.last, tap.restarts)
            for each in self.registry.registrations()
            if each.listener.health(now) is StreamHealth.EXACT
            and (tap := self.state.taps[each.key]).last is not None
            and not tap.mixed
        }

    async def pause(self, engine: Engine) -> None:
        self.state.taps[engine.key].pause()
        await self.registry.pause(engine.key.instance_id, engine.key.dp_rank)

    async def unregister(self, engine: Engine) -> None:
        key = engine.key
        if not self.ready.is_set():
            self.departed |= self._leaving_with(key)
        self.restored.pop(key, None)
        await self.registry.unregister(
            key.instance_id, key.partition.model_name, key.partition.tenant_id, key.dp_rank
        )

    def _leaving_with(self, key: RankKey) -> set[RankKey]:
        """Returns the ranks whose dumped blocks go when this rank is unregistered.

        The last registered rank of an instance takes those of all its other ranks along.
        """
        siblings = {
            each
            for each in self.engines
            if (each.partition, each.instance_id) == (key.partition, key.instance_id)
        }
        registered = {each.key for each in self.registry.registrations()}
        return siblings if siblings & registered <= {key} else {key}


class PeerAccess:
    """Gives one replica the other's dump: in pieces that take time, or not at all."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.replicas: dict[str, Replica] = {}  # running replicas, by URL
        self.failures = 0.2  # share of the attempts
        self.texts = 0.3  # share of the dumps in JSON, as another indexer would write them
        # What the last whole dump of each replica holds, by URL.
        self.dumped: dict[str, StreamPositions] = {}
        self.counts: Counter[str] = Counter()

    async def fetch(
        self, url: str, accept: bytes, limits: object, begin: Any, dialer: object, *, token: bytes
    ) -> None:
        """Replaces `kvd.net.fetch.fetch`."""
        await trio.sleep(self.chance.choice((0.0, 0.01, 1.0)))
        base = url.removesuffix("/dump")
        replica = self.replicas.get(base)
        broken = self.chance.random() < self.failures
        if replica is None or (broken and self.chance.random() < 0.5):
            raise FetchError("refused")
        text = self.chance.random() < self.texts
        headers = [] if text else [(b"accept", accept)]
        response = indexer.dump(replica.state, Request("GET", "/dump", b"", headers, b""))
        given = {b"content-type": response.content_type, **dict(response.headers)}
        sink = begin(given)
        before = replica.places()
        self.counts["dumps"] += 1
        self.counts["dumps[peer not exact]"] += len(before) < len(replica.engines)
        pieces: Any = response.body
        async with aclosing(pieces):
            async for piece in pieces:
                await trio.sleep(self.chance.choice((0.0, 0.0, 0.001, 0.05)))
                ended = self.replicas.get(base) is not replica
                if ended or (broken and self.chance.random() < 0.3):
                    self.counts["dumps[peer ended]" if ended else "dumps[broke off]"] += 1
                    raise FetchError("broke off")
                sink(piece)
        if broken:
            raise FetchError("broke off at the end")
        after = replica.places()
        self.dumped[base] = {key: after[key] for key in after if before.get(key) == after[key]}


@contextmanager
def simulated(peers: PeerAccess) -> Iterator[None]:
    """Replaces sockets by the simulation, and makes slices so small that work takes many."""
    places: list[tuple[Any, str, object]] = [
        (kvd.net.sessions, "has_streams", is_plain),
        (kvd.net.zmtp_link, "stream_socket", stream_socket),
        (kvd.net.zmtp_link, "tune", lambda sock: None),
        (kvd.net.zmtp_link, "Subscriber", SimulatedSubscriber),
        (kvd.net.zmtp_link, "arrivals", SimulatedArrivals),
        (kvd.net.zmq_link, "ZSocket", SimulatedZSocket),
        (kvd.net.replay, "ZSocket", SimulatedZSocket),
        (kvd.net.backlog, "MAX_TURN_MESSAGES", 4),
        (kvd.net.zmq_link, "fill", fill),
        (kvd.net.zmq_link, "fill_frames", fill_frames),
        (kvd.net.recovery, "fetch", peers.fetch),
        (kvd.index.dumps, "SLICE_BYTES", 256),
        (kvd.faces.common.slices, "SLICE_BYTES", 256),
        (kvd.wire.losses, "HEARD_AFTER", 64),  # ranks of a port speak more often here
        (kvd.index.restore, "SLICE_BLOCKS", 8),
        (kvd.index.restore, "SLICE_WORKERS", 1),
    ]
    before = [getattr(module, name) for module, name, _ in places]
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(places, before, strict=True):
            setattr(module, name, value)
