"""Replays over real sockets: requested, requested again, ended within their limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing

import pytest
import trio
import zmq

from kvd.net.link import LinkResources
from kvd.net.replay import Replayer, ReplayOptions
from tests.support.descriptors import descriptors_now, open_descriptors
from tests.support.listening import HASTY, HASTY_REPLAYS, PATIENT_REPLAYS, Listening
from tests.support.replay_servers import (
    Answer,
    ReplayServer,
    answering,
    dripping,
    endless,
    four_frames,
    one_and_silence,
    silent,
    slow,
    three_frames,
    with_numbers,
    without_end,
)
from tests.support.zmtp_fakes import Publisher, reserved_endpoint, until

Publish = Callable[..., Publisher]
Serve = Callable[..., ReplayServer]


@pytest.fixture
def serve(context: zmq.Context, nursery: trio.Nursery) -> Serve:
    """Returns a function that starts replay servers."""

    def start(answer: Answer, buffer: range = range(100)) -> ReplayServer:
        server = ReplayServer(context, answer, buffer)
        nursery.start_soon(server.run)
        return server

    return start


class Stream:
    """A publisher and its listener; each batch is its number as text."""

    def __init__(self, worker: Publisher, listening: Listening) -> None:
        self.worker = worker
        self.listening = listening
        self.listener = listening.listener

    def send(self, *seqs: int) -> None:
        for seq in seqs:
            self.worker.seq = seq
            self.worker.send(b"%d" % seq)

    async def applied(self, *seqs: int) -> None:
        """Waits until the last of these is applied; exactly these must have been, in order."""
        applied = self.listening.applied
        last = b"%d" % seqs[-1]
        await until(lambda: applied and applied[-1] == last)
        assert applied == [b"%d" % seq for seq in seqs]

    def health(self) -> str:
        return self.listener.health(trio.current_time())


@pytest.fixture
def stream(publish: Publish, context: zmq.Context, nursery: trio.Nursery) -> Callable[..., object]:
    """Returns a function that makes streams whose listener has applied batch 0."""
    replayers: dict[ReplayOptions, Replayer] = {}

    async def start(endpoint: str | None, replays: ReplayOptions = PATIENT_REPLAYS) -> Stream:
        replayer = replayers.setdefault(replays, Replayer(LinkResources(context), HASTY, replays))
        worker = publish()
        listening = Listening(worker.endpoint, endpoint)
        listening.ready.set()
        nursery.start_soon(listening.run, context, HASTY, replayer)
        await worker.subscribed()
        made = Stream(worker, listening)
        made.send(0)
        await made.applied(0)
        return made

    return start


GARBAGE = answering([], [b""], [b"\0"], [b"", b"", b"", b"", b""], [b"\0" * 7, b"p"])
ALL = [0, 1, 2, 3, 4, 5, 6]

# For a request of 1 .. 5: the server's answer, the batches applied in the end, how the replay ends.
# Numbers missing behind a batch that came are requested again; those missing before are lost.
SERVERS: dict[str, tuple[Answer, list[int], str]] = {
    "3 frames": (three_frames, ALL, "reached"),
    "4 frames": (four_frames, ALL, "reached"),
    "no end": (without_end, ALL, "reached"),
    "slow": (slow, ALL, "reached"),
    "the end alone": (answering([b"\xff" * 8, b""]), [0, 6], "marker"),
    "silent": (silent, [0, 6], "silent"),
    "endless": (endless, [0, 6], "too_much"),
    "dripping": (dripping, [0, 6], "silent"),
    "garbage": (GARBAGE, [0, 6], "silent"),
    "oversized": (answering([bytes(8), bytes(HASTY.max_message_bytes + 1)]), [0, 6], "silent"),
    "wrapped": (with_numbers(4, 5), [0, 4, 5, 6], "reached"),
    "a hole": (with_numbers(1, 2, 5), [0, 1, 2, 5, 6], "reached"),
    "duplicates": (with_numbers(0, 1, 1, 2, 1, 3, 3, 4, 5), ALL, "reached"),
    "reordered": (with_numbers(2, 1, 4, 3, 5), [0, 2, 4, 5, 6], "reached"),
    "out of range": (with_numbers(1000, 1001), [0, 6], "reached"),
}


@pytest.mark.parametrize("name", SERVERS)
async def test_replay(stream: Callable, serve: Serve, name: str) -> None:
    answer, applied, end = SERVERS[name]
    server = serve(answer)
    patience = HASTY_REPLAYS if end == "silent" else PATIENT_REPLAYS
    made = await stream(server.endpoint, dataclasses.replace(patience, max_messages=500))
    made.send(6)
    await made.applied(*applied)
    listener = made.listener
    again = [3] if name in ("a hole", "reordered") else []
    assert (server.requests, listener.stats.replays) == ([1, *again], {end: 1})
    assert (listener.stats.gaps, listener.stats.replayed) == (1, len(applied) - 2)
    assert listener.stats.lost == 7 - len(applied)
    assert made.health() == ("exact" if applied == ALL else "degraded")
    made.send(7, 8)
    await made.applied(*applied, 7, 8)


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("last_words", ["the end", "the last batch", "nothing"])
async def test_what_has_not_come_is_asked_for_again_as_long_as_something_does(
    stream: Callable, serve: Serve, most: int, last_words: str
) -> None:
    """A socket with room for so many messages drops others, perhaps also the end marker."""

    async def some(server: ReplayServer, start: int, reply: Callable) -> None:
        if last_words == "the last batch" and start < 6:
            for seq in [*range(start, 6)[:most], 99]:
                reply([seq.to_bytes(8), b"%d" % seq])
            return
        for seq in range(start, 7)[:most]:
            reply([seq.to_bytes(8), b"%d" % seq])
        if last_words == "the end":
            reply([b"\xff" * 8, b""])

    server = serve(some)
    patience = HASTY_REPLAYS if last_words == "nothing" else PATIENT_REPLAYS
    made = await stream(server.endpoint, patience)
    made.send(6)
    await made.applied(*ALL)
    assert server.requests == list(range(1, 6, most))
    assert (made.listener.stats.replays, made.listener.stats.lost) == ({"reached": 1}, 0)


async def test_what_is_asked_for_again_ends(stream: Callable, serve: Serve) -> None:
    """No answer has the numbers for which the engine kept no batch; requests for them must end."""
    server = serve(three_frames)
    server.buffer.pop(3)
    server.buffer.pop(5)
    made = await stream(server.endpoint)
    made.send(9)
    await made.applied(0, 1, 2, 4, 6, 7, 8, 9)
    assert server.requests == [1, 3, 5]
    assert made.listener.loss == "missing 3,5"


async def test_all_answers_of_a_replay_have_one_limit(stream: Callable, serve: Serve) -> None:
    sizes = dataclasses.replace(HASTY_REPLAYS, max_messages=3)
    made = await stream(serve(one_and_silence).endpoint, sizes)
    made.send(6)
    await made.applied(0, 1, 2, 3, 6)
    assert made.listener.stats.replays == {"too_much": 1}


async def test_a_dead_server_holds_nothing_up(stream: Callable) -> None:
    with reserved_endpoint() as endpoint:
        made = await stream(endpoint, HASTY_REPLAYS)
        made.send(6)
        await made.applied(0, 6)
    assert made.listener.stats.replays == {"silent": 1}
    assert (made.health(), made.listener.loss) == ("degraded", "missing 1..5")


async def test_an_endpoint_that_cannot_be_connected(stream: Callable) -> None:
    made = await stream("tcp://*:5558")
    made.send(6)
    await made.applied(0, 6)
    assert made.listener.stats.replays == {"failed": 1}


async def test_without_a_server_gaps_are_counted(stream: Callable) -> None:
    made = await stream(None)
    made.send(6, 7, 9)
    await made.applied(0, 6, 7, 9)
    listener = made.listener
    assert (listener.stats.gaps, listener.stats.lost, listener.stats.replays) == (2, 6, {})
    assert (made.health(), listener.loss) == ("degraded", "missing 8")


async def test_no_answer_takes_longer_than_the_limit(stream: Callable, serve: Serve) -> None:
    made = await stream(serve(dripping).endpoint, dataclasses.replace(PATIENT_REPLAYS, total_s=0.1))
    made.send(6)
    await made.applied(0, 6)
    assert made.listener.stats.replays == {"late": 1}


async def test_no_answer_is_larger_than_the_limit(stream: Callable, serve: Serve) -> None:
    sizes = dataclasses.replace(PATIENT_REPLAYS, max_bytes=20)  # two batches of 9 bytes do not fit
    made = await stream(serve(without_end).endpoint, sizes)
    made.send(6)
    await made.applied(0, 1, 2, 3, 6)
    assert made.listener.stats.replays == {"too_much": 1}


async def test_live_batches_wait_and_are_applied_once(stream: Callable, serve: Serve) -> None:
    server = serve(slow)
    made = await stream(server.endpoint)
    made.send(4)
    await until(lambda: server.requests)
    assert made.health() == "recovering"
    made.send(*range(5, 300))
    await made.applied(*range(300))
    assert (made.listener.stats.gaps, made.listener.stats.stale, made.health()) == (1, 0, "exact")


async def test_every_gap_is_asked_about_once(stream: Callable, serve: Serve) -> None:
    server = serve(four_frames)
    made = await stream(server.endpoint)
    made.send(3, 7, 8, 11)
    await made.applied(*range(12))
    assert server.requests == [1, 4, 9]
    assert made.listener.stats.replays == {"reached": 3}


async def test_a_first_number_above_0_is_a_gap(
    publish: Publish, serve: Serve, context: zmq.Context, nursery: trio.Nursery
) -> None:
    worker, server = publish(), serve(three_frames)
    listening = Listening(worker.endpoint, server.endpoint)
    listening.ready.set()
    nursery.start_soon(listening.run, context, HASTY)
    await worker.subscribed()
    worker.seq = 40
    worker.send(b"40")
    await until(lambda: len(listening.applied) == 41)
    assert (server.requests, listening.listener.stats.lost) == ([0], 0)


async def test_a_late_answer_is_never_that_to_a_later_question(
    stream: Callable, serve: Serve
) -> None:
    server = serve(silent)
    made = await stream(server.endpoint, HASTY_REPLAYS)
    made.send(3)
    await made.applied(0, 3)
    server.answer = one_and_silence
    made.send(6)
    await until(lambda: len(server.requests) == 2)
    for frames in ([(5).to_bytes(8), b"wrong"], [b"\xff" * 8, b""]):
        server.reply(server.askers[0], frames)
    await made.applied(0, 3, 4, 5, 6)
    assert server.askers[0] != server.askers[1]
    stats = made.listener.stats
    assert (stats.replays, stats.strays) == ({"silent": 1, "reached": 1}, 0)


async def test_a_silent_server_is_spared_for_a_while(stream: Callable, serve: Serve) -> None:
    server = serve(silent)
    made = await stream(server.endpoint, dataclasses.replace(HASTY_REPLAYS, spare_s=60.0))
    made.send(3, 6, 9)
    await made.applied(0, 3, 6, 9)
    assert (server.requests, made.listener.stats.spared_replays) == ([1], 2)
    assert made.listener.stats.lost == 6


async def test_one_server_may_serve_several_ranks(stream: Callable, serve: Serve) -> None:
    server = serve(four_frames)
    streams = [await stream(server.endpoint) for _ in range(3)]
    for at, made in enumerate(streams, 2):
        made.send(at)
    for at, made in enumerate(streams, 2):
        await made.applied(*range(at + 1))


async def test_only_so_many_replays_run_at_once(stream: Callable, serve: Serve) -> None:
    server = serve(silent)
    options = dataclasses.replace(HASTY_REPLAYS, at_once=2)
    streams = [await stream(server.endpoint, options) for _ in range(5)]
    for made in streams:
        made.send(3)
    for made in streams:
        await made.applied(0, 3)
        ended = sum(bool(made.listener.stats.replays) for made in streams)
        assert len(server.requests) <= ended + 2


class TestCancelled:
    """A listener ends at once in every phase of a replay, and leaves no descriptor behind."""

    async def stop(self, made: Stream, before: int) -> None:
        await made.listening.stop()
        await until(lambda: descriptors_now() <= before)

    async def test_while_the_server_is_connected(self, stream: Callable) -> None:
        with reserved_endpoint() as endpoint:
            made = await stream(endpoint, ReplayOptions())
            before = open_descriptors()
            made.send(3)
            await until(lambda: descriptors_now() > before)
            await self.stop(made, before)

    async def test_before_the_answer(self, stream: Callable, serve: Serve) -> None:
        server = serve(silent)
        made = await stream(server.endpoint, ReplayOptions())
        before = open_descriptors()
        made.send(3)
        await until(lambda: server.requests)
        await self.stop(made, before)

    async def test_in_the_midst_of_the_answer(self, stream: Callable, serve: Serve) -> None:
        made = await stream(serve(one_and_silence).endpoint, ReplayOptions())
        before = open_descriptors()
        made.send(3)
        await made.applied(0, 1)
        await self.stop(made, before)
        assert made.listening.applied == [b"0", b"1"]

    async def test_in_an_endless_answer(self, stream: Callable, serve: Serve) -> None:
        made = await stream(serve(endless).endpoint, ReplayOptions())
        before = open_descriptors()
        made.send(3)
        await until(lambda: made.listener.stats.strays > 100)
        await self.stop(made, before)

    async def test_while_others_have_their_turn(self, stream: Callable, serve: Serve) -> None:
        server = serve(silent)
        options = dataclasses.replace(ReplayOptions(), at_once=1)
        first, second = [await stream(server.endpoint, options) for _ in range(2)]
        before = open_descriptors()
        first.send(3)
        await until(lambda: server.requests)
        second.send(3)
        await until(lambda: second.listener.catch_up.held)
        await self.stop(second, open_descriptors())
        await self.stop(first, before)
        assert len(server.requests) == 1


@pytest.mark.parametrize("repaired", [False, True])
async def test_what_a_full_queue_drops_is_counted_or_replayed(
    context: zmq.Context, nursery: trio.Nursery, serve: Serve, repaired: bool
) -> None:
    """Every number is either applied once or counted as lost."""
    padding, total = b" " * 20_000, 2000
    worker = Publisher(context, send_queue=10)
    server = serve(four_frames)
    server.buffer = {seq: b"%d%s" % (seq, padding) for seq in range(total)}
    listening = Listening(worker.endpoint, server.endpoint if repaired else None)
    options = dataclasses.replace(HASTY, queue_messages=10)
    replayer = Replayer(LinkResources(context), HASTY, ReplayOptions())
    nursery.start_soon(listening.run, context, options, replayer)
    with closing(worker):
        await worker.subscribed()
        await until(lambda: listening.listener.connected)
        worker.send(*server.buffer.values())
        listening.ready.set()
        listener = listening.listener

        def last_is_there() -> bool:
            worker.send(b"")
            return listener.cursor.last is not None and listener.cursor.last >= total

        await until(last_is_there)
    numbers = [int(batch) for batch in listening.applied if batch]
    assert numbers == sorted(set(numbers))
    assert listener.stats.gaps > 0
    if repaired:
        assert numbers == list(range(total))
    else:
        assert listener.stats.lost == total - len(numbers) + _lost_behind(listening, total)


def _lost_behind(listening: Listening, total: int) -> int:
    """Returns how many of the empty batches behind the `total` ones were lost."""
    last = listening.listener.cursor.last or 0
    return last + 1 - total - listening.applied.count(b"")
