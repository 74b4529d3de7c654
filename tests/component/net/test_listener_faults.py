"""A listener with faults around it: broken frames, silent peers, missing descriptors."""

from __future__ import annotations

import dataclasses
import resource
import socket
import time
from collections.abc import Awaitable, Callable

import pytest
import trio

from kvd_core.zmq.drain import TOO_LARGE
from tests.support.descriptors import lowest_free_descriptor
from tests.support.listening import HASTY, Listening
from tests.support.zmtp_fakes import (
    GREETING,
    Fake,
    Publisher,
    large_frame,
    message,
    ready,
    reserved_endpoint,
    serve_fake,
    shake_hands,
    until,
)

Listen = Callable[..., Listening]


async def test_an_oversized_frame_costs_the_socket_but_nothing_that_arrived(
    listen: Listen, nursery: trio.Nursery
) -> None:
    second_may_answer = trio.Event()

    async def talk(stream: trio.SocketStream) -> None:
        if fake.connections == 1:
            await shake_hands(stream)
            for seq in range(3):
                await stream.send_all(message(b"", seq.to_bytes(8), b"%d" % seq))
            await stream.send_all(large_frame(2**62))
        else:
            await second_may_answer.wait()
            await shake_hands(stream)
            await stream.send_all(message(b"", (3).to_bytes(8), b"3"))
        await trio.sleep_forever()

    fake: Fake = await nursery.start(serve_fake, talk)
    options = dataclasses.replace(HASTY, reconnect_s=0.2, reconnect_max_s=0.4)
    listening = listen(fake.endpoint, options=options)
    listener = listening.listener
    await until(listening.is_("failed"))
    assert listener.link.last_error == f"message too large: {fake.endpoint}"
    assert (listener.stats.failures, listener.stats.losses) == (1, 1)
    assert listener.stats.bad_frames == {TOO_LARGE: 1}
    assert listening.applied == [b"0", b"1", b"2"]
    await until(listening.is_("pending"))
    await until(lambda: fake.connections == 2)
    second_may_answer.set()
    await until(listening.is_("active"))
    await until(lambda: len(listening.applied) == 4)
    assert (listener.stats.joins, listener.stats.gaps, listener.link.last_error) == (2, 0, None)


def sending(*parts: bytes) -> Callable[[trio.SocketStream], Awaitable[None]]:
    async def talk(stream: trio.SocketStream) -> None:
        for part in parts:
            await stream.send_all(part)
        await trio.sleep_forever()

    return talk


async def endless_frame(stream: trio.SocketStream) -> None:
    await shake_hands(stream)
    await stream.send_all(large_frame(2**63))
    await trio.sleep_forever()


PROTOCOL_ERRORS = {
    "noise": (sending(b"\xff" * 64), "protocol error in the handshake"),
    "other mechanism": (
        sending(GREETING.replace(b"NULL", b"PLAI")),
        "protocol error in the handshake",
    ),
    "no ready": (sending(GREETING, b"\4\6\5HELLO"), "protocol error in the handshake"),
    "wrong type": (sending(GREETING, ready(b"REP")), "protocol error in the handshake"),
    "endless frame": (endless_frame, "message too large"),
}


@pytest.mark.parametrize("kind", PROTOCOL_ERRORS)
async def test_after_a_protocol_error_there_is_another_attempt(
    listen: Listen, nursery: trio.Nursery, kind: str
) -> None:
    talk, fault = PROTOCOL_ERRORS[kind]
    fake: Fake = await nursery.start(serve_fake, talk)
    options = dataclasses.replace(HASTY, reconnect_s=0.2, reconnect_max_s=0.4)
    listening = listen(fake.endpoint, options=options)
    await until(listening.is_("failed"))
    assert listening.listener.link.last_error == f"{fault}: {fake.endpoint}"
    await until(lambda: fake.connections == 2)


async def test_a_peer_that_says_nothing_is_tried_again_on_the_same_socket(
    listen: Listen, nursery: trio.Nursery
) -> None:
    fake: Fake = await nursery.start(serve_fake, sending())
    options = dataclasses.replace(HASTY, handshake_timeout_s=0.1)
    listening = listen(fake.endpoint, options=options)
    await until(lambda: fake.connections >= 2)
    listener = listening.listener
    assert (listener.status, listener.stats.failures, listener.stats.losses) == ("pending", 0, 0)
    assert listener.link.last_error == f"handshake failed: {fake.endpoint}"
    assert listener.link.disconnected_since is None


class SocketsMade(trio.abc.SocketFactory, trio.abc.Instrument):
    """Counts the sockets made in all, and the most made between two waits for I/O."""

    def __init__(self) -> None:
        self.count = self.most = self._now = 0

    def socket(self, *kind: int) -> trio.socket.SocketType:
        self.count += 1
        self._now += 1
        self.most = max(self.most, self._now)
        return trio.socket.from_stdlib_socket(socket.socket(*kind))

    def after_io_wait(self, timeout: float) -> None:
        self._now = 0


async def test_engines_that_were_lost_together_are_connected_to_one_after_the_other(
    listen: Listen,
) -> None:
    made = SocketsMade()
    trio.socket.set_custom_socket_factory(made)
    trio.lowlevel.add_instrument(made)
    with reserved_endpoint() as endpoint:
        for _ in range(20):
            listen(endpoint)
        await until(lambda: made.count >= 20)
        made.most = 0
        # Holds up the loop, so that all pauses end at once.
        time.sleep(2 * HASTY.reconnect_max_s)  # noqa: ASYNC251
        await until(lambda: made.count >= 100)
    assert made.most == 1


async def test_an_endpoint_that_cannot_be_connected_is_failed(listen: Listen) -> None:
    listening = listen("tcp://*:5557")
    listener = listening.listener
    await until(listening.is_("failed"))
    assert listener.link.last_error == (
        "failed to connect ZMQ SUB socket to tcp://*:5557: Invalid argument"
    )
    await until(lambda: listener.stats.failures >= 3)
    assert listening.is_("failed")()


async def test_it_recovers_when_there_are_descriptors_again(
    publish: Callable[..., Publisher], listen: Listen
) -> None:
    worker = publish()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor(), hard))
    try:
        listening = listen(worker.endpoint)
        await until(listening.is_("failed"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (listening.listener.link.last_error or "").endswith(": Too many open files")
    await until(listening.is_("active"))
