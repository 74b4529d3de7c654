"""Recovery from a peer: from a replica, past broken and hostile peers, whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import msgpack
import pytest
import trio
import trio.testing

from kvd.errors import Conflict, NotFound, Unavailable
from kvd.index.partitions import State
from kvd.index.peers import MAX_PEERS, Peers
from kvd.index.publishers import Publishers
from kvd.index.restore import SLICE_WORKERS, Planned, plan, restore
from kvd.model import PartitionKey, RankKey
from kvd.net.recovery import (
    CONFIRMED_AFTER_S,
    MAX_RANKS,
    RecoveryLimits,
    RecoveryOutcome,
    RecoveryStats,
    confirm_restored,
    recover,
)
from kvd.wire.dump import BINARY_DUMP, wants_binary
from kvd_core.index.prefix_index import IngestStats, PrefixIndex
from tests.support.dumps import binary_of, dump_json, event, read
from tests.support.recovering import PARTITION, PATIENT, Replica
from tests.support.zmtp_fakes import NOT_MY_FAULT_S

# Short limits, for tests with peers that do not answer; others may need as long on a busy machine.
HASTY = RecoveryLimits(stall_s=0.5, total_s=1, body_bytes=1_000_000)
GOOD = dump_json(event([(1, 1), (2, 2)], worker=7), event([(1, 1)], worker=8, dp_rank=3))

Serve = Callable[[trio.SocketStream], Awaitable[None]]


@asynccontextmanager
async def peer(serve: Serve) -> AsyncIterator[str]:
    """Yields the URL of a server that reads a request and then does what `serve` does."""

    async def handle(stream: trio.SocketStream) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            request += await stream.receive_some()
        assert b"accept-encoding: identity" in request
        with contextlib.suppress(trio.BrokenResourceError):  # the client has hung up
            await serve(stream)

    with trio.fail_after(NOT_MY_FAULT_S):
        async with trio.open_nursery() as nursery:
            listen = partial(trio.serve_tcp, handle, 0, host="127.0.0.1")
            (listener,) = await nursery.start(listen)
            yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}/"
            nursery.cancel_scope.cancel()


def answer(body: bytes, *lines: bytes, status: bytes = b"200 OK", length: bool = True) -> Serve:
    head = [b"HTTP/1.1 " + status, *lines]
    if length:
        head.append(b"content-length: %d" % len(body))

    async def serve(stream: trio.SocketStream) -> None:
        await stream.send_all(b"\r\n".join([*head, b"", b""]) + body)

    return serve


# ---- from a replica


async def test_a_replica_recovers_what_the_other_has() -> None:
    first, second = Replica(), Replica()
    for instance_id in (7, 8):
        first.register(instance_id)
    workers = first.state.partition("m", "t").workers
    workers[7].store(0, list(range(1, 9000)), list(range(1, 9000)))
    workers[8].store(2, [1, 2], [1, 2], tier=1)
    async with first.served() as url:
        assert await second.recover(url) == [RecoveryOutcome.RECOVERED]
    assert second.dumped() == first.dumped()
    assert second.stats.blocks == 9001
    assert not second.state.recovering


async def test_two_replicas_that_know_nothing_start_empty() -> None:
    first, second = Replica(), Replica()
    async with first.served() as one, second.served() as two, trio.open_nursery() as nursery:
        ended: list[list[str]] = []

        async def run(replica: Replica, url: str) -> None:
            ended.append(await replica.recover(url))

        nursery.start_soon(run, first, two)
        nursery.start_soon(run, second, one)
    assert ended == [[RecoveryOutcome.EMPTY]] * 2


async def test_oneself_is_recognised() -> None:
    alone = Replica()
    alone.register(7)
    alone.state.partition("m", "t").workers[7].store(0, [1], [1])
    before = alone.dumped()
    async with alone.served() as url:
        assert await alone.recover(url, url + "/") == [RecoveryOutcome.SELF] * 2
    assert alone.dumped() == before


async def test_a_peer_that_is_being_filled_is_passed_over() -> None:
    filling, fresh = Replica(), Replica()
    filling.register(7)
    filling.state.partition("m", "t").workers[7].store(0, [1], [1])
    filling.state.begin_recovery()
    async with filling.served() as url, peer(answer(GOOD)) as good:
        assert await fresh.recover(url, good) == [RecoveryOutcome.RECOVERED, RecoveryOutcome.EMPTY]


async def test_peers_that_had_nothing_are_asked_again(mock_clock: trio.testing.MockClock) -> None:
    """Replicas that start together: one of them restores its own snapshot meanwhile."""
    state, stats, answers = State(), RecoveryStats(), [answer(b"{}"), answer(GOOD)]
    async with peer(lambda stream: answers.pop(0)(stream)) as url, trio.open_nursery() as nursery:
        nursery.start_soon(partial(recover, state, [url], stats, again_at=10.0))
        while not stats.attempts[RecoveryOutcome.EMPTY]:
            await trio.lowlevel.checkpoint()
        assert len(answers) == 1
        assert state.recovering
        mock_clock.jump(10)
    assert stats.attempts[RecoveryOutcome.RECOVERED] == 1
    assert stats.blocks == 3


# ---- past broken peers


async def drip(stream: trio.SocketStream) -> None:
    await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n")
    while True:
        await stream.send_all(b" ")
        await trio.sleep(0.02)


async def endless(stream: trio.SocketStream) -> None:
    await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n{")
    while True:
        await stream.send_all(b" " * 60_000)


async def endless_head(stream: trio.SocketStream) -> None:
    await stream.send_all(b"HTTP/1.1 200 OK\r\n")
    while True:
        await stream.send_all(b"x: y\r\n" * 1000)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"


async def endless_trailers(stream: trio.SocketStream) -> None:
    await stream.send_all(CHUNKED + b"0\r\n")
    while True:
        await stream.send_all(b"x: y\r\n" * 1000)


async def endless_extension(stream: trio.SocketStream) -> None:
    await stream.send_all(CHUNKED + b"2;x=")
    while True:
        await stream.send_all(b"y" * 60_000)


async def gone(stream: trio.SocketStream) -> None:
    await stream.send_all(b"HTTP/1.1 200 OK\r\n")


async def silent(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


CUT = answer(GOOD[:-20], b"content-length: %d" % len(GOOD), length=False)
BAD_CHUNK = b"5\r\n{}   \r\nzz\r\n"
UNREACHABLE: dict[str, Serve] = {
    "silent": silent,
    "dripping": drip,
    "endless": endless,
    "endless head": endless_head,
    "endless trailers": endless_trailers,
    "an endless extension": endless_extension,
    "gone": gone,
    "cut off": CUT,
    "not HTTP": answer(GOOD, status=b"OK"),
    "another protocol": answer(b"", b"upgrade: h2c", status=b"101 Switching Protocols"),
    "failing": answer(GOOD, status=b"500 Oops"),
    "redirecting": answer(b"", b"location: http://127.0.0.1:1/", status=b"302 Found"),
    "without content": answer(b"", status=b"204 No Content"),
    "compressed": answer(gzip.compress(GOOD), b"content-encoding: gzip"),
    "packed twice": answer(GOOD, b"transfer-encoding: gzip, chunked", length=False),
    "bad chunks": answer(BAD_CHUNK, b"transfer-encoding: chunked", length=False),
}

FIRST, SECOND = 0x1111111111111111, 0x2222222222222222


def own_parent() -> bytes:
    """Returns a binary dump in which a block is its own parent."""
    index = PrefixIndex(16, IngestStats())
    index.add_worker(7).store(0, [FIRST, SECOND], [1, 2])
    good = binary_of(index)
    bad = good.replace(SECOND.to_bytes(8, "little"), FIRST.to_bytes(8, "little"))
    assert bad != good
    return bad


NEWER = BINARY_DUMP.replace(b"v1", b"v2")
CONFLICTING = json.dumps(
    {
        "m:t": json.loads(GOOD)["m:t"],
        "x": {
            **json.loads(dump_json(event([(1, 1)]), block_size=8))["m:t"],
            "model_name": "m",
            "tenant_id": "t",
        },
    }
).encode()
REFUSED: dict[str, Serve] = {
    "no JSON": answer(b"<html>"),
    "cut off without saying so": answer(GOOD[:-20], length=False),
    "binary of another version": answer(b"KVDDUMP2" + b"x" * 99, b"content-type: " + BINARY_DUMP),
    "text called binary": answer(GOOD, b"content-type: " + BINARY_DUMP),
    "a type we did not ask for": answer(b"\0\1", b"content-type: " + NEWER),
    "two block sizes": answer(CONFLICTING),
    "an instance with a text for its id": answer(dump_json(event([(1, 1)], worker="prefill-7"))),
    "a key that is none": answer(dump_json(event([(1, 1)]), key="nocolon")),
    "a name with a NUL": answer(dump_json(event([(1, 1)]), key="m\0:t")),
    "blocks of no tokens": answer(dump_json(event([(1, 1)]), block_size=0)),
    "a parent of itself": answer(dump_json(event([(1, 1)]), event([(2, 2)], parent=2))),
    "a parent of itself in a run": answer(dump_json(event([(1, 1), (2, 2), (2, 3)]))),
    "binary, a parent of itself": answer(own_parent(), b"content-type: " + BINARY_DUMP),
    "good blocks, then a bad one": answer(dump_json(event([(1, 1)]), event([(2**64, 1)]))),
}


@pytest.mark.parametrize("how", UNREACHABLE)
async def test_a_peer_that_breaks_off_is_passed_over(how: str) -> None:
    fresh = Replica()
    limits = HASTY if how in ("silent", "dripping") else PATIENT
    async with peer(UNREACHABLE[how]) as bad, peer(answer(GOOD)) as good:
        assert await fresh.recover(bad, limits=limits) == [RecoveryOutcome.UNREACHABLE]
        assert fresh.dumped() == {}
        both = await fresh.recover(bad, good, limits=limits)
        assert both == [RecoveryOutcome.RECOVERED, RecoveryOutcome.UNREACHABLE]
    assert fresh.depths(1, 2) == {(7, 0): (2, 2, 2), (8, 3): (1, 1, 1)}


@pytest.mark.parametrize("how", REFUSED)
async def test_a_wrong_dump_is_refused_whole(how: str) -> None:
    fresh = Replica()
    async with peer(REFUSED[how]) as bad:
        assert await fresh.recover(bad) == [RecoveryOutcome.REFUSED]
    assert fresh.dumped() == {}


@pytest.mark.parametrize(
    "url",
    ["", "x", "ftp://h", "http://", "http://u@h:1", "http://h:99999", "http://[::1", "http://h/a b",
     "http://127.0.0.1:1", "http://x.invalid"],
)  # fmt: skip
async def test_a_url_that_leads_nowhere_is_passed_over(url: str) -> None:
    assert await Replica().recover(url) == [RecoveryOutcome.UNREACHABLE]


async def test_an_empty_peer_does_not_end_the_search() -> None:
    fresh = Replica()
    empty = answer(b'{"a:b":{"block_size":16,"events":[]}}')
    async with peer(answer(b"{}")) as nothing, peer(empty) as pairs, peer(answer(GOOD)) as good:
        assert await fresh.recover(nothing, pairs) == [RecoveryOutcome.EMPTY] * 2
        assert await fresh.recover(nothing, pairs, good, nothing) == [
            RecoveryOutcome.RECOVERED,
            *[RecoveryOutcome.EMPTY] * 2,
        ]
    assert fresh.depths(1) == {(7, 0): (1, 1, 1), (8, 3): (1, 1, 1)}


async def test_chunked_and_binary_answers_are_read() -> None:
    index = PrefixIndex(16, IngestStats())
    index.add_worker(7).store(0, [1, 2], [1, 2])
    chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in GOOD) + b"0\r\n\r\n"
    for serve in (
        answer(chunked, b"transfer-encoding: chunked", length=False),
        answer(GOOD, length=False),
        answer(binary_of(index), b"Content-Type: " + BINARY_DUMP + b"; x=y"),
    ):
        fresh = Replica()
        async with peer(serve) as url:
            assert await fresh.recover(url) == [RecoveryOutcome.RECOVERED]
        assert fresh.depths(1, 2)[7, 0] == (2, 2, 2)  # type: ignore[index]


# ---- with ranks registered


async def test_another_block_size_is_refused() -> None:
    fresh = Replica()
    fresh.register(7, block_size=8)
    async with peer(answer(GOOD)) as url:
        assert await fresh.recover(url) == [RecoveryOutcome.REFUSED]
    assert fresh.dumped() == {"m:t": []}


async def test_a_registration_replaces_restored_blocks_of_another_size() -> None:
    fresh = Replica()
    async with peer(answer(GOOD)) as url:
        await fresh.recover(url)
    fresh.register(9, block_size=8)
    assert fresh.dumped() == {"m:t": []}
    assert (fresh.state.replaced_partitions, fresh.state.unconfirmed) == (1, set())
    with pytest.raises(Conflict):
        fresh.register(10, block_size=16)


@pytest.mark.parametrize(
    ("registered", "key", "expected"),
    [
        (("a", "b:c"), "a:b:c", ("a", "b:c")),
        (("a:b", "c"), "a:b:c", ("a:b", "c")),
        (None, "a:b:c", ("a:b", "c")),
        (None, ":", ("", "")),
    ],
)
async def test_keys_with_colons_find_their_partition(
    registered: tuple[str, str] | None, key: str, expected: tuple[str, str]
) -> None:
    fresh = Replica()
    if registered:
        rank = RankKey(PartitionKey(*registered), 1, 0)
        fresh.registry.register(rank, "tcp://127.0.0.1:1", 16, None)
    async with peer(answer(dump_json(event([(1, 1)]), key=key))) as url:
        assert await fresh.recover(url) == [RecoveryOutcome.RECOVERED]
    assert list(fresh.state.partitions) == [expected]


async def test_the_names_of_the_entry_outrank_its_key() -> None:
    body = json.loads(GOOD)["m:t"]
    text = json.dumps({"a:b:c": {**body, "model_name": "a", "tenant_id": "b:c"}}).encode()
    fresh = Replica()
    async with peer(answer(text)) as url:
        await fresh.recover(url)
    assert list(fresh.state.partitions) == [("a", "b:c")]


# ---- workers of a dump


async def restored() -> Replica:
    fresh = Replica()
    async with peer(answer(GOOD)) as url:
        await fresh.recover(url)
    return fresh


async def test_workers_that_never_register_can_be_removed() -> None:
    fresh = await restored()
    with pytest.raises(NotFound):
        await fresh.unregister(8, rank=0)  # the dump has only rank 3
    await fresh.unregister(8, rank=3)
    assert fresh.depths(1) == {(7, 0): (1, 1, 1)}
    await fresh.unregister(7)
    assert not fresh.state.partitions
    with pytest.raises(NotFound):
        await fresh.unregister(7)


async def test_a_worker_that_registers_keeps_its_blocks() -> None:
    fresh = await restored()
    fresh.register(7)
    assert fresh.depths(1, 2)[7, 0] == (2, 2, 2)  # type: ignore[index]
    await fresh.unregister(7)
    assert fresh.depths(1, 2) == {(8, 3): (1, 1, 1)}


async def test_an_engine_that_was_started_again_unheard_is_not_credited_with_a_dump() -> None:
    fresh = await restored()
    fresh.register(7)
    (listener,) = fresh.listeners.running.values()
    listener.connecting()
    listener.joined()
    listener.take(0, msgpack.packb([1.5, [], None]))
    assert fresh.depths(1, 2) == {(8, 3): (1, 1, 1)}
    assert listener.health(0.0) == "exact"


async def test_a_dump_is_kept_and_not_exact_when_its_engine_is_heard_in_the_middle() -> None:
    fresh = await restored()
    fresh.register(7)
    (listener,) = fresh.listeners.running.values()
    listener.take(4, msgpack.packb([1.5, [], None]))
    listener.catch_up.judge()
    listener.catch_up.apply_held()
    assert fresh.depths(1, 2)[7, 0] == (2, 2, 2)  # type: ignore[index]
    assert listener.loss == "missing 0..3, restored from a peer"


async def test_a_worker_that_left_meanwhile_stays_away() -> None:
    fresh = Replica()
    fresh.register(7)

    async def serve(stream: trio.SocketStream) -> None:
        await fresh.unregister(7)
        await answer(GOOD)(stream)

    async with peer(serve) as url:
        await fresh.recover(url)
    assert fresh.depths(1, 2) == {(8, 3): (1, 1, 1)}


async def test_a_registration_that_comes_between_two_slices_goes_first() -> None:
    fresh = Replica()
    steps = fresh.restoring(many_workers(1000))
    next(steps)
    assert len(fresh.state.partition("m", "t").workers) < 1000
    fresh.register(9, block_size=8)
    for _ in steps:
        pass
    assert fresh.dumped() == {"m:t": []}
    assert not fresh.state.unconfirmed


def many_workers(workers: int) -> bytes:
    """Returns a dump of so many workers with one block each."""
    stored = b'{"blocks":[{"block_hash":1,"tokens_hash":1}]}'
    one = b'{"worker_id":%d,"event":{"data":{"stored":' + stored + b"}}}"
    events = b",".join(one % number for number in range(workers))
    return b'{"m:t":{"block_size":16,"events":[' + events + b"]}}"


async def test_a_dump_of_too_many_workers_is_refused_whole() -> None:
    state, stats = State(), RecoveryStats()
    async with peer(answer(many_workers(MAX_RANKS + 1))) as url:
        await recover(state, [url], stats)
    assert (stats.attempts[RecoveryOutcome.REFUSED], state.partitions) == (1, {})


async def test_a_dump_of_many_workers_does_not_hold_up_others() -> None:
    """Planning and making workers both let other tasks run in between."""
    workers, state = 20_000, Replica().state
    planned: list[Planned] = []
    rests = 0
    for item in plan(state, read(many_workers(workers), False)):
        planned += [item] if item is not None else []
        rests += item is None
    assert rests >= workers // SLICE_WORKERS
    known = 0
    for _ in restore(state, planned):
        made = len(state.partition("m", "t").workers)
        assert made - known <= SLICE_WORKERS
        known = made
    assert known == workers


async def test_a_worker_that_leaves_while_blocks_are_stored_stays_away() -> None:
    fresh = Replica()
    blocks = [(n, n) for n in range(1, 10_000)]
    dump = dump_json(event(blocks, worker=7))
    for stored in fresh.restoring(dump):
        if stored and 7 in fresh.state.partitions[PARTITION].workers:
            await fresh.unregister(7)
            break
    assert not fresh.state.partitions


async def test_a_rank_that_left_meanwhile_stays_away() -> None:
    both = dump_json(event([(1, 1)], worker=7), event([(1, 1)], worker=7, dp_rank=1))

    async def recovered(*ranks: int) -> object:
        fresh = Replica()
        for rank in ranks:
            fresh.register(7, rank=rank)

        async def serve(stream: trio.SocketStream) -> None:
            await fresh.unregister(7, rank=0)
            await answer(both)(stream)

        async with peer(serve) as url:
            await fresh.recover(url)
        return fresh.depths(1) if fresh.state.partitions else None

    assert await recovered(0, 1) == {(7, 1): (1, 1, 1)}
    assert await recovered(0) is None  # the instance goes with its last registered rank


async def test_a_rank_that_leaves_while_blocks_are_stored_stays_away() -> None:
    fresh = Replica()
    fresh.register(7)
    fresh.register(7, rank=1)
    fresh.state.begin_recovery()
    numbers = [(n, n) for n in range(1, 10_000)]
    events = [event(numbers[at : at + 1], at or None, worker=7) for at in range(9999)]
    for stored in fresh.restoring(dump_json(*events, event([(1, 1)], worker=7, dp_rank=1))):
        if stored and 0 in fresh.state.partition("m", "t").workers[7].ranks():
            await fresh.unregister(7, rank=0)
    assert fresh.depths(1) == {(7, 1): (1, 1, 1)}


async def test_restored_ranks_settle_when_they_have_been_listened_to(
    autojump_clock: trio.testing.MockClock,
) -> None:
    fresh = Replica()
    fresh.register(7)
    for _ in fresh.restoring(GOOD):
        pass
    await fresh.unregister(8)
    assert fresh.state.unconfirmed == {(PARTITION, 7)}
    (listener,) = fresh.listeners.running.values()
    async with trio.open_nursery() as nursery:
        publishers = Publishers(fresh.state, fresh.listeners)
        nursery.start_soon(confirm_restored, fresh.state, fresh.registry, publishers)
        await trio.sleep(3 * CONFIRMED_AFTER_S)
        assert fresh.state.unconfirmed  # it is pending: many batches may still come
        listener.connecting()
        listener.joined()
        listener.receiving()
        await trio.sleep(2 * CONFIRMED_AFTER_S)
        assert fresh.state.unconfirmed  # a long replay may precede its first batch
        assert listener.take(5, b"")
        await trio.sleep(2 * CONFIRMED_AFTER_S)
        assert fresh.state.unconfirmed
        listener.catch_up.apply_held()
        await trio.sleep(CONFIRMED_AFTER_S / 2)
        assert fresh.state.unconfirmed
    assert trio.current_time() <= 10 * CONFIRMED_AFTER_S


# ---- the list of peers


def test_peers_are_bounded() -> None:
    peers = Peers(str(n) for n in range(MAX_PEERS))
    peers.add("0")
    with pytest.raises(Unavailable):
        peers.add("another")
    assert (len(peers), peers.refused) == (MAX_PEERS, 1)


def test_the_accept_header_decides() -> None:
    assert wants_binary(b"text/html, " + BINARY_DUMP + b";q=1")
    assert not wants_binary(b"*/*")
    assert not wants_binary(BINARY_DUMP + b"0")
    assert wants_binary(BINARY_DUMP.upper() + b" ; Q=0.5")
    assert wants_binary(BINARY_DUMP + b";q=0.001")
    for zero in (b"q=0", b"Q=0.", b"q=0.000", b"x=1; q=0"):
        assert not wants_binary(BINARY_DUMP + b";" + zero + b", application/json")
