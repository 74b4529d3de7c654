"""Random lives of one port with several ranks, without sockets and time: thousands in minutes.

An honest engine of several ranks (engine.py) publishes, clears, restarts, loses its connection and
falls silent; batches get lost; its replay server has a short memory, drops, breaks off or lies
(replays.py); the port is registered again. Some engines send a publisher id: in the frame of the
number, in the batch, or only with some batches; then batches of the previous process may come late,
and old batches twice. The listener and the index are kvd's own. After every step, if the stream is
called exact, the index is compared with what the ranks hold.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

import kvd.wire.losses
from kvd.model import PartitionKey, RankKey
from kvd.wire.cursor import Verdict
from kvd.wire.event_stream import EventStream
from kvd.wire.replay import SEQ_BYTES, ReplayEnd, read_answer
from kvd_core.base.hashing import local_hashes
from kvd_core.events.decoder import publisher
from kvd_core.index.prefix_index import IngestStats, PrefixIndex
from tests.simulation.engine import BLOCK, VALUES, Engine, Path, tokens_of
from tests.simulation.oracle import Wrong
from tests.simulation.replays import BAD, GOOD, OUTLIVED, answer

STEPS = 300
HEARD_AFTER = 64  # numbers; every rank of these ports speaks more often
KEY = RankKey(PartitionKey("model", "default"), 1, 0)

# Replays that may end without the last batch: only the numbers of batches then show a restart.
MUTE = ("silent", "broken_off", "dripping", "garbage")

# Which batches carry a publisher id: none, each in the frame of its number, each in the batch
# itself, or some.
FORMS = ("none", "frame", "batch", "some")
NAMED = ("frame", "batch")


@contextmanager
def hasty() -> Iterator[None]:
    """Shortens HEARD_AFTER, so that a silent rank counts as absent within a short life."""
    before, kvd.wire.losses.HEARD_AFTER = kvd.wire.losses.HEARD_AFTER, HEARD_AFTER
    try:
        yield
    finally:
        kvd.wire.losses.HEARD_AFTER = before


class PortLife:
    """An engine, the way from it, and its listener and index."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.engine = Engine(KEY, self.chance, kind=False, others=self.chance.choice((0, 1, 2)))
        self.form = self.chance.choice(FORMS)
        self.engine.in_batches = self.form == "batch"
        self.has_replay = self.chance.random() < 0.8
        self.replays = "good"
        self.loss = self.chance.choice((0.0, 0.02, 0.2))
        # Number, payload, and the publisher id in the number's frame.
        self.on_the_way: deque[tuple[int, bytes, bytes]] = deque()
        self.index = PrefixIndex(BLOCK, IngestStats())
        self.worker = self.index.add_worker(KEY.instance_id)
        self.counts: Counter[str] = Counter()
        self._register(0)

    def _register(self, expected: int) -> None:
        self.worker.register(KEY.dp_rank)
        endpoint = "tcp://127.0.0.1:2" if self.has_replay else None
        stream = self.worker.stream(KEY.dp_rank)
        self.listener = EventStream("1:0", "tcp://127.0.0.1:1", stream, endpoint, expected)
        self.listener.connecting()
        self.listener.receiving()
        self.listener.joined()

    def live(self) -> None:
        for _ in range(STEPS):
            self._step()
            self._check()
        self._drain()
        self._check()
        self.index.verify()

    def _step(self) -> None:
        kinds = {
            self._publish: 50,
            self._arrive: 60,
            self._ask: 20,
            self._clear: 3,
            self._beat: 5,
            self._repeat: 2,
            self._reconnect: 2,
            self._restart: 2,
            self._change_replays: 2,
            self._register_again: 1,
            self._sweep: 1,
        }
        self.chance.choices(list(kinds), list(kinds.values()))[0]()

    # ---- the engine

    def _publish(self, heard: bool = True) -> None:
        self._send(*self.engine.act(), heard)

    def _clear(self) -> None:
        for seq, payload in self.engine.clear():
            self._send(seq, payload)

    def _beat(self) -> None:
        self._send(*self.engine.beat(bare=self.chance.random() < 0.5))

    def _repeat(self) -> None:
        """Sends an old batch once more, if its publisher id shows which process it is from."""
        batches = self.engine.process.batches
        if self.form in NAMED and batches:
            seq = self.chance.randrange(len(batches))
            self._send(seq, batches[seq])

    def _send(self, seq: int, payload: bytes, heard: bool = True) -> None:
        if heard and self.chance.random() >= self.loss:
            self._put(seq, payload)

    def _put(self, seq: int, payload: bytes) -> None:
        self.on_the_way.append((seq, payload, self._id_beside()))

    def _id_beside(self) -> bytes:
        """Returns the publisher id for the frame of a batch's number, empty for none."""
        named = self.form == "frame" or (self.form == "some" and self.chance.random() < 0.5)
        return self.engine.process.id if named else b""

    def _restart(self) -> None:
        """Ends the process and begins another, so that kvd can always notice.

        Where only numbers show the restart, the new process is heard before it reaches the number
        that is expected of the old one.
        """
        named = self.form in NAMED
        if not (named and self.has_replay and self.replays in GOOD and self.chance.random() < 0.5):
            self._drain()
        expected = self.listener.cursor.expected
        silent = not self.has_replay or self.replays in (*MUTE, "empty", OUTLIVED)
        unheard = self.chance.choice((0, 0, 1, 5, 50))
        if silent and not named and unheard >= expected:
            return
        self.counts["restarts"] += 1
        self.counts["spoke late"] += len(self.on_the_way) > 0
        self.engine.start()
        self._break_off(unheard)
        if silent:  # a low number shows the restart; later the numbers would fit the old process
            self._speak_up()

    def _speak_up(self) -> None:
        self._put(*self.engine.act())
        self._drain()

    # ---- the way

    def _arrive(self) -> None:
        if not self.on_the_way:
            return
        seq, payload, beside = self.on_the_way.popleft()
        speaker = beside or publisher(payload)
        known, restarts = self.listener.identity.publisher, self.listener.stats.restarts
        if speaker != self.listener.identity.speaker:
            self.listener.meet(speaker)
        other = bool(known and speaker and known != speaker)
        self.counts["other ids"] += other
        if self.listener.stats.restarts != restarts + other:
            raise Wrong(f"{known.hex()} and then {speaker.hex()}: a restart, or none")
        if self.listener.take(seq, payload):
            self._settle()

    def _drain(self) -> None:
        while self.on_the_way:
            self._arrive()

    def _reconnect(self) -> None:
        self._drain()
        self._break_off(self.chance.choice((0, 0, 3)))

    def _break_off(self, unheard: int) -> None:
        self.listener.lost_connection("gone", 0.0)
        for _ in range(unheard):
            self._publish(heard=False)
        self.listener.joined()

    def _register_again(self) -> None:
        self.on_the_way.clear()
        self.worker.remove()
        while self.index.sweep(1000):
            pass
        self.worker = self.index.add_worker(KEY.instance_id)
        self._register(self.listener.cursor.expected)
        self.counts["registered again"] += 1

    def _sweep(self) -> None:
        self.index.sweep(self.chance.choice((1, 100)))

    # ---- replays, as the listener's task does them

    def _change_replays(self) -> None:
        self._drain()
        # A server may only answer with batches of the previous process if the listener knows the
        # present one: nothing else would contradict the answer.
        heard = self.form in NAMED and self.listener.identity.publisher == self.engine.process.id
        lies = (OUTLIVED,) * 3 if heard else ()
        self.replays = self.chance.choice((*GOOD, *BAD, *lies))

    def _ask(self) -> None:
        if not self.listener.catch_up.asks or self.on_the_way:
            return
        self.counts["asked"] += 1
        self.listener.catch_up.ask()
        for _ in range(self.chance.choice((0, 0, 2, 150))):
            self._publish()
        self._replay()

    def _settle(self) -> None:
        if self.listener.catch_up.judge() is Verdict.STALE:
            return
        if self.has_replay and self.listener.catch_up.wanted():
            self._replay()
        if lost := self.listener.catch_up.apply_held():
            self.counts["lost"] += len(lost) > 0

    def _replay(self) -> None:
        if self._fetch() is ReplayEnd.OTHER_ENGINE:
            self._fetch()

    def _fetch(self) -> ReplayEnd:
        end = self._read_answer()
        while self.listener.catch_up.wants_more(end):
            self.counts["asked again"] += 1
            end = self._read_answer()
        end = self.listener.catch_up.end(end)
        self.counts[f"replays[{end}]"] += 1
        return end

    def _read_answer(self) -> ReplayEnd:
        self.listener.catch_up.begin()
        start = self.listener.catch_up.wanted().start
        for _, frames in answer(self.replays, self.chance, self.engine, start):
            read = read_answer(self._named(frames))
            if read is None:
                continue
            if read.is_end:
                return ReplayEnd.MARKER
            if (end := self.listener.catch_up.take(*read)) is not None:
                return end
        return ReplayEnd.SILENT

    def _named(self, frames: list[bytes]) -> list[bytes]:
        """Adds the publisher id to the frame of a batch's number, if this engine sends it there."""
        if len(frames) < 2 or len(frames[-2]) != SEQ_BYTES or frames[-2] == b"\xff" * SEQ_BYTES:
            return frames
        beside = self._id_beside()
        if beside and self.replays == OUTLIVED:
            beside = self.engine.processes[-2].id
        return [*frames[:-2], frames[-2] + beside, frames[-1]]

    # ---- judgement

    def _check(self) -> None:
        """Raises Wrong if the stream is called exact but the index disagrees with the engine."""
        if self.listener.health(0.0) != "exact":
            self.counts["not exact"] += 1
            return
        self.counts["exact"] += 1
        self.counts["exact behind a loss"] += self.listener.stats.lost > 0
        expected = self.listener.cursor.expected
        process = self.engine.process
        if expected > len(process.batches):
            raise Wrong(f"exact at {expected}, and the engine has said {len(process.batches)}")
        for path in self._questions():
            found, _ = self.index.match(local_hashes(tokens_of(path), BLOCK))
            for rank in self.engine.ranks:
                indexed = found.get((KEY.instance_id, rank), (0, 0, 0))
                truth = self.engine.truth(process.number, expected, rank).depths(path)
                if indexed != truth:
                    raise Wrong(
                        f"rank {rank} holds {truth} of {path}, and the index says {indexed}"
                    )

    def _questions(self) -> list[Path]:
        known = self.engine.asked
        picked = self.chance.sample(known, min(3, len(known)))
        return [*picked, tuple(self.chance.randrange(VALUES) for _ in range(3))]


def live(seed: int) -> Counter[str]:
    """Runs the life of one seed and returns counts of its events; raises Wrong."""
    life = PortLife(seed)
    with hasty():
        life.live()
    return life.counts
