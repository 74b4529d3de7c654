"""The replica plane over real sockets: processes that exchange events, some of which misbehave."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from resource import getpagesize

import pytest
import trio
import trio.testing
import zmq

from kvd.errors import BadRequest, Conflict, NotFound, Unavailable
from kvd.net.publisher import open_publisher
from kvd.net.replication import MAX_FRAMES
from kvd.net.turns import MAX_TURN_MESSAGES
from kvd.replica_sync.replicas import MAX_REPLICAS, Replicas
from kvd.wire.fields import Refused
from kvd.wire.hosts import everywhere
from kvd.wire.lifecycle import BOUNDS, TOPIC, Lifecycle, Outcome, Step, encode
from kvd.wire.replica import ReplicaStats
from tests.support.descriptors import open_descriptors
from tests.support.narrow import narrow_stream
from tests.support.replicating import HASTY_REPLICA, Ledger, Process, add, event, frames, start
from tests.support.zmtp_fakes import (
    GREETING,
    NOT_MY_FAULT_S,
    Fake,
    Publisher,
    large_frame,
    message,
    read_exactly,
    ready,
    reserved_endpoint,
    serve_fake,
    shake_hands,
    until,
)

Publish = Callable[..., Publisher]


@pytest.fixture
async def process(nursery: trio.Nursery, context: zmq.Context) -> Process:
    return await start(nursery, context)


async def listening_to(process: Process, publisher: Publisher) -> None:
    process.replicas.register(publisher.endpoint)
    await publisher.subscribed_to(TOPIC)


def send(publisher: Publisher, *events: Lifecycle) -> None:
    for sent in frames(events):
        publisher.send_frames(*sent)


# ---- two replicas


async def test_each_follows_the_other(
    process: Process, nursery: trio.Nursery, context: zmq.Context
) -> None:
    other = await start(nursery, context)
    await process.hears(other)
    await other.hears(process)
    process.do(add("a"))
    other.do(add("b"))
    await until(lambda: process.ledger.live == other.ledger.live == {"a": (7, 8), "b": (7, 8)})
    other.do(event(Step.PREFILL_COMPLETE, "a"))
    process.do(event(Step.FREE, "b"))
    await until(lambda: process.ledger.live == other.ledger.live == {"a": (7, 0)})
    # Events of others are not sent on.
    assert process.stats.own == other.stats.own == 0
    assert (process.stats.applied, other.stats.applied) == (2, 2)


async def test_what_this_process_published_itself_is_passed_over(process: Process) -> None:
    process.replicas.register(process.endpoint)

    def heard() -> bool:
        process.plane.publish(add("a"))
        return process.stats.own > 0

    await until(heard)
    assert process.ledger.seen == []
    assert process.stats.received == process.stats.own


@pytest.mark.parametrize("seed", range(3))
async def test_events_in_any_order_often_or_never_leave_what_they_say(
    process: Process, publish: Publish, seed: int
) -> None:
    rng = random.Random(seed)
    sent = [
        event(step, f"r{number}", rng.randrange(2), rng.randbytes(8 * rng.randrange(4)))
        for number in range(40)
        for step in Step
    ]
    rng.shuffle(sent)
    sent = [each for each in sent for _ in range(rng.choice((0, 1, 1, 2)))]
    model = Ledger()
    for each in sent:
        model.apply(each)

    publisher = publish()
    await listening_to(process, publisher)
    send(publisher, *sent)
    await until(lambda: process.stats.received == len(sent))
    assert process.ledger.live == model.live
    stats = process.stats
    assert {Outcome.APPLIED: stats.applied, **stats.dropped} == {
        outcome: model.outcomes[outcome] for outcome in Outcome
    }


async def test_replicas_that_miss_nothing_agree(
    process: Process, nursery: trio.Nursery, context: zmq.Context
) -> None:
    """Each admits requests of its own; either may end any request."""
    rng = random.Random(1)
    pair = [process, await start(nursery, context)]
    await pair[0].hears(pair[1])
    await pair[1].hears(pair[0])
    greetings = [process.stats.published for process in pair]
    heard = [process.stats.received for process in pair]
    for number in range(30):
        rng.choice(pair).do(add(f"r{number}", rng.randrange(3)))
    await until(lambda: pair[0].ledger.live == pair[1].ledger.live)
    assert len(process.ledger.live) == 30
    for number in rng.sample(range(30), 20):
        worker, _ = process.ledger.live[f"r{number}"]
        step = rng.choice((Step.FREE, Step.PREFILL_COMPLETE))
        rng.choice(pair).do(event(step, f"r{number}", worker))
    await until(lambda: pair[0].ledger.live == pair[1].ledger.live)
    assert pair[0].stats.published - greetings[0] == pair[1].stats.received - heard[1]
    assert pair[1].stats.published - greetings[1] == pair[0].stats.received - heard[0]


async def test_a_late_joiner_gets_no_history(
    process: Process, nursery: trio.Nursery, context: zmq.Context
) -> None:
    process.do(add("before"))
    late = await start(nursery, context)
    await late.hears(process)
    process.do(add("after"))
    await until(lambda: "after" in late.ledger.live)
    assert set(late.ledger.live) == {"after"}


async def test_a_hundred_replicas(process: Process, publish: Publish) -> None:
    publishers = [publish() for _ in range(100)]
    for publisher in publishers:
        process.replicas.register(publisher.endpoint)
    for number, publisher in enumerate(publishers):
        await publisher.subscribed_to(TOPIC)
        send(publisher, *(add(f"{number}-{i}") for i in range(10)))
    await until(lambda: len(process.ledger.live) == 1000)
    assert process.stats.joins == 100


async def test_a_burst_leaves_room_for_other_tasks(
    process: Process, publish: Publish, nursery: trio.Nursery
) -> None:
    publisher = publish()
    await listening_to(process, publisher)
    at_pass: list[int] = [0]

    async def watch() -> None:
        while at_pass[-1] < 3000:
            at_pass.append(process.stats.received)
            await trio.lowlevel.checkpoint()

    send(publisher, *(add(f"r{number}") for number in range(3000)))
    with trio.fail_after(NOT_MY_FAULT_S):
        await watch()
    largest = max(b - a for a, b in itertools.pairwise(at_pass))
    assert 0 < largest <= 2 * MAX_TURN_MESSAGES


# ---- publishing


async def test_without_anybody_to_hear(process: Process) -> None:
    process.plane.publish(add("a"))
    assert (process.stats.published, process.stats.overflows) == (1, 0)


async def test_an_event_that_nobody_would_read_is_not_published(process: Process) -> None:
    process.plane.publish(add("a" * (BOUNDS.payload_bytes + 1)))
    assert (process.stats.published, process.stats.oversized) == (0, 1)


@asynccontextmanager
async def stuck_subscriber(
    endpoint: str, version: bytes = b"\3\0"
) -> AsyncIterator[trio.SocketStream]:
    """Yields a connection of a subscriber that never reads."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    async with await narrow_stream(host, int(port)) as stream:
        await shake_hands(stream, b"SUB", version)
        await stream.send_all(message(b"\1" + TOPIC))
        yield stream


