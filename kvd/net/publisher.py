"""A PUB socket that never waits for those who subscribe."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NoReturn

import trio
import zmq

from kvd.net.link import NO_CURVE, LinkOptions, socket_options
from kvd.net.zsocket import ZSocket

if TYPE_CHECKING:
    from kvd.net.zsocket import Context

# What subscribers send is subscriptions: a topic, or two.
MAX_SUBSCRIPTION_BYTES = 4096


async def open_publisher(
    context: Context,
    host: str,
    port: int,
    options: LinkOptions,
    curve: Mapping[int, int | bytes] = NO_CURVE,
) -> Publisher:
    """Returns a publisher on every address that the host's name resolves to; port 0 is any free.

    Raises OSError whose text names the address and the reason.
    """
    where = _address(host, port)
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # libzmq looks no names up to bind to them.
        addresses = sorted({(family, str(address[0])) for family, *_, address in found})
        return Publisher(context, [_address(text, port) for _, text in addresses], options, curve)
    except OSError as error:
        raise _explained(error.errno, error.strerror or str(error), where) from None
    except zmq.ZMQError as error:
        raise _explained(error.errno, zmq.strerror(error.errno or 0), where) from None


class Publisher:
    """Sends to all that subscribe; its task, `run`, ends the socket.

    Raises zmq.ZMQError where an address cannot be bound to.
    """

    def __init__(
        self,
        context: Context,
        addresses: Iterable[str],
        options: LinkOptions,
        curve: Mapping[int, int | bytes] = NO_CURVE,
    ) -> None:
        offered = {**_options(addresses := list(addresses), options), **curve}
        self._socket = ZSocket(context, zmq.PUB, offered)
        self.endpoints: list[str] = []  # as bound, with the port
        try:
            for address in addresses:
                self._socket.socket.bind(f"tcp://{address}")
                self.endpoints.append(str(self._socket.socket.get_string(zmq.LAST_ENDPOINT)))
        except zmq.ZMQError:
            self._socket.close()
            raise

    def send(self, frames: list[bytes]) -> bool:
        """Sends to all subscribers with room in their queues; returns whether that was all so far.

        libzmq tells of a full queue once: its subscriber misses this message and, without another
        word, those that follow until half of the queue is sent. Nobody else misses anything.
        """
        sock = self._socket.socket
        if sock.closed:
            return True  # at the very end nobody is told any more
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

        libzmq does such work inside of calls only: without any, whoever connects and leaves again
        and again would fill memory with what is to be done about that.
        """
        try:
            while True:
                self._socket.socket.get(zmq.EVENTS)
                await self._socket.wait_readable()
        finally:
            self._socket.close()


def _options(addresses: Iterable[str], options: LinkOptions) -> dict[int, int | bytes]:
    return {
        **socket_options("", options),
        zmq.IPV6: int(any(address.startswith("[") for address in addresses)),
        zmq.SNDHWM: options.queue_messages,
        zmq.XPUB_NODROP: 1,
        zmq.MAXMSGSIZE: MAX_SUBSCRIPTION_BYTES,
    }


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _explained(number: int | None, why: str, where: str) -> OSError:
    return OSError(number or errno.EINVAL, f"cannot publish on {where}: {why}")
