"""Engines with a publisher id: another id means another engine, whatever the batch numbers are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgpack
import pytest
import trio
import zmq

from kvd.net.link import LinkResources
from kvd.net.replay import Replayer
from kvd.wire.applied_batches import UNKNOWN
from kvd.wire.cursor import Verdict
from kvd.wire.event_stream import EventStream
from kvd.wire.replay import ReplayEnd, read_answer
from tests.support.listening import HASTY, HASTY_REPLAYS, Listening
from tests.support.replay_servers import END_SEQ, Answer, ReplayServer
from tests.support.zmtp_fakes import Publisher, until

A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))
NUMBER = (7).to_bytes(8)

# ---- messages of replays


@pytest.mark.parametrize("before", [[b""], [b"", b"topic"]], ids=["3 frames", "4 frames"])
def test_numbers_of_replayed_batches(before: list[bytes]) -> None:
    for length in range(65):
        number = (NUMBER + A * 4)[:length]
        answer = read_answer([*before, number, b"p"])
        assert answer == {8: (7, b"p", b""), 24: (7, b"p", A)}.get(length), length


def test_a_replayed_batch_may_name_its_publisher_itself() -> None:
    payload = msgpack.packb([1.5, [], 0, B])
    assert read_answer([b"", NUMBER, payload]) == (7, payload, B)
    assert read_answer([b"", NUMBER + A, payload]) == (7, payload, A)


def test_the_end_is_no_empty_payload_of_another_number() -> None:
    ends = [read_answer([b"", number, b""]) for number in (END_SEQ, END_SEQ + A, NUMBER)]
    assert [end is not None and end.is_end for end in ends] == [True, True, False]


# ---- what a listener concludes


class Applied(list[bytes]):
    """A stream that keeps its batches until it is cleared."""

    def apply(self, payload: bytes) -> int:
        self.append(payload)
        return 0

    def restored(self) -> bool:
        return False

    def misfit(self) -> str:
        return ""


def make(*batches: tuple[int, bytes], replay: bool = True) -> tuple[EventStream, Applied]:
    """Returns a listener that has heard batches with these numbers and publisher ids."""
    stream = Applied()
    server = "tcp://127.0.0.1:2" if replay else None
    listener = EventStream("1:0", "tcp://127.0.0.1:1", stream, server)  # type: ignore[arg-type]
    listener.connecting()
    listener.receiving()
    listener.joined()
    for seq, publisher in batches:
        assert hear(listener, seq, publisher) is None
    return listener, stream


def text(seq: int, publisher: bytes = b"") -> bytes:
    return b"%d of %s" % (seq, publisher.hex()[:2].encode())


def hear(listener: EventStream, seq: int, publisher: bytes) -> Verdict | None:
    """Receives a live batch; returns the verdict on it if it is held, None if it is applied."""
    if publisher != listener.identity.speaker:
        listener.meet(publisher)
    return listener.catch_up.judge() if listener.take(seq, text(seq, publisher)) else None


def replayed(listener: EventStream, seqs: range, publisher: bytes) -> ReplayEnd:
    """Reads an answer with these batches and the end marker; returns how the replay ended."""
    listener.catch_up.begin()
    for seq in seqs:
        if (end := listener.catch_up.take(seq, text(seq, publisher), publisher)) is not None:
            return listener.catch_up.end(end)
    return listener.catch_up.end(ReplayEnd.MARKER)


def break_off(listener: EventStream) -> None:
    listener.lost_connection("gone", 0.0)
    listener.joined()


@pytest.mark.parametrize("heard", [1, 5, 200])
@pytest.mark.parametrize("number", [0, 1, 4, 5, 6, 199, 200, 500])
def test_another_id_is_another_engine_at_once(heard: int, number: int) -> None:
    listener, applied = make(*((seq, A) for seq in range(heard)))
    verdict = hear(listener, number, B)
    assert (listener.stats.restarts, listener.identity.publisher) == (1, B)
    assert listener.batches.passed == heard - 1
    if number == 0:
        assert verdict is None
    else:
        assert (verdict, applied, listener.catch_up.wanted()) == (Verdict.GAP, [], range(number))
        assert replayed(listener, range(number), B) is ReplayEnd.REACHED
        assert listener.catch_up.apply_held() == ""
    assert applied == [text(seq, B) for seq in range(number + 1)]
    assert listener.health(0.0) == "exact"


def test_without_replays_what_was_before_is_lost() -> None:
    listener, applied = make((0, A), replay=False)
    assert hear(listener, 3, B) is Verdict.GAP
    assert listener.catch_up.apply_held() == "0..2"
    assert (applied, listener.health(0.0)) == ([text(3, B)], "degraded")


@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_same_id_never_restarts(number: int) -> None:
    """Old batches come over a new connection, in a row as after a restart, but with the same id."""
    listener, applied = make(*((seq, A) for seq in range(300)))
    break_off(listener)
    for seq in range(number, number + 8):
        assert hear(listener, seq, A) is Verdict.STALE
    assert (listener.stats.restarts, listener.stats.stale, len(applied)) == (0, 8, 300)


def test_an_id_may_come_late_and_go_again() -> None:
    listener, _ = make((0, b""), (1, b""), (2, A), (3, b""), (4, A), (5, b""))
    assert (listener.stats.restarts, listener.identity.publisher) == (0, A)
    # Without ids the numbers decide.
    break_off(listener)
    listener.meet(b"")
    assert listener.take(0, b"anew")
    assert listener.catch_up.judge() is Verdict.RESTART
    assert (listener.stats.restarts, listener.identity.publisher) == (1, b"")
    listener.catch_up.apply_held()
    assert hear(listener, 1, B) is None
    assert (listener.stats.restarts, listener.identity.publisher) == (1, B)
    assert hear(listener, 2, C) is Verdict.GAP
    assert listener.stats.restarts == 2


def test_what_another_one_has_said_fills_no_gap() -> None:
    listener, applied = make((0, A))
    assert hear(listener, 5, A) is Verdict.GAP
    assert replayed(listener, range(6), B) is ReplayEnd.MARKER
    assert listener.catch_up.apply_held() == "1..4"
    assert (listener.stats.strays, listener.stats.restarts) == (6, 0)
    assert applied == [text(0, A), text(5, A)]
    assert listener.health(0.0) == "degraded"


def test_an_engine_that_is_asked_says_that_it_is_another_one() -> None:
    listener, applied = make((0, A), (1, A))
    break_off(listener)
    assert listener.catch_up.asks
    listener.catch_up.ask()
    assert replayed(listener, range(3), B) is ReplayEnd.OTHER_ENGINE
    assert (listener.stats.restarts, listener.identity.publisher, applied) == (1, B, [])
    assert replayed(listener, range(3), B) is ReplayEnd.MARKER
    assert applied == [text(seq, B) for seq in range(3)]
    # Only its answers have shown the new id; a published batch has to confirm it.
    assert (listener.catch_up.asks, listener.health(0.0)) == (False, "recovering")
    assert hear(listener, 3, B) is None
    assert (listener.stats.restarts, listener.health(0.0)) == (1, "exact")


def test_a_replay_server_of_another_engine_is_found_out() -> None:
    listener, applied = make((0, A), (1, A))
    break_off(listener)
    listener.catch_up.ask()
    assert replayed(listener, range(3), B) is ReplayEnd.OTHER_ENGINE
    replayed(listener, range(3), B)
    assert hear(listener, 2, A) is Verdict.GAP
    replayed(listener, range(3), B)
    assert (listener.catch_up.apply_held(), applied) == ("0..1", [text(2, A)])
    assert listener.health(0.0) == "degraded"


def test_one_that_contradicts_itself_proves_nothing() -> None:
    listener, _ = make((0, A), (1, A))
    break_off(listener)
    assert hear(listener, 2, A) is Verdict.NEXT
    listener.catch_up.begin()
    assert listener.catch_up.take(1, b"other", A) is None
    assert listener.catch_up.end(ReplayEnd.MARKER) is ReplayEnd.MARKER
    listener.catch_up.apply_held()
    assert (listener.stats.restarts, listener.loss) == (0, UNKNOWN)


def test_an_empty_payload_proves_nothing_by_itself() -> None:
    for publisher, loss in ((b"", UNKNOWN), (A, "")):
        listener, _ = make((0, publisher))
        assert listener.take(1, b"") is False
        break_off(listener)
        assert hear(listener, 2, publisher) is Verdict.NEXT
        listener.catch_up.begin()
        listener.catch_up.take(1, b"", publisher)
        listener.catch_up.take(2, text(2, publisher), publisher)
        listener.catch_up.end(ReplayEnd.REACHED)
        listener.catch_up.apply_held()
        assert (listener.stats.restarts, listener.loss) == (0, loss)


def test_what_came_while_another_was_in_doubt_is_asked_for() -> None:
    """Of three engines, the second one's batch is heard only after the third one's."""
    listener, _ = make((0, A), (1, A))
    break_off(listener)
    break_off(listener)
    assert hear(listener, 2, A) is Verdict.NEXT
    assert replayed(listener, range(1), C) is ReplayEnd.MARKER
    listener.catch_up.apply_held()
    assert hear(listener, 0, B) is Verdict.NEXT  # held until a replay
    assert replayed(listener, range(1), C) is ReplayEnd.MARKER
    listener.catch_up.apply_held()
    assert listener.loss == UNKNOWN
    assert hear(listener, 0, C) is Verdict.NEXT
    assert replayed(listener, range(1), C) is ReplayEnd.REACHED
    listener.catch_up.apply_held()
    assert (listener.health(0.0), listener.loss) == ("exact", "")


# ---- over sockets

Serve = Callable[..., ReplayServer]


class Engine:
    """An engine that changes its publisher id, which it sends beside the number or in the batch."""

    def __init__(self, worker: Publisher, in_batch: bool) -> None:
        self.worker = worker
        self.in_batch = in_batch
        self.published: list[tuple[bytes, bytes]] = []  # number frame and payload
        self.start(A)

    def start(self, publisher: bytes) -> None:
        self.publisher = publisher
        self.published.clear()

    def add_batch(self, heard: bool = True, payload: bytes | None = None) -> bytes:
        """Publishes the next batch and returns its payload."""
        number = len(self.published).to_bytes(8)
        if self.in_batch:
            payload = msgpack.packb([len(self.published), [], 0, self.publisher])
        else:
            number += self.publisher
            payload = msgpack.packb([len(self.published), [], 0]) if payload is None else payload
        self.published.append((number, payload))
        if heard:
            self.worker.send_frames(b"kv", number, payload)
        return payload

    async def replay(self, server: ReplayServer, start: int, reply: Callable) -> None:
        for number, payload in self.published[start:]:
            reply([b"kv", number, payload])
        reply([b"", END_SEQ, b""])


@pytest.fixture(params=[False, True], ids=["frame", "batch"])
async def heard(
    request: pytest.FixtureRequest,
    publish: Callable[..., Publisher],
    context: zmq.Context,
    nursery: trio.Nursery,
) -> Iterator[tuple[Engine, Listening]]:
    worker = publish()
    engine = Engine(worker, request.param)
    answer: Answer = engine.replay
    server = ReplayServer(context, answer)
    nursery.start_soon(server.run)
    listening = Listening(worker.endpoint, server.endpoint)
    listening.ready.set()
    replayer = Replayer(LinkResources(context), HASTY, HASTY_REPLAYS)
    nursery.start_soon(listening.run, context, HASTY, replayer)
    await worker.subscribed()
    return engine, listening


async def applied(listening: Listening, *payloads: bytes | None) -> None:
    await until(lambda: len(listening.applied) >= len(payloads))
    assert listening.applied == list(payloads)


async def test_a_gap_is_replayed(heard: tuple[Engine, Listening]) -> None:
    engine, listening = heard
    batches = [engine.add_batch(heard=number not in (1, 2)) for number in range(4)]
    await applied(listening, *batches)
    assert listening.listener.identity.publisher == A
    assert listening.listener.health(trio.current_time()) == "exact"


@pytest.mark.parametrize("unheard", [0, 1, 3])
async def test_an_engine_that_comes_as_far_unheard_is_another_one(
    heard: tuple[Engine, Listening], unheard: int
) -> None:
    """Behind a proxy no connection is lost; the new engine's first number fits, or leaves a gap."""
    engine, listening = heard
    old = [engine.add_batch() for _ in range(2)]
    await applied(listening, *old)
    engine.start(B)
    new = [engine.add_batch(heard=number >= 2 + unheard) for number in range(3 + unheard)]
    await applied(listening, *old, None, *new)
    listener = listening.listener
    assert listener.identity.publisher == B
    assert (listener.stats.restarts, listener.stats.lost) == (1, 0)
    assert listener.health(trio.current_time()) == "exact"


async def test_a_thousand_beats_are_no_event(heard: tuple[Engine, Listening]) -> None:
    engine, listening = heard
    barrier = None if engine.in_batch else b""
    for _ in range(1000):
        engine.add_batch(payload=barrier)
    await until(lambda: len(listening.applied) == 1000)
    listener = listening.listener
    assert listener.health(trio.current_time()) == "exact"
    stats = listener.stats
    counts = (stats.flawed, stats.gaps, stats.stale, stats.restarts, stats.refused)
    assert counts == (0, 0, 0, 0, 0)


async def test_an_empty_payload_in_a_replay_is_not_its_end(
    heard: tuple[Engine, Listening],
) -> None:
    engine, listening = heard
    beats = [engine.add_batch()]
    beats += [engine.add_batch(heard=False, payload=b"") for _ in range(2)]
    beats += [engine.add_batch()]
    await applied(listening, *beats)
    assert listening.listener.stats.lost == 0