async def test_a_stuck_subscriber_costs_nobody_else_anything(
    nursery: trio.Nursery, context: zmq.Context
) -> None:
    patient = dataclasses.replace(
        HASTY_REPLICA, queue_messages=8, heartbeat_s=0.0, heartbeat_timeout_s=0.0
    )
    speaker = await start(nursery, context, patient)
    healthy = await start(nursery, context, HASTY_REPLICA)
    async with stuck_subscriber(speaker.endpoint):
        await healthy.hears(speaker)
        while speaker.stats.overflows == 0:
            assert len(speaker.ledger.live) < 1000, "more than loopback's buffers hold"
            speaker.do(add(f"r{len(speaker.ledger.live)}", hashes=b"\xff" * 8 * 16_384))
            await until(lambda: healthy.ledger.live == speaker.ledger.live)
        requests = list(speaker.ledger.live)
        for request in requests:
            speaker.do(event(Step.FREE, request))
            await until(lambda: healthy.ledger.live == speaker.ledger.live)
    assert len(requests) > 8
    # `Publisher.send` reports an overflow once, and again only after half a queue was sent.
    assert 1 <= speaker.stats.overflows <= 1 + len(requests) // (patient.queue_messages // 2)


async def test_who_subscribes_and_leaves_again_and_again_fills_no_memory(
    process: Process,
) -> None:
    """Without calls on the socket, libzmq would keep 11 KB for each."""

    async def flap(times: int) -> None:
        for _ in range(times):
            async with stuck_subscriber(process.endpoint):
                pass

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()

    await flap(100)
    before = resident_bytes()
    await flap(500)
    assert resident_bytes() - before < 2_500_000


