"""Pairs of replicas without sockets, compared with plain-Python ones that get the same deliveries.

Their events go as frames through channels that lose, repeat and reorder them.
"""

from __future__ import annotations

import json
import random
from array import array
from collections import deque
from collections.abc import Callable

import pytest

from kvd.errors import KvdError
from kvd.model import PartitionKey
from kvd.slots.trackers import SlotTrackers
from kvd.wire.fields import Refused
from kvd.wire.lifecycle import TOPIC, Lifecycle, Outcome, Step, decode, encode
from kvd_core.json.scan import BodyScanner
from tests.models.slots_model import ModelSlots, Published
from tests.support.budget import scaled

HASHES = BodyScanner({"sequence_hashes": "i64"}, ())
KEYS = [("m", "default"), ("m", "é"), ("m:é", "")]
WORKERS = (1, 2, 2**64 - 1)
BLOCK_SIZES = (16, 32)
VOCABULARY = 3  # hashes: so few that prompts often share prefixes and diverge
EXPIRY_S = 40.0


class Replica:
    """Slot trackers and their model, driven by the same steps and events."""

    def __init__(self, rng: random.Random, router_id: int) -> None:
        self.rng = rng
        self.router_id = router_id
        self.slots = SlotTrackers(EXPIRY_S)
        self.slots.steps.subscribe(self._publish)
        self.model = ModelSlots(EXPIRY_S)
        self.published: list[Lifecycle] = []
        self.sent: deque[bytes] = deque()  # to the other replica
        self.now = 0.0

    def _publish(self, event: Lifecycle) -> None:
        self.published.append(event)
        self.sent.append(encode(event, self.router_id))

    def check(self, expected: Published | None, step: Callable[[], object]) -> None:
        """Takes a step; it must be refused if None is expected, else publish these events."""
        self.published = []
        try:
            step()
        except KvdError:
            assert not expected
        published = [
            (
                e.step,
                e.request_id,
                e.worker_id,
                e.dp_rank,
                array("Q", e.hashes).tolist(),
                e.prefill_tokens,
            )
            for e in self.published
        ]
        assert published == (expected or [])

    # ---- steps

    def register(self, key: tuple[str, str], worker: int, block_size: int = 16) -> None:
        ranks = 1 + worker % 2
        known = self.model.register(key, worker, block_size, ranks)
        try:
            self.slots.register(PartitionKey(*key), worker, block_size, 0, ranks)
        except KvdError:
            assert not known

    def unregister(self, key: tuple[str, str], worker: int) -> None:
        expected = self.model.unregister(key, worker)
        self.check(expected, lambda: list(self.slots.leave(PartitionKey(*key), worker)))

    def add(self, key: tuple[str, str], name: str, worker: int, retry_key: str | None) -> None:
        place = worker, self.rng.randrange(2)
        hashes, tokens = prompt(self.rng), self.rng.choice((0, 1, 48, 2**50))
        expected = self.model.add(key, name, place, hashes, tokens, self.now, retry_key)

        def add() -> None:
            HASHES.scan(json.dumps({"sequence_hashes": hashes}).encode())
            booking = name, *place, HASHES, tokens, self.now, retry_key
            self.slots.add(self.slots.tracker(*key), *booking)

        self.check(expected, add)

    def prefill_complete(self, key: tuple[str, str], name: str) -> None:
        expected = self.model.step(key, name, Step.PREFILL_COMPLETE)
        slots = self.slots
        self.check(expected, lambda: slots.prefill_complete(slots.tracker(*key), name))

    def free(self, key: tuple[str, str], name: str) -> None:
        expected = self.model.step(key, name, Step.FREE)
        self.check(expected, lambda: self.slots.end(self.slots.tracker(*key), name))

    def expire(self) -> None:
        self.model.expire(self.now)
        self.check([], lambda: list(self.slots.expire(self.now)))

    def hear(self, payload: bytes) -> Outcome:
        decoded = decode([TOPIC, payload])
        assert not isinstance(decoded, Refused)
        assert decoded.router_id != self.router_id
        expected = self.model.apply(decoded, self.now)
        self.published = []
        assert self.slots.apply(decoded, self.now) is expected
        assert self.published == []
        return expected

    # ---- comparisons

    def loads(self) -> list[tuple[object, ...]]:
        return [tuple(row.values()) for row in json.loads(self.slots.render_loads(None, None))]

    def compare(self) -> None:
        assert self.loads() == self.model.loads()
        hashes = prompt(self.rng)
        for key, tracker in self.slots.trackers.items():
            tracker.ledger.verify()
            rows = json.loads(tracker.ledger.project(array("Q", hashes).tobytes(), 0))
            assert [tuple(row.values()) for row in rows] == self.model.projection(key, hashes)


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 1, 2, 3, 6)))]


