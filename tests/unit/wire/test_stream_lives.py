"""Random lives of an engine and its stream without sockets: a stream called exact must be exact.

The engine publishes, restarts, loses its connection; messages get lost; its replay server keeps
only the last batches, and answers or does not. After every step the batches that the stream has
applied are compared with those that the engine's process has published.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from kvd.wire.cursor import Verdict
from kvd.wire.event_stream import EventStream
from kvd.wire.replay import ReplayEnd
from tests.support.batch_sinks import NoStream
from tests.support.budget import scaled

STEPS = 400
SEEDS = scaled(16)  # ten thousand seeds have passed


class Applied(list[bytes], NoStream):
    dumped = False  # whether blocks of a peer's dump are there
    heard = False  # whether a batch has confirmed these blocks

    def apply(self, payload: bytes) -> int:
        self.append(payload)
        self.heard = True
        return 0

    def clear(self) -> None:
        super().clear()
        self.dumped = False

    def restored(self) -> bool:
        return self.dumped and not self.heard

    def drop_restored(self) -> bool:
        dropped = self.restored()
        self.dumped = self.dumped and not dropped
        return dropped


class Life:
    """An engine, the way from it, and its listener."""

    def __init__(self, seed: int, replays: bool) -> None:
        self.chance = random.Random(seed)
        self.replays = replays
        self.published: list[bytes] = []  # by the engine's present process
        self.process = 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=self.chance.choice((1, 3, 10, 1000)))
        self.loss = self.chance.choice((0.0, 0.1, 0.5))
        self.room = self.chance.choice((2, 20, 1000))  # messages that its replay socket holds
        self.on_the_way: deque[tuple[int, bytes]] = deque()
        self.applied = Applied()
        endpoint = "tcp://127.0.0.1:2" if replays else None
        self.listener = EventStream("1:0", "tcp://127.0.0.1:1", self.applied, endpoint)
        self.connect()

    def connect(self) -> None:
        self.listener.connecting()
        self.listener.receiving()
        self.listener.joined()

    def step(self) -> None:
        kinds = [self.publish, self.arrive, self.arrive, self.reconnect, self.restart, self.ask]
        self.chance.choices(kinds, (40, 40, 40, 2, 2, 20))[0]()

    def ask(self) -> None:
        """Asks the engine, as an idle listener's task does; batches may come meanwhile."""
        if not self.listener.catch_up.asks or self.on_the_way:
            return
        self.listener.catch_up.ask()
        for _ in range(self.chance.choice((0, 0, 2, 200))):
            self.publish()
        if self.replay() is ReplayEnd.OTHER_ENGINE:
            self.replay()
        assert not self.listener.catch_up.asks
        dead = [batch for batch in self.applied if batch.split()[2] != b"%d" % self.process]
        # An ended process whose successor has reached the same number may stay unnoticed.
        assert not dead or self.listener.loss

    def publish(self, heard: bool = True) -> None:
        seq = len(self.published)
        batch = b"%d of %d" % (seq, self.process)
        self.published.append(batch)
        self.kept.append((seq, batch))
        if heard and self.chance.random() >= self.loss:
            self.on_the_way.append((seq, batch))

    def arrive(self) -> None:
        if self.on_the_way and self.listener.take(*self.on_the_way.popleft()):
            self.settle()

    def settle(self) -> None:
        if self.listener.catch_up.judge() is Verdict.STALE:
            return
        if self.replays and self.replay() is ReplayEnd.OTHER_ENGINE:
            self.replay()
        self.listener.catch_up.apply_held()

    def replay(self) -> ReplayEnd | None:
        wanted = self.listener.catch_up.wanted()
        if not wanted:
            return None
        end = self.answer(wanted.start)
        while self.listener.catch_up.wants_more(end):
            end = self.answer(self.listener.catch_up.wanted().start)
        return self.listener.catch_up.end(end)

    def answer(self, start: int) -> ReplayEnd:
        """Answers from a number on, with as many batches as the server's socket has room for."""
        self.listener.catch_up.begin()
        sent = 0
        for seq, batch in list(self.kept):
            if seq < start or (sent >= self.room and self.chance.random() < 0.5):
                continue
            sent += 1
            if (end := self.listener.catch_up.take(seq, batch)) is not None:
                return end
        silent = sent and self.chance.random() < 0.1
        return ReplayEnd.SILENT if silent else ReplayEnd.MARKER

    def reconnect(self) -> None:
        self.break_off(self.chance.choice((0, 0, 3)))

    def restart(self) -> None:
        self.drain()
        self.process += 1
        self.published.clear()
        self.kept.clear()
        self.break_off(self.chance.choice((0, 0, 1, 5, 50)))

    def break_off(self, unheard: int) -> None:
        self.drain()
        self.listener.lost_connection("gone", 0.0)
        for _ in range(unheard):
            self.publish(heard=False)
        self.listener.joined()

    def drain(self) -> None:
        while self.on_the_way:
            self.arrive()

    def check(self) -> None:
        expected = self.listener.cursor.expected
        assert self.listener.stats.lost + len(self.applied) >= expected
        if self.listener.health(0.0) == "exact":
            assert self.applied == self.published[:expected]
            assert not self.applied.dumped
        elif self.listener.loss.startswith("missing"):
            assert self.applied != self.published[:expected]

    def check_dump(self) -> None:
        """Checks that a stream with a peer's blocks is not called exact.

        Without a replay server not every restart is noticed.
        """
        if self.listener.health(0.0) == "exact":
            assert not self.applied.dumped


def play(life: Life, check: Callable[[], None]) -> None:
    for _ in range(STEPS):
        life.step()
        check()
    life.loss = 0.0
    life.publish()
    life.drain()
    check()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_with_a_replay_server_exact_is_exact(seed: int) -> None:
    life = Life(seed, replays=True)
    play(life, life.check)


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_a_dump_is_never_called_exact(seed: int, replays: bool) -> None:
    life = Life(seed, replays)
    life.applied.dumped = True
    for _ in range(life.chance.choice((0, 1, 30))):  # so that the dump may know this process
        life.publish(heard=False)
    play(life, life.check_dump)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_long_buffer_repairs_everything(seed: int) -> None:
    life = Life(seed, replays=True)
    life.kept = deque()
    play(life, life.check)
    assert life.listener.health(0.0) == "exact"
    assert life.applied == life.published
