"""Compares replicas with the engines' batches: a stream that is called exact must be exact."""

from __future__ import annotations

import json
import random
from typing import Any

import trio

from kvd.faces.indexer.handlers import QueryHandler
from kvd.http.messages import Request, Response
from kvd.wire.event_stream import StreamHealth
from kvd_core.base.hashing import local_hashes
from kvd_core.base.recent import SIZE
from tests.simulation.engine import BLOCK, VALUES, Cache, Depths, Engine, Path, tokens_of
from tests.simulation.replica import Replica, StreamPositions


class Wrong(AssertionError):
    """The simulated fleet is in a state that kvd promises to prevent."""


class Oracle:
    """Asks random questions; its random numbers are independent of the fleet's."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"oracle {seed}")
        self.compared = 0  # questions about exact streams
        self.restored = 0  # questions about streams restored from a peer
        self.excused: dict[str, int] = {}  # unnoticed restarts, by the documented limit

    def check(self, replica: Replica, questions: int = 4) -> None:
        """Raises Wrong if a stream is called exact but the index disagrees with the engine."""
        for engine in replica.engines.values():
            self._check_crashes(replica, engine)
            if self.is_exact(replica, engine) and not self._excuse(replica, engine):
                for path in self._questions(engine, questions):
                    self.compared += 1
                    rank = self._chance.choice(engine.ranks)
                    truth = announced_by(replica, engine, rank)
                    self._compare(replica, engine, path, rank, truth, "exact")
            elif self._goes_on(replica, engine):
                for path in self._questions(engine, questions):
                    self.restored += 1
                    self._check_credited(replica, engine, path)

    def _goes_on(self, replica: Replica, engine: Engine) -> bool:
        """Whether every batch behind those in the peer's dump has been applied."""
        position, tap = replica.restored.get(engine.key), replica.state.taps.get(engine.key)
        if position is None or tap is None or tap.first is None or tap.last is None:
            return False
        process, last, _ = position
        meets = tap.first[0] == process and tap.first[1] <= last + 1 and tap.last[1] >= last
        return meets and tap.unbroken and not tap.restarts

    def _check_credited(self, replica: Replica, engine: Engine, path: Path) -> None:
        """Checks that after a dump with gaps the replica never credits a rank with too much."""
        for rank in engine.ranks:
            truth = announced_by(replica, engine, rank).depths(path)
            found = depths(replica, engine, path, rank)
            if any(more > most for more, most in zip(found, truth, strict=True)):
                raise Wrong(
                    f"{replica.name} goes on behind a dump with {engine.key}, rank {rank}, and "
                    f"says {found} of {path}; the engine said {truth}"
                )

    def check_restored(self, replica: Replica, dumped: StreamPositions) -> None:
        """Raises Wrong unless the replica has all that its peer's exact streams had applied.

        `dumped` is the state of those streams at the peer.
        """
        replica.restored = {key: dumped[key] for key in dumped if key not in replica.departed}
        for key in replica.restored:
            engine = replica.engines[key]
            process, last, _ = dumped[key]
            for path in self._questions(engine, 20):
                self.restored += 1
                for rank in engine.ranks:
                    truth = engine.truth(process, last + 1, rank)
                    self._compare(replica, engine, path, rank, truth, "restored")

    def check_all(self, replica: Replica) -> None:
        """Asks for every prompt that the engines have computed, and verifies the indexes."""
        self.check(replica, questions=1_000)
        for partition in replica.state.partitions.values():
            partition.index.verify()

    def _check_crashes(self, replica: Replica, engine: Engine) -> None:
        found = replica.find(engine)
        if found is not None and found.listener.stats.crashes:
            raise Wrong(f"{replica.name}: the listener of {engine.key} has crashed")

    def is_exact(self, replica: Replica, engine: Engine) -> bool:
        return health(replica, engine) is StreamHealth.EXACT

    def _excuse(self, replica: Replica, engine: Engine) -> bool:
        """Returns whether docs/reliability.md excuses an unnoticed restart of this engine."""
        why = replica.state.taps[engine.key].mixed
        if not why:
            return False
        if why == "nothing":
            raise Wrong(f"{replica.name} has taken two processes of {engine.key} for one")
        self._count_excuse(why)
        return True

    def excuses_late(self, replica: Replica, engine: Engine) -> bool:
        """Returns whether a restarted engine's first batches may have passed for lost ones, late.

        That may happen behind a proxy, or if the engine restarted twice while batches were queued.
        """
        ahead = replica.registration(engine).listener.cursor.expected - len(engine.process.batches)
        if not 0 < ahead <= SIZE:
            return False
        if not engine.proxied and self.is_exact(replica, engine):
            return False
        self._count_excuse("numbers of lost batches")
        return True

    def _count_excuse(self, why: str) -> None:
        self.excused[why] = self.excused.get(why, 0) + 1

    def _questions(self, engine: Engine, count: int) -> list[Path]:
        known = engine.asked
        picked = self._chance.sample(known, count) if count < len(known) else known
        more = [self._chance.randrange(VALUES) for _ in range(4)]
        return [*picked, tuple(more), *((*path, more[0]) for path in picked[:1])]

    def _compare(
        self, replica: Replica, engine: Engine, path: Path, rank: int, cache: Cache, called: str
    ) -> None:
        truth, found = cache.depths(path), depths(replica, engine, path, rank)
        scored = score(replica, engine, path, rank)
        if found != truth or scored != truth[0] * BLOCK:
            tap = replica.state.taps.get(engine.key)
            heard = f"last applied {tap.last}, mixed {tap.mixed!r}" if tap else "not registered"
            raise Wrong(
                f"{replica.name} calls {engine.key} {called} and says {found} (score {scored}) of "
                f"{path}, rank {rank}; the engine said {truth} ({heard}, restored "
                f"{replica.recovery.blocks})"
            )


def health(replica: Replica, engine: Engine) -> StreamHealth | None:
    found = replica.find(engine)
    return None if found is None else found.listener.health(trio.current_time())


def announced_by(replica: Replica, engine: Engine, rank: int) -> Cache:
    """Returns what a rank held after the last batch that the replica has applied."""
    last = replica.state.taps[engine.key].last
    return Cache() if last is None else engine.truth(last[0], last[1] + 1, rank)


def depths(replica: Replica, engine: Engine, path: Path, rank: int) -> Depths:
    partition = replica.state.partitions.get(engine.key.partition)
    if partition is None:
        return 0, 0, 0
    found, _ = partition.index.match(local_hashes(tokens_of(path), BLOCK))
    return found.get((engine.key.instance_id, rank), (0, 0, 0))


def score(replica: Replica, engine: Engine, path: Path, rank: int) -> int:
    """Returns the device tokens of the rank in an answer to /query."""
    if engine.key.partition not in replica.state.partitions:
        return 0
    row = query(replica, engine, path)["scores"].get(str(engine.key.instance_id), {})
    tokens: int = row.get(str(rank), 0)
    return tokens


def query(replica: Replica, engine: Engine, path: Path) -> Any:
    model, tenant = engine.key.partition
    members = {"model_name": model, "tenant_id": tenant, "token_ids": tokens_of(path)}
    request = Request("POST", "/query", b"", [], json.dumps(members).encode())
    response = QueryHandler(replica.state, replica.registry)(request)
    assert isinstance(response, Response) and isinstance(response.body, bytes)
    return json.loads(response.body)
