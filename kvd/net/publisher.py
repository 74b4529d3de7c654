"""A PUB socket that never waits for its subscribers."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

import trio
import zmq

from kvd.net.link import LinkOptions
from kvd.net.zmq_link import NO_CURVE, socket_options
from kvd.net.zsocket import ZSocket
from kvd.platform.sockets import distinct, listening_tcp
from kvd.wire.hosts import bracketed

if TYPE_CHECKING:
    from kvd.net.zsocket import Context

MAX_SUBSCRIPTION_BYTES = 4096  # longest frame of a subscriber; subscriptions only name topics

# Connections that wait to be accepted: all replicas may reconnect at the same moment. The kernel
# caps it at somaxconn.
BACKLOG = 1024


async def open_publisher(
    context: Context,
    host: str,
    port: int,
    options: LinkOptions,
    curve: Mapping[int, int | bytes] = NO_CURVE,
) -> PubSocket:
    """Returns a publisher on every address of a host; port 0 takes any free port.

    Raises OSError, whose text names the address and the reason.
    """
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with ExitStack() as opened:
            listening = [
                opened.enter_context(listening_tcp(family, address, BACKLOG))
                for family, address in distinct(found)
            ]
            publisher = PubSocket(context, listening, options, curve)
            opened.pop_all()
        return publisher
    except (OSError, zmq.ZMQError) as error:
        why = f"cannot publish on {bracketed(host)}:{port}: {error.strerror or error}"
        raise OSError(error.errno or errno.EINVAL, why) from None


class PubSocket:
    """Sends to all subscribers; its task, `run`, closes the socket at the end."""

    def __init__(
        self,
        context: Context,
        listening: Sequence[socket.socket],
        options: LinkOptions,
        curve: Mapping[int, int | bytes] = NO_CURVE,
    ) -> None:
        """Hands the listening sockets, which subscribers connect to, over to libzmq.

        libzmq cannot open them itself: before it binds to any address but `*`, it asks netlink for
        the names of interfaces, and aborts the process where a sandbox forbids that.
        """
        self._socket = ZSocket(context, zmq.PUB, {**_options(options), **curve})
        self.endpoints: list[str] = []  # as bound, with the port
        for sock in listening:
            self._socket.socket.set(zmq.USE_FD, sock.detach())
            self._socket.socket.bind("tcp://*:*")  # the address is ignored: USE_FD is bound already
            self.endpoints.append(str(self._socket.socket.get_string(zmq.LAST_ENDPOINT)))

    def send(self, frames: list[bytes]) -> bool:
        """Sends to all subscribers whose queues have room; returns False if a queue has filled up.

        libzmq reports a full queue once: its subscriber misses this message and, without further
        reports, later ones until half of the queue is sent. Other subscribers miss nothing.
        """
        sock = self._socket.socket
        if sock.closed:
            return True  # while the daemon stops, nothing is sent any more
        try:
            sock.send_multipart(frames, zmq.NOBLOCK)
            return True
        except zmq.Again:
            sock.set(zmq.XPUB_NODROP, 0)
            sock.send_multipart(frames, zmq.NOBLOCK)
            sock.set(zmq.XPUB_NODROP, 1)
            return False

    async def run(self) -> NoReturn:
        """Lets subscribers come and go while nothing is sent; closes the socket when cancelled.

        libzmq handles connections only inside of calls on the socket. Without any call, a peer that
        connects and leaves again and again would fill memory with pending work.
        """
        try:
            while True:
                self._socket.socket.get(zmq.EVENTS)
                await self._socket.wait_readable()
        finally:
            self._socket.close()


def _options(options: LinkOptions) -> dict[int, int | bytes]:
    return {
        **socket_options("", options),
        zmq.SNDHWM: options.queue_messages,
        zmq.XPUB_NODROP: 1,
        zmq.MAXMSGSIZE: MAX_SUBSCRIPTION_BYTES,
    }
