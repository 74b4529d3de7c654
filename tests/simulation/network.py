"""The ways from engines to replicas: connections, and the sockets of links at their ends.

    ZmqLink     Connection        with sockets that behave as libzmq's do
    ZmtpLink    PlainConnection   with a SimulatedSubscriber in place of a descriptor

A publisher sends a message on the connections that it has at that moment. On the way the message
may be lost, delayed or repeated, but messages of one connection only overtake each other when a
proxy repeats them. A cut way stalls the messages on it; after 15 s libzmq's heartbeat gives the
connection up. Messages that a SUB socket has received outlive its connection. The monitor reports a
connection before its first message can be received.
"""

from __future__ import annotations

import errno
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio
import zmq

from kvd.net.dialing import Dialer
from kvd.net.link import LinkResources
from kvd.net.turns import Turns
from kvd.net.zmq_link import MONITOR_EVENT
from kvd_core.zmq.drain import Inbox
from kvd_core.zmq.subscriber import LOST
from tests.simulation.agenda import Agenda
from tests.simulation.engine import Engine
from tests.simulation.replays import answer

HEARTBEAT_S = 15.0
RETRY_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0)
Frames = list[bytes]

# Time of a round of turns that never runs out: here a turn is limited by its number of messages.
ENDLESS_NS = 1 << 60


def virtual_turns() -> Turns:
    """Returns turns in virtual time, which stands still during a turn, however slow the machine."""
    return Turns(ENDLESS_NS, lambda: int(trio.current_time() * 1e9))


@dataclass
class Way:
    """The faults and delays between one replica and one engine."""

    loss: float = 0.0
    repeats: float = 0.0  # only where a proxy is in between
    delay_s: float = 0.001
    cut: bool = False
    queue: int = 100_000  # messages that the SUB socket holds at most


@dataclass
class Port:
    """An engine's sockets as others see them."""

    engine: Engine
    is_up: bool = True
    replays: str = "good"
    connections: list[Connection] = field(default_factory=list)


class Network:
    """All ways, by replica and engine."""

    def __init__(self, agenda: Agenda, chance: random.Random) -> None:
        self.agenda = agenda
        self.chance = chance
        self.ports: dict[str, Port] = {}  # by endpoint
        self.ways: dict[tuple[str, str], Way] = {}  # by replica and endpoint
        self.wrapped = 0  # replays that would begin before the oldest batch that is kept

    def add(self, engine: Engine) -> Port:
        port = self.ports[engine.endpoint] = Port(engine)
        if engine.replay_endpoint is not None:
            self.ports[engine.replay_endpoint] = port
        return port

    def way(self, replica: str, endpoint: str) -> Way:
        return self.ways.setdefault((replica, endpoint), Way())

    def publish(self, port: Port, seq: int, payload: bytes) -> None:
        for connection in list(port.connections):
            connection.send([b"", seq.to_bytes(8), payload])

    def vanish(self, port: Port) -> None:
        """Takes the engine's host away without a word; only heartbeats find out."""
        for connection in port.connections:
            connection.vanish()
        port.connections.clear()

    def hang_up(self, port: Port) -> None:
        """Ends the engine's process; each connection notices at its own time."""
        for connection in port.connections:
            self.agenda.after(self.chance.choice((0.0, 0.0, 0.01)), connection.gone)
        port.connections.clear()