async def test_a_frozen_subscriber_is_cut_off(process: Process) -> None:
    """Its ZMTP version has heartbeats, but it answers none, as if its process were stopped."""
    async with stuck_subscriber(process.endpoint, version=b"\3\1") as stream:
        with trio.fail_after(NOT_MY_FAULT_S), pytest.raises(trio.BrokenResourceError):
            while True:
                await read_exactly(stream, 1)


async def test_a_subscriber_that_sends_too_much_is_cut_off(process: Process) -> None:
    async with stuck_subscriber(process.endpoint) as stream:
        await stream.send_all(large_frame(2**40))
        with trio.fail_after(NOT_MY_FAULT_S), pytest.raises(trio.BrokenResourceError):
            while True:
                await read_exactly(stream, 1)
    process.plane.publish(add("a"))


ADDRESSES_REFUSED = {"192.0.2.1": "Cannot assign", "x.invalid": "", "::2": ""}


@pytest.mark.parametrize("host", ADDRESSES_REFUSED)
async def test_an_address_that_cannot_be_published_on(host: str, context: zmq.Context) -> None:
    with (
        trio.fail_after(NOT_MY_FAULT_S),
        pytest.raises(OSError, match="cannot publish on") as caught,
    ):
        await open_publisher(context, host, 5000, HASTY_REPLICA)
    assert ADDRESSES_REFUSED[host] in str(caught.value)
    assert host in str(caught.value)


async def test_a_port_in_use_cannot_be_published_on(context: zmq.Context, publish: Publish) -> None:
    port = int(publish().endpoint.rpartition(":")[2])
    with pytest.raises(OSError, match=f"cannot publish on 127.0.0.1:{port}: Address already in"):
        await open_publisher(context, "127.0.0.1", port, HASTY_REPLICA)


async def test_a_name_is_published_on(nursery: trio.Nursery, context: zmq.Context) -> None:
    publisher = await open_publisher(context, "localhost", 0, HASTY_REPLICA)
    nursery.start_soon(publisher.run)
    assert any(endpoint.startswith("tcp://127.0.0.1:") for endpoint in publisher.endpoints)


# ---- replicas that are down or misbehave


async def test_a_replica_may_come_later_leave_and_come_back(
    process: Process, publish: Publish
) -> None:
    with reserved_endpoint() as endpoint:
        process.replicas.register(endpoint)
        (replica,) = process.replicas.all()
        assert not replica.connected
        for number in range(2):
            publisher = publish(endpoint)
            await publisher.subscribed_to(TOPIC)
            send(publisher, add(f"r{number}"))
            await until(lambda number=number: f"r{number}" in process.ledger.live)
            assert replica.connected
            publisher.close()
            await until(lambda: not replica.connected)
    assert replica.last_error == f"connection lost: {endpoint}"
    assert (process.stats.joins, process.stats.losses, process.stats.failures) == (2, 2, 0)
    assert replica.received == 2


