"""A storm of registrations: whatever clients ask for at once, the last call wins.

Hypothesis generates what some clients do, in any interleaving, to a replica that is recovering from
its peer meanwhile: they register, unregister, pause and resume ranks whose engines publish, fall
silent and replay gaps. Time is virtual, sockets are simulated (network.py), everything else is
real.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.errors import Conflict, NotFound
from kvd.model import PartitionKey, RankKey
from kvd.net.recovery import CONFIRMED_AFTER_S
from kvd.wire.stream_link import ListenerStatus
from tests.simulation.engine import BLOCK
from tests.simulation.fleet import Fleet, check_replica
from tests.simulation.oracle import Oracle
from tests.simulation.replica import Replica
from tests.support.budget import scaled

KEYS = [
    RankKey(PartitionKey("model", tenant), instance_id, dp_rank)
    for tenant, instance_id, dp_rank in (("a", 1, 0), ("a", 1, 1), ("b", 1, 0), ("a", 2, 0))
]
CLIENTS = 3
EXAMPLES = scaled(16)  # 20 ms each

# Integers are turns of the loop, floats seconds: recovery, replays and stops take some of both.
# Mostly 0, as calls at the same time matter most.
WAITS = st.sampled_from([0] * 8 + [1, 1, 2, 3, 0.001, 0.1, 3.0])
ACTIONS = st.sampled_from(
    ["register"] * 4
    + ["unregister", "unregister instance", "unregister everywhere"]
    + ["pause", "pause", "resume", "resume", "speak", "speak", "miss"]
)
STEPS = st.tuples(WAITS, ACTIONS, st.sampled_from(KEYS + KEYS[-1:] * 4))
STORMS = st.lists(st.lists(STEPS, max_size=12), min_size=CLIENTS, max_size=CLIENTS)

GONE, LISTENING, PAUSED = "gone", "listening", "paused"
LEAVES = {"register": LISTENING, "pause": PAUSED, "resume": LISTENING}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@dataclass
class Call:
    """A call that has succeeded: the state that it leaves ranks in, and when it was under way."""

    leaves: str
    began: int
    ended: int = 0


@dataclass
class Storm:
    """One replica, and the calls of clients at it."""

    fleet: Fleet
    replica: Replica
    moment: int = 0  # counts the beginnings and ends of calls
    calls: dict[RankKey, list[Call]] = field(default_factory=lambda: {key: [] for key in KEYS})
    before: dict[RankKey, str] = field(init=False)

    def __post_init__(self) -> None:
        self.before = {key: self._state(key) for key in KEYS}

    async def client(self, steps: list[tuple[float, str, RankKey]]) -> None:
        for wait, action, key in steps:
            if isinstance(wait, float):
                await trio.sleep(wait)
            else:
                for _ in range(wait):
                    await trio.lowlevel.checkpoint()
            await self._do(action, key)

    async def _do(self, action: str, key: RankKey) -> None:
        if action == "speak":
            self.fleet.speak(key)
        elif action == "miss":
            self.fleet.speak(key, heard=False)
            self.fleet.speak(key)
        else:
            await self._call(action, key)

    async def _call(self, action: str, key: RankKey) -> None:
        """Makes a call and notes it for every rank that it may have changed."""
        ranks = [each for each in KEYS if _concerns(action, key, each)]
        there = {rank: self._state(rank) for rank in ranks}
        self.moment += 1
        call = Call(LEAVES.get(action, GONE), self.moment)
        try:
            await self._ask(action, key)
        except (Conflict, NotFound):
            return
        self.moment += 1
        call.ended = self.moment
        for rank in ranks:
            # A call about several ranks skips those that are absent or already as they should be.
            if len(ranks) == 1 or there[rank] not in (GONE, call.leaves):
                self.calls[rank].append(call)

    async def _ask(self, action: str, key: RankKey) -> None:
        registry = self.replica.registry
        model, tenant = key.partition
        if action == "register":
            engine = self.fleet.engines[key]
            registry.register(key, engine.endpoint, BLOCK, engine.replay_endpoint)
        elif action == "pause":
            await registry.pause(key.instance_id, key.dp_rank)
        elif action == "resume":
            registry.resume(key.instance_id, key.dp_rank)
        else:
            rank = key.dp_rank if action == "unregister" else None
            where = None if action == "unregister everywhere" else tenant
            await registry.unregister(key.instance_id, model, where, rank)

    def check(self) -> None:
        check_replica(self.replica)
        for key, calls in self.calls.items():
            # Any call that ended after the last one began may have been the last to take effect.
            began_last = max((call.began for call in calls), default=0)
            last = {call.leaves for call in calls if call.ended >= began_last} or {self.before[key]}
            assert self._state(key) in last, (key, calls)
            if calls and self._state(key) == GONE:
                assert not self._holds(key), "the dump has brought back what was unregistered"

    def _state(self, key: RankKey) -> str:
        registration = self.replica.find(self.fleet.engines[key])
        if registration is None:
            return GONE
        paused = registration.listener.status is ListenerStatus.PAUSED
        return PAUSED if paused else LISTENING

    def _holds(self, key: RankKey) -> bool:
        partition = self.replica.state.partitions.get(key.partition)
        worker = None if partition is None else partition.workers.get(key.instance_id)
        return worker is not None and key.dp_rank in worker.ranks()


def _concerns(action: str, key: RankKey, rank: RankKey) -> bool:
    """Returns whether a call about `key` also concerns `rank`."""
    same = key.instance_id == rank.instance_id
    if action in ("pause", "resume"):
        return same and key.dp_rank == rank.dp_rank
    if action == "unregister instance":
        return same and key.partition == rank.partition
    return same if action == "unregister everywhere" else key == rank


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(storm=STORMS, seed=st.integers(0, 3))
def test_the_last_call_has_its_way(
    storm: list[list[tuple[float, str, RankKey]]], seed: int
) -> None:
    async def main() -> None:
        fleet = Fleet(KEYS, seed)
        async with fleet.living():
            await fleet.start("peer", *KEYS)
            for key in KEYS:
                fleet.speak(key, 3)
            await trio.sleep(1)
            replica = await fleet.start("replica", *KEYS[1:], peers=["peer"])
            storming = Storm(fleet, replica)
            async with trio.open_nursery() as clients:
                for steps in storm:
                    clients.start_soon(storming.client, steps)
            storming.check()
            await trio.sleep(CONFIRMED_AFTER_S)
            assert not replica.state.recovering
            storming.check()
            for key in KEYS:
                fleet.speak(key)
            await trio.sleep(1)
            storming.check()
            Oracle(seed).check_all(replica)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