class Connection:
    """A SUB socket's connection to a publisher, made again and again until the socket is closed."""

    def __init__(self, network: Network, way: Way, port: Port, sub: SubSocket) -> None:
        self._network = network
        self._way = way
        self.port = port
        self._sub = sub
        self.life = 0  # number of this connection; messages sent on earlier ones are lost
        self._arrived = 0.0  # when the last message sent arrives
        self._stalled: list[Callable[[], None]] | None = None
        self._tries = 0
        self._vanished = False
        self.is_up = False
        self._later(0.0005, self._try)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        def run() -> None:
            if not self._sub.closed and life == self.life:
                call()

        life = self.life
        self._network.agenda.after(seconds, run)

    def _try(self) -> None:
        if self.port.is_up and not self._way.cut:
            self._tries = 0
            self.is_up = True
            self._stalled = None
            self.port.connections.append(self)
            self._sub.notify(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            return
        self._sub.notify(zmq.EVENT_CONNECT_RETRIED)
        self._later(RETRY_S[min(self._tries, len(RETRY_S) - 1)], self._try)
        self._tries += 1

    def send(self, frames: Frames) -> None:
        chance, way = self._network.chance, self._way
        if chance.random() < way.loss:
            return
        now = trio.current_time()
        self._arrived = max(self._arrived, now + chance.random() * way.delay_s)
        self._later(self._arrived - now, partial(self._arrive, frames))
        if self.port.engine.proxied and chance.random() < way.repeats:
            late = self._arrived - now + chance.choice((0.0, 0.01, 0.5))
            self._later(late, partial(self._arrive, frames))

    def _arrive(self, frames: Frames) -> None:
        if not self.is_up:
            return
        if self._stalled is not None:
            self._stalled.append(partial(self._arrive, frames))
        elif len(self._sub.queue) < self._way.queue:
            self._sub.put(frames)

    def gone(self) -> None:
        """Ends the connection as the engine's process is gone; a cut way holds the news back."""
        if not self.is_up:
            return
        if self._stalled is not None:
            self._stalled.append(self.gone)
        else:
            self.break_off()

    def break_off(self, fault: bool = False) -> None:
        """Loses the connection; after a protocol `fault` libzmq does not try again."""
        if not self.is_up:
            return
        self.drop()
        self._sub.notify(zmq.EVENT_DISCONNECTED)
        if not fault:
            self._sub.notify(zmq.EVENT_CONNECT_RETRIED)
            self._later(0.1, self._try)

    def drop(self) -> None:
        if self in self.port.connections:
            self.port.connections.remove(self)
        self.life += 1
        self._stalled = None
        self.is_up = self._vanished = False

    def stall(self) -> None:
        if self.is_up and self._stalled is None:
            self._stalled = []
            self._later(HEARTBEAT_S, self._give_up)

    def vanish(self) -> None:
        """Stalls for good: the other side is gone and has not closed the connection."""
        self.stall()
        self._vanished = True

    @property
    def is_frozen(self) -> bool:
        """Whether its process has ended, and this side has not noticed yet."""
        return self.is_up and (self._vanished or self not in self.port.connections)

    def _give_up(self) -> None:
        if self._stalled is not None and (self._way.cut or self._vanished):
            self.break_off()

    def flow(self) -> None:
        if self._vanished:
            return
        stalled, self._stalled = self._stalled or [], None
        for call in stalled:
            call()


class PlainConnection(Connection):
    """A connection of kvd's own ZMTP: made when its link asks, given up by its heartbeats."""

    _sub: Any

    def __init__(self, network: Network, way: Way, port: Port) -> None:
        self._network = network
        self._way = way
        self.port = port
        self.life = 0
        self._arrived = 0.0
        self._stalled = None
        self._vanished = False
        self.is_up = False

    async def make(self) -> None:
        await trio.sleep(0.0005)
        if self._way.cut:
            await trio.sleep_forever()
        if not self.port.is_up:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    def join(self, sub: SimulatedSubscriber) -> None:
        self._sub = sub
        self.is_up = True
        self._stalled = None
        self.port.connections.append(self)

    def break_off(self, fault: bool = False) -> None:
        if self.is_up:
            self.drop()
            self._sub.end("protocol error" if fault else LOST)

    def stall(self) -> None:
        if self.is_up and self._stalled is None:
            self._stalled = []

    def echo(self, call: Callable[[], None]) -> None:
        """Has the other side answer a ping, unless the way is cut or its process has ended."""
        self._later(0.001, partial(self._pass, call))

    def _pass(self, call: Callable[[], None]) -> None:
        if self._stalled is not None:
            self._stalled.append(call)
        elif not self.is_frozen:
            call()


class SimulatedSocket:
    """The common part of all sockets: a queue, and a task that waits for messages."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._filled = trio.Event()
        self.queue: deque[Frames] = deque()
        self.closed = False

    @property
    def underlying(self) -> SimulatedSocket:
        return self

    def put(self, frames: Frames) -> None:
        self.queue.append(frames)
        self._filled.set()

    async def wait(self) -> None:
        await trio.lowlevel.checkpoint()
        while not self.queue:
            self._filled = trio.Event()
            await self._filled.wait()

    def close(self) -> None:
        self.closed = True


class PairSocket(SimulatedSocket):
    def connect(self, address: str) -> None:
        self._wire.monitors[address] = self


class SubSocket(SimulatedSocket):
    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self._address: str | None = None
        self.connection: Connection | None = None

    def monitor(self, address: str | None, events: int) -> None:
        if self._address is not None:
            self._wire.monitors.pop(self._address, None)
        self._address = address

    def notify(self, event: int) -> None:
        monitor = self._wire.monitors.get(self._address or "")
        if monitor is not None:
            monitor.put([MONITOR_EVENT.pack(event, 0)])

    def set(self, option: int, topic: bytes) -> None:
        assert (option, topic) == (zmq.UNSUBSCRIBE, b"")  # options at its creation subscribe it
        if self.connection is not None:
            self.connection.drop()

    def connect(self, endpoint: str) -> None:
        self.connection = self._wire.connect(endpoint, self)

    def close(self) -> None:
        super().close()
        if self.connection is not None:
            self.connection.drop()
            self._wire.connections.remove(self.connection)


class DealerSocket(SimulatedSocket):
    def connect(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def send_multipart(self, frames: Frames, flags: int) -> None:
        start = int.from_bytes(frames[1])
        self._streams = self._wire.lives(self._endpoint)
        self._wire.asked_frozen[self._endpoint] = False
        self._wire.network.agenda.after(0.001, partial(self._ask, start))

    def _ask(self, start: int) -> None:
        """Delivers a replay request; as libzmq does, it waits until there is a connection."""
        network, port = self._wire.network, self._wire.network.ports[self._endpoint]
        if self.closed:
            return
        if not port.is_up or self._wire.is_cut(port.engine.endpoint):
            network.agenda.after(0.1, partial(self._ask, start))
            return
        process, ring = port.engine.process, port.engine.ring
        network.wrapped += bool(ring) and start < ring[0][0]
        for delay_s, frames in answer(port.replays, network.chance, port.engine, start):
            network.agenda.after(delay_s, partial(self._hear, port, process.number, frames))

    def _hear(self, port: Port, process: int, frames: Frames) -> None:
        same = port.is_up and port.engine.process.number == process
        if same and not self.closed and not self._wire.is_cut(port.engine.endpoint):
            frozen = self._wire.is_frozen(self._endpoint)
            if frozen or self._wire.lives(self._endpoint) != self._streams:
                self._wire.asked_frozen[self._endpoint] = True
            self.put(frames)


KINDS: dict[int, type[Any]] = {zmq.SUB: SubSocket, zmq.PAIR: PairSocket, zmq.DEALER: DealerSocket}


class Wire:
    """All sockets of one replica; its listeners get this as their ZMQ context."""

    def __init__(self, network: Network, replica: str, cut_replays: bool) -> None:
        self.network = network
        self.replica = replica
        self.monitors: dict[str, PairSocket] = {}
        self.connections: list[Connection] = []
        # By replay endpoint, whether during the last replay the stream's connection was lost, or
        # belonged to a process that had ended.
        self.asked_frozen: dict[str, bool] = {}
        self._cut_replays = cut_replays
        self._plain: dict[str, PlainConnection] = {}

    def resources(self) -> LinkResources:
        context: Any = self
        return LinkResources(context, SimulatedDialer(self), turns=virtual_turns())

    def connect(self, endpoint: str, sub: SubSocket) -> Connection:
        way = self.network.way(self.replica, endpoint)
        connection = Connection(self.network, way, self.network.ports[endpoint], sub)
        self.connections.append(connection)
        return connection

    def plain(self, endpoint: str) -> PlainConnection:
        """Returns the connection of a link that uses kvd's own ZMTP."""
        way = self.network.way(self.replica, endpoint)
        port = self.network.ports[endpoint]
        found = self._plain.get(endpoint)
        if found is None or found.port is not port:
            found = self._plain[endpoint] = PlainConnection(self.network, way, port)
        return found

    def to(self, endpoint: str) -> list[Connection]:
        port = self.network.ports[endpoint]
        connections = [*self.connections, *self._plain.values()]
        return [connection for connection in connections if connection.port is port]

    def is_frozen(self, endpoint: str) -> bool:
        return any(connection.is_frozen for connection in self.to(endpoint))

    def lives(self, endpoint: str) -> list[int]:
        """Returns numbers of which one changes whenever a connection is lost."""
        return [connection.life for connection in self.to(endpoint)]

    def is_cut(self, endpoint: str) -> bool:
        return self._cut_replays and self.network.way(self.replica, endpoint).cut


class Address(str):
    """An address together with the replica that dials it."""

    __slots__ = ("wire",)
    wire: Wire


class SimulatedDialer(Dialer):
    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    async def endpoint(self, named: str, turn: int = 0) -> str:
        address = Address(await super().endpoint(named, turn))
        address.wire = self._wire
        return address


class SimulatedStream:
    """Replaces a socket of `kvd.net.streams.stream_socket`."""

    def __init__(self, address: Address) -> None:
        self._connection = address.wire.plain(address)

    def __enter__(self) -> SimulatedStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    async def connect(self, place: str) -> None:
        await self._connection.make()

    def fileno(self) -> PlainConnection:
        return self._connection

    def detach(self) -> PlainConnection:
        return self._connection


def stream_socket(address: Address) -> tuple[SimulatedStream, str]:
    return SimulatedStream(address), address


class SimulatedSubscriber:
    """Replaces `kvd_core.zmq.subscriber.Subscriber`."""

    answers_pings = True
    has_unsent = False

    def __init__(self, connection: PlainConnection, limit: int, topics: tuple[bytes, ...]) -> None:
        self.connection = connection
        self.queue: deque[Frames] = deque()
        self.fault: str | None = None
        self.joined = self.closed = False
        self.reads = 0
        self._ended: str | None = None
        self._filled = trio.Event()
        connection.join(self)

    @property
    def fd(self) -> SimulatedSubscriber:
        return self

    @property
    def has_unread(self) -> bool:
        return bool(self.queue)

    def shake(self) -> None:
        self.joined = True

    def ping(self) -> None:
        self.connection.echo(self._hear_pong)

    def _hear_pong(self) -> None:
        self.reads += 1

    def put(self, frames: Frames) -> None:
        self.queue.append(frames)
        self._filled.set()

    def end(self, why: str) -> None:
        self._ended = why
        self._filled.set()

    def fill(
        self, inbox: Inbox, refuse: Callable[[str], None], max_messages: int, budget_ns: int
    ) -> bool:
        self.reads += bool(self.queue)
        more = fill(inbox, self, refuse, max_messages, budget_ns)
        if not more:
            self.fault = self._ended
        return more

    def unsubscribe(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        if self.connection._sub is self:
            self.connection.drop()

    async def readable(self) -> None:
        await trio.lowlevel.checkpoint()
        while not self.queue and self._ended is None:
            self._filled = trio.Event()
            await self._filled.wait()


class SimulatedArrivals:
    """Replaces `kvd.net.arrivals.Arrivals`."""

    def __init__(self) -> None:
        self.handshakes = virtual_turns()
        self._waits: dict[SimulatedSubscriber, trio.CancelScope] = {}

    async def take_turn(self) -> None:
        await trio.lowlevel.checkpoint()

    async def wait(self, subscriber: SimulatedSubscriber, serve: Callable[[], bool]) -> None:
        with trio.CancelScope() as self._waits[subscriber]:
            await subscriber.readable()
            while serve():
                await subscriber.readable()
        self._waits.pop(subscriber, None)

    def end(self, subscriber: SimulatedSubscriber) -> None:
        if (wait := self._waits.pop(subscriber, None)) is not None:
            wait.cancel()


def is_plain(address: str) -> bool:
    """Returns whether a link uses kvd's own ZMTP: half of them do, the others use libzmq."""
    return zlib.crc32(address.encode()) % 2 == 0


class SimulatedZSocket:
    """Replaces `kvd.net.zsocket.ZSocket`."""

    def __init__(self, wire: Wire, kind: int, options: Mapping[int, int | bytes]) -> None:
        self.socket = KINDS[kind](wire)

    def close(self) -> None:
        self.socket.close()

    def receive_nowait(self) -> Frames | None:
        queue = self.socket.queue
        return queue.popleft() if queue else None

    async def wait_readable(self) -> None:
        await self.socket.wait()


def fill(
    inbox: Inbox,
    socket: SubSocket | SimulatedSubscriber,
    refuse: Callable[[str], None],
    max_messages: int,
    budget_ns: int,
) -> bool:
    """Replaces `kvd_core.zmq.drain.fill`; turns are short, so that much happens between them."""
    for _ in range(min(max_messages, 8)):
        if not socket.queue:
            return False
        _, seq, payload = socket.queue.popleft()
        inbox.push(int.from_bytes(seq), payload)
    return True


def fill_frames(
    inbox: Inbox, socket: PairSocket, most: int, max_messages: int, budget_ns: int
) -> bool:
    """Replaces `kvd_core.zmq.drain.fill_frames`, for the events of monitors."""
    while socket.queue:
        frames = socket.queue.popleft()
        inbox.push(0, b"".join(len(frame).to_bytes(4, sys.byteorder) + frame for frame in frames))
    return False