GARBAGE: dict[str, tuple[list[bytes], Refused]] = {
    "topic alone": ([TOPIC], Refused.FRAMES),
    "three frames": ([TOPIC, b"", b""], Refused.FRAMES),
    "most frames": ([TOPIC] * MAX_FRAMES, Refused.FRAMES),
    "longer topic": ([TOPIC + b"1", encode(add("a"), 5)], Refused.TOPIC),
    "nothing": ([TOPIC, b""], Refused.MSGPACK),
    "noise": ([TOPIC, b"\xc1" * 1000], Refused.MSGPACK),
    "another event": ([TOPIC, b"\x80"], Refused.ENVELOPE),
    "longest frame": ([TOPIC, bytes(BOUNDS.payload_bytes)], Refused.MSGPACK),
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_is_counted_and_what_follows_is_applied(
    process: Process, publish: Publish, kind: str
) -> None:
    sent, reason = GARBAGE[kind]
    publisher = publish()
    await listening_to(process, publisher)
    publisher.send_frames(*sent)
    publisher.send_frames(b"dynamo.session-affinity.v1", b"")  # a topic not subscribed to
    send(publisher, add("a"))
    await until(lambda: "a" in process.ledger.live)
    stats = process.stats
    assert {name: count for name, count in stats.refused.items() if count} == {reason: 1}
    assert (stats.received, stats.applied, stats.failures) == (2, 1, 0)


async def test_an_endless_message_costs_the_socket(process: Process, publish: Publish) -> None:
    publisher = publish()
    await listening_to(process, publisher)
    publisher.send_frames(*[TOPIC] * 100_000)
    await until(lambda: process.stats.failures == 1)
    (replica,) = process.replicas.all()
    await publisher.subscribed_to(TOPIC)
    send(publisher, add("a"))
    await until(lambda: "a" in process.ledger.live)
    assert (process.stats.received, process.stats.refused[Refused.FRAMES]) == (2, 1)
    assert replica.connected


async def noise(stream: trio.SocketStream) -> None:
    await stream.send_all(b"\xff" * 64)
    await trio.sleep_forever()


async def wrong_type(stream: trio.SocketStream) -> None:
    await stream.send_all(GREETING + ready(b"REP"))
    await trio.sleep_forever()


async def huge_frame(stream: trio.SocketStream) -> None:
    await shake_hands(stream)
    await stream.send_all(message(*frames([add("before")])[0]))
    await stream.send_all(large_frame(BOUNDS.payload_bytes + 1))
    await trio.sleep_forever()


async def hangs_up(stream: trio.SocketStream) -> None:
    await shake_hands(stream)


TALKS: dict[str, tuple[Callable[[trio.SocketStream], Awaitable[None]], str]] = {
    "noise": (noise, "protocol error in the handshake"),
    "wrong type": (wrong_type, "protocol error in the handshake"),
    "huge frame": (huge_frame, "message too large"),
    "flapping": (hangs_up, "connection lost"),
}


@pytest.mark.parametrize("kind", TALKS)
async def test_who_breaks_the_protocol_is_tried_again_and_harms_nobody(
    process: Process, publish: Publish, nursery: trio.Nursery, kind: str
) -> None:
    talk, fault = TALKS[kind]
    fake: Fake = await nursery.start(serve_fake, talk)
    process.replicas.register(fake.endpoint)
    publisher = publish()
    await listening_to(process, publisher)
    await until(lambda: fake.connections >= 2)
    send(publisher, add("a"))
    await until(lambda: "a" in process.ledger.live)
    bad = next(each for each in process.replicas.all() if each.endpoint == fake.endpoint)
    await until(lambda: bad.last_error == f"{fault}: {fake.endpoint}")
    assert ("before" in process.ledger.live) == (talk is huge_frame)


async def test_who_is_not_connected_is_named_in_the_log(
    nursery: trio.Nursery,
    context: zmq.Context,
    publish: Publish,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def absent() -> set[str]:
        return {
            getattr(record, "fields")["replica"]  # noqa: B009 - what kvd.telemetry.logs adds
            for record in caplog.records
            if record.message == "replica_unreachable"
        }

    process = await start(nursery, context, absent_every_s=0.01)
    publisher = publish()
    await listening_to(process, publisher)
    await until(lambda: all(replica.connected for replica in process.replicas.all()))
    caplog.clear()
    with reserved_endpoint() as endpoint:
        process.replicas.register(endpoint)
        await until(absent)
    assert absent() == {endpoint}


async def test_a_bug_costs_the_event_and_the_connection(
    nursery: trio.Nursery, context: zmq.Context, publish: Publish
) -> None:
    ledger = Ledger()

    def apply(event: Lifecycle) -> Outcome:
        if event.request_id == "bug":
            raise LookupError(event.request_id)
        return ledger.apply(event)

    process = await start(nursery, context, apply=apply)
    publisher = publish()
    await listening_to(process, publisher)
    send(publisher, add("bug"))
    await until(lambda: process.stats.crashes == 1)
    await publisher.subscribed_to(TOPIC)
    send(publisher, add("a"))
    await until(lambda: process.stats.applied == 1)
    assert process.stats.failures == 1


# ---- the list


async def test_who_is_deregistered_is_not_heard_any_more(
    process: Process, publish: Publish
) -> None:
    publisher = publish()
    await listening_to(process, publisher)
    assert not process.replicas.register(publisher.endpoint)
    send(publisher, add("a"))
    await until(lambda: "a" in process.ledger.live)
    with trio.fail_after(NOT_MY_FAULT_S):
        await process.replicas.deregister(publisher.endpoint)
    assert process.replicas.endpoints() == []
    with pytest.raises(NotFound):
        await process.replicas.deregister(publisher.endpoint)
    await until(lambda: publisher.socket.poll(0))
    assert publisher.socket.recv() == b"\0" + TOPIC
    assert process.replicas.register(publisher.endpoint)
    await publisher.subscribed_to(TOPIC)
    send(publisher, add("b"))
    await until(lambda: "b" in process.ledger.live)


async def test_it_can_be_registered_again_while_it_is_deregistered(
    process: Process, publish: Publish, nursery: trio.Nursery
) -> None:
    publisher = publish()
    await listening_to(process, publisher)
    async with trio.open_nursery() as leaving:
        leaving.start_soon(process.replicas.deregister, publisher.endpoint)
        await trio.lowlevel.checkpoint()
        while publisher.endpoint in process.replicas.endpoints():
            await trio.lowlevel.checkpoint()
        assert process.replicas.register(publisher.endpoint)
    heard = process.stats.received

    def hears() -> bool:
        send(publisher, add("a"))
        return process.stats.received > heard

    await until(hears)


REFUSED_ADDRESSES = {
    "foo": "missing scheme",
    "tcp://a": "missing TCP port",
    "tcp://*:1": everywhere("*"),
    "tcp://0.0.0.0:1": everywhere("0.0.0.0"),
    "tcp://127.0.0.1:0": "nobody can listen on port 0",
    "tcp://a:000": "nobody can listen on port 0",
    "tcp://a:65536": "invalid TCP port: number too large to fit in target type",
    "tcp://a b:1": "invalid character ' '",
    "udp://a:1": "unsupported scheme `udp`",
}


@pytest.mark.parametrize("endpoint", REFUSED_ADDRESSES)
async def test_a_faulty_address_is_refused(process: Process, endpoint: str) -> None:
    with pytest.raises(BadRequest) as caught:
        process.replicas.register(endpoint)
    fault = REFUSED_ADDRESSES[endpoint]
    assert str(caught.value) == f"invalid ZMQ endpoint `{endpoint}`: {fault}"
    assert process.replicas.endpoints() == []


async def test_the_list_is_sorted_and_bounded(process: Process) -> None:
    for endpoint in ("tcp://b:1", "tcp://a:2", "tcp://a:10", "tcp://[::1]:5"):
        assert process.replicas.register(endpoint)
    assert process.replicas.endpoints() == sorted(process.replicas.endpoints())
    for number in range(MAX_REPLICAS - 4):
        process.replicas.register(f"ipc:///nowhere/{number}")
    with pytest.raises(Unavailable):
        process.replicas.register("tcp://c:1")
    assert not process.replicas.register("tcp://a:2")
    assert process.replicas.refused == 1


async def test_without_a_port_there_are_no_replicas() -> None:
    replicas = Replicas(None, ReplicaStats())
    for endpoint in ("tcp://a:1", "foo"):
        with pytest.raises(Conflict):
            replicas.register(endpoint)
        with pytest.raises(Conflict):
            await replicas.deregister(endpoint)
    assert replicas.endpoints() == []


# ---- the end


async def test_the_end_leaves_no_socket(context: zmq.Context) -> None:
    before = open_descriptors()
    with closing(Publisher(context)) as publisher:
        with trio.fail_after(NOT_MY_FAULT_S):
            async with trio.open_nursery() as nursery:
                process = await start(nursery, context)
                other = await start(nursery, context)
                await process.hears(other)
                await listening_to(process, publisher)
                process.replicas.register("tcp://127.0.0.1:1")
                send(publisher, *(add(f"r{number}") for number in range(1000)))
                nursery.cancel_scope.cancel()
    process.plane.publish(add("late"))  # as by a request that is answered at the very end
    with trio.fail_after(NOT_MY_FAULT_S):
        await trio.to_thread.run_sync(context.term)  # waits for sockets that are open
    assert open_descriptors() <= before
