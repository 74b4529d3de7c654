"""One seed's life of a fleet: chaos, then healing, and what must be true in the end."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial

import trio
import trio.testing

from kvd.model import PartitionKey, RankKey
from kvd.wire.event_stream import StreamHealth
from kvd.wire.stream_link import ListenerStatus
from tests.simulation import oracle
from tests.simulation.agenda import Agenda, decide_order
from tests.simulation.engine import Engine
from tests.simulation.network import Network, Port, Way
from tests.simulation.oracle import Oracle, Wrong
from tests.simulation.replays import BAD, GOOD
from tests.simulation.replica import PeerAccess, Replica, simulated

STEPS = 250
REPLICAS = ("a", "b")
PAUSES_S = (0.0, 0.0, 0.001, 0.001, 0.01, 0.1, 1.0)
LONG_PAUSES_S = (3.0, 12.0, 40.0)
Action = Callable[[], Awaitable[None]]


class World:
    """A fleet of some engines and two replicas.

    In a `kind` world every loss can be repaired: replay servers answer and keep all batches.
    """

    def __init__(self, seed: int, trace: Callable[[str], None]) -> None:
        self.chance = random.Random(seed)
        self.kind = self.chance.random() < 0.3
        self.agenda = Agenda()
        self.network = Network(self.agenda, self.chance)
        self.oracle = Oracle(seed)
        self.peers = PeerAccess(self.chance)
        self.engines = [self._engine(number) for number in range(self.chance.choice((1, 2, 4)))]
        self.ports = [self.network.add(engine) for engine in self.engines]
        self.replicas: dict[str, Replica] = {}
        self.starts = 0  # starts of replicas
        self._trace = trace
        self._nursery: trio.Nursery

    def _engine(self, number: int) -> Engine:
        tenant = self.chance.choice(("default", "default", "other"))
        key = RankKey(PartitionKey("model", tenant), number // 2, number % 2)
        return Engine(key, self.chance, self.kind, self.chance.choice((0, 0, 1, 2)))

    async def live(self) -> None:
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self.agenda.run)
            for name in REPLICAS:
                await self._start(name)
            for _ in range(STEPS):
                await self._step()
            await self._heal()
            self._check_healed()
            await self._begin_anew()
            self._check_equal()
            self._nursery.cancel_scope.cancel()

    def log(self, text: str) -> None:
        self._trace(f"{trio.current_time():10.3f} {text}")

    # ---- chaos

    async def _step(self) -> None:
        actions: list[tuple[float, Action]] = [
            (60, self._publish),
            (4, self._break_connection),
            (3, self._cut_or_mend),
            (2, self._change_way),
            (2, self._restart_engine),
            (3, self._change_replays),
            (2, self._pause_or_resume),
            (1.5, self._restart_replica),
            (1, self._register_or_not),
            (2, self._sweep),
        ]
        weights = [weight for weight, _ in actions]
        await self.chance.choices([action for _, action in actions], weights)[0]()
        long = self.chance.random() < 0.02
        await trio.sleep(self.chance.choice(LONG_PAUSES_S if long else PAUSES_S))
        for replica in self.replicas.values():
            self.oracle.check(replica)

    async def _publish(self) -> None:
        port = self.chance.choice(self.ports)
        for _ in range(self.chance.choice((1, 1, 1, 3, 12))):
            self._speak(port)

    def _speak(self, port: Port, heard: bool = True) -> None:
        if not port.is_up:
            return
        seq, payload = port.engine.act()
        if heard:
            self.network.publish(port, seq, payload)

    async def _break_connection(self) -> None:
        replica, port = self._pair()
        fault = self.chance.random() < 0.2
        self.log(f"{replica.name} loses {port.engine.key}{' by a fault' * fault}")
        for connection in replica.wire.to(port.engine.endpoint):
            connection.break_off(fault)
        for _ in range(self.chance.choice((0, 0, 2))):
            self._speak(port)

    async def _cut_or_mend(self) -> None:
        replica, port = self._pair()
        way = self.network.way(replica.name, port.engine.endpoint)
        self.log(f"{replica.name} to {port.engine.key}: {'mended' if way.cut else 'cut'}")
        self._set_cut(replica, port, not way.cut)

    def _set_cut(self, replica: Replica, port: Port, cut: bool) -> None:
        self.network.way(replica.name, port.engine.endpoint).cut = cut
        for connection in replica.wire.to(port.engine.endpoint):
            if cut:
                connection.stall()
            else:
                connection.flow()

    async def _change_way(self) -> None:
        replica, port = self._pair()
        way = self.network.way(replica.name, port.engine.endpoint)
        way.loss = self.chance.choice((0.0, 0.0, 0.1, 0.5))
        way.repeats = self.chance.choice((0.0, 0.2))
        way.delay_s = self.chance.choice((0.001, 0.05, 0.5))
        way.queue = self.chance.choice((2, 100_000))

    async def _restart_engine(self) -> None:
        port = self.chance.choice(self.ports)
        engine = port.engine
        if not port.is_up:
            return
        self.log(f"{engine.key} is started again, after {len(engine.process.batches)} batches")
        if not engine.proxied:
            port.is_up = False
            ways_to_end = (self.network.hang_up, self.network.vanish)
            self.chance.choices(ways_to_end, (5, 1))[0](port)
        unheard = self.chance.choice((0, 0, 1, 5, 50, len(engine.process.batches)))
        down_s = self.chance.choice((0.0, 0.2, 5.0))
        self.agenda.after(down_s, partial(self._up, port, unheard))

    def _up(self, port: Port, unheard: int) -> None:
        port.engine.start()
        port.is_up = True
        for _ in range(unheard):
            self._speak(port, heard=False)

    async def _change_replays(self) -> None:
        port = self.chance.choice(self.ports)
        kinds = GOOD[:2] if self.kind else (*GOOD, *BAD)
        port.replays = self.chance.choice(kinds)
        self.log(f"replays of {port.engine.key}: {port.replays}")

    async def _pause_or_resume(self) -> None:
        replica, port = self._pair()
        engine = port.engine
        found = replica.find(engine)
        if found is None or self.kind:
            return
        paused = found.listener.status is ListenerStatus.PAUSED
        self.log(f"{replica.name} {'resumes' if paused else 'pauses'} {engine.key}")
        if paused:
            replica.registry.resume(engine.key.instance_id, engine.key.dp_rank)
        else:
            await replica.pause(engine)

    async def _register_or_not(self) -> None:
        replica, port = self._pair()
        if self.kind:
            return
        known = replica.find(port.engine) is not None
        self.log(f"{replica.name} {'unregisters' if known else 'registers'} {port.engine.key}")
        if known:
            await replica.unregister(port.engine)
        else:
            replica.register(port.engine)

    async def _restart_replica(self) -> None:
        """Restarts one replica or both; engines go on meanwhile."""
        names = self.chance.choices((("a",), ("b",), REPLICAS), (5, 5, 1))[0]
        for name in names:
            await self._stop(name)
        for _ in range(self.chance.choice((0, 0, 3, 20))):
            await self.chance.choices((self._publish, self._restart_engine), (20, 1))[0]()
            await trio.sleep(self.chance.choice(PAUSES_S))
        await trio.sleep(self.chance.choice((0.0, 0.1, 3.0)))
        for name in names:
            await self._start(name)

    async def _sweep(self) -> None:
        self._pair()[0].state.sweep(self.chance.choice((1, 5, 1000)))

    def _pair(self) -> tuple[Replica, Port]:
        return self.replicas[self.chance.choice(REPLICAS)], self.chance.choice(self.ports)

    # ---- replicas

    async def _start(self, name: str) -> None:
        replica = Replica(name, self.network, self.engines, self.kind)
        at_start = [engine for engine in self.engines if self.chance.random() < 0.8]
        others = [f"http://{other}:1" for other in REPLICAS if other != name]
        self.log(f"{name} starts with {len(at_start)} engines")
        recovered = partial(self._recovered, replica)
        await self._nursery.start(replica.run, others, at_start, recovered)
        self.replicas[name] = self.peers.replicas[replica.url] = replica
        self.starts += 1
        self.agenda.after(self.chance.choice((0.0, 0.5)), partial(self._register_all, replica))

    def _recovered(self, replica: Replica, peer: str | None) -> None:
        self.log(f"{replica.name} has recovered {replica.recovery.blocks} blocks from {peer}")
        if peer is not None:
            self.oracle.check_restored(replica, self.peers.dumped[peer])

    async def _stop(self, name: str) -> None:
        self.log(f"{name} ends")
        del self.peers.replicas[self.replicas[name].url]
        await self.replicas[name].stop()

    def _register_all(self, replica: Replica) -> None:
        if self.peers.replicas.get(replica.url) is not replica:
            return
        for engine in self.engines:
            if replica.find(engine) is None:
                replica.register(engine)

    # ---- healing

    async def _heal(self) -> None:
        """Makes everything work again, and has every engine publish."""
        self.log("healing")
        await trio.sleep(6)
        for port in self.ports:
            port.replays = "good"
            for replica in self.replicas.values():
                self._heal_way(replica, port)
        await trio.sleep(45)  # unnoticed lost connections and answers without an end time out
        for replica in self.replicas.values():
            for engine in self.engines:
                self._check_dead(replica, engine)
        await self._speak_a_while()

    def _check_dead(self, replica: Replica, engine: Engine) -> None:
        """Checks that blocks of an ended process are gone even before the new one publishes."""
        last = replica.state.taps[engine.key].last
        if self.kind and last is not None and last[0] != engine.process.number:
            raise Wrong(f"{replica.name} goes on with process {last[0]} of {engine.key}")

    def _heal_way(self, replica: Replica, port: Port) -> None:
        self._set_cut(replica, port, False)
        self.network.ways[replica.name, port.engine.endpoint].__dict__.update(Way().__dict__)
        found = replica.find(port.engine)
        if found is None:
            replica.register(port.engine)
        elif found.listener.status is ListenerStatus.PAUSED:
            replica.registry.resume(port.engine.key.instance_id, port.engine.key.dp_rank)

    async def _speak_a_while(self) -> None:
        for _ in range(4):
            for port in self.ports:
                self._speak(port)
            await trio.sleep(12)

    def _check_healed(self) -> None:
        for replica in self.replicas.values():
            self.oracle.check_all(replica)
            for engine in self.engines:
                # In any world, batches that a process had not replayed when it ended may be lost.
                unharmed = self.kind and len(engine.processes) == 1
                allowed = {StreamHealth.EXACT, StreamHealth.DEGRADED}
                self._check_stream(replica, engine, {StreamHealth.EXACT} if unharmed else allowed)

    def _check_stream(
        self,
        replica: Replica,
        engine: Engine,
        allowed: set[StreamHealth],
        final: bool = False,
    ) -> None:
        listener = replica.registration(engine).listener
        now = oracle.health(replica, engine)
        heard = has_heard_all(replica, engine) or (
            not final and self.oracle.excuses_late(replica, engine)
        )
        if now not in allowed or not heard or listener.status is not ListenerStatus.ACTIVE:
            raise Wrong(
                f"after healing {replica.name} calls {engine.key} {now} ({listener.loss}), status "
                f"{listener.status}, last {listener.cursor.last} of {len(engine.process.batches)}"
            )

    async def _begin_anew(self) -> None:
        """Has engines clear, and restarts those whose streams could not be repaired."""
        for port in self.ports:
            if self.chance.random() < 0.5:
                self.log(f"{port.engine.key} clears")
                for seq, payload in port.engine.clear():
                    self.network.publish(port, seq, payload)
        await trio.sleep(1)
        await self._speak_a_while()
        for port in self.ports:
            if not all(self._is_trusted(replica, port) for replica in self.replicas.values()):
                self.log(f"{port.engine.key} is started again")
                port.is_up = False
                self.network.hang_up(port)
                self.agenda.after(1.0, partial(self._up, port, 0))
        await trio.sleep(15)
        await self._speak_a_while()

    def _is_trusted(self, replica: Replica, port: Port) -> bool:
        mixed = replica.state.taps[port.engine.key].mixed
        exact = self.oracle.is_exact(replica, port.engine) and not mixed
        return exact and has_heard_all(replica, port.engine)

    def _check_equal(self) -> None:
        for replica in self.replicas.values():
            self.oracle.check_all(replica)
            for engine in self.engines:
                self._check_stream(replica, engine, {StreamHealth.EXACT}, final=True)
        first, *others = self.replicas.values()
        for engine in self.engines:
            for path in engine.asked:
                answer = oracle.query(first, engine, path)
                if any(oracle.query(other, engine, path) != answer for other in others):
                    raise Wrong(f"replicas differ about {path}: {answer}")


def has_heard_all(replica: Replica, engine: Engine) -> bool:
    listener = replica.registration(engine).listener
    return listener.cursor.last == len(engine.process.batches) - 1


class Failed(Exception):
    """A seed failed; the text says which and how."""


def run_seed(seed: int, trace: Callable[[str], None] = lambda text: None) -> World:
    """Runs the life of one seed; raises Failed."""
    decide_order(seed)
    made: list[World] = []

    async def main() -> None:
        made.append(World(seed, trace))
        with simulated(made[0].peers):
            await made[0].live()

    try:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, KeyboardInterrupt):
            raise error from None
        raise Failed(f"seed {seed}: {type(error).__name__}: {error}") from error
    return made[0]


__all__ = ["Failed", "World", "run_seed"]