class LossyChannel:
    """Delivers one replica's events to the other: some never, some repeatedly, in any order."""

    def __init__(self, rng: random.Random, speaker: Replica, listener: Replica) -> None:
        self.rng = rng
        self.speaker = speaker
        self.listener = listener
        self.under_way: list[bytes] = []
        self.outcomes: set[Outcome] = set()

    def deliver(self) -> None:
        self.under_way += [frame for frame in self.speaker.sent if self.rng.random() < 0.8]
        self.speaker.sent.clear()
        if not self.under_way:
            return
        at = self.rng.randrange(len(self.under_way))
        frame = self.under_way[at]
        if self.rng.random() < 0.8:
            del self.under_way[at]
        self.outcomes.add(self.listener.hear(frame))


def any_step(rng: random.Random, replica: Replica, names: list[str]) -> None:
    key, worker, name = rng.choice(KEYS), rng.choice(WORKERS), rng.choice(names)
    block_size = BLOCK_SIZES[rng.random() < 0.1]
    steps: dict[Callable[[], None], int] = {
        lambda: replica.add(key, name, worker, rng.choice((None, "k"))): 30,
        lambda: replica.prefill_complete(key, name): 10,
        lambda: replica.free(key, name): 12,
        lambda: replica.register(key, worker, block_size): 6,
        lambda: replica.unregister(key, worker): 1,
        replica.expire: 1,
    }
    rng.choices(list(steps), weights=list(steps.values()))[0]()


@pytest.mark.parametrize("seed", range(scaled(2)))
def test_a_replica_accounts_for_what_is_delivered(seed: int) -> None:
    rng = random.Random(seed)
    replicas = Replica(rng, 1), Replica(rng, 2)
    channels = [
        LossyChannel(rng, *replicas),
        LossyChannel(rng, *reversed(replicas)),
    ]
    names = [str(number) for number in range(25)]
    for replica in replicas:
        for key in KEYS:
            replica.register(key, 1)
    for _ in range(300):
        replica, channel = rng.choice(replicas), rng.choice(channels)
        replica.now += rng.choice((0.0, 0.5))
        any_step(rng, replica, names)
        replica.compare()
        channel.deliver()
        channel.listener.compare()
    assert Outcome.APPLIED in channels[0].outcomes & channels[1].outcomes


def test_every_outcome_comes_up() -> None:
    """Otherwise the test above would compare little."""
    rng = random.Random(99)
    replicas = Replica(rng, 1), Replica(rng, 2)
    channel = LossyChannel(rng, *replicas)
    for _ in range(1000):
        for replica in replicas:
            any_step(rng, replica, ["a", "b", "c"])
        channel.deliver()
    # Both replicas know the same ranks, nothing gets full here, only session bindings can be older,
    # and only a third replica could end a request that the second has yet to announce.
    never = {Outcome.UNKNOWN_RANK, Outcome.FULL, Outcome.OLDER, Outcome.ENDED}
    assert channel.outcomes == set(Outcome) - never


@pytest.mark.parametrize("seed", range(scaled(2)))
def test_replicas_that_hear_everything_agree(seed: int) -> None:
    """Each id is used once, at one replica, as clients do; workers change between bursts."""
    rng = random.Random(seed)
    replicas = Replica(rng, 1), Replica(rng, 2)
    live: list[tuple[tuple[str, str], str]] = []
    admitted = 0

    def hear_one(speaker: Replica, listener: Replica) -> None:
        if speaker.sent:
            listener.hear(speaker.sent.popleft())

    for _ in range(6):
        for replica in replicas:
            for key in KEYS:
                for worker in WORKERS:
                    replica.register(key, worker)
        for _ in range(60):
            replica = rng.choice(replicas)
            if rng.random() < 0.5:
                key, admitted = rng.choice(KEYS), admitted + 1
                live.append((key, str(admitted)))
                replica.add(*live[-1], rng.choice(WORKERS), None)
            elif live:
                step = rng.choice((replica.prefill_complete, replica.free))
                step(*rng.choice(live))
            if rng.random() < 0.7:
                hear_one(*rng.sample(replicas, 2))
        while replicas[0].sent or replicas[1].sent:
            hear_one(*rng.sample(replicas, 2))
        for replica in replicas:
            replica.compare()
        assert replicas[0].loads() == replicas[1].loads()
        # One side's operator removes a worker, whose requests the other side loses at once.
        key, worker = rng.choice(KEYS), rng.choice(WORKERS)
        replicas[0].unregister(key, worker)
        while replicas[0].sent:
            hear_one(*replicas)
        idle = [row[4:] for row in replicas[1].loads() if row[:3] == (*key, worker)]
        assert set(idle) == {(0, 0)}
        replicas[1].unregister(key, worker)
        assert not replicas[1].sent
