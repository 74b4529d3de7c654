"""CURVE on sockets: our keys for connecting, and the check of clients of our publisher.

For every connection to a socket with a ZAP domain (RFC 27), libzmq sends a request over a socket
inside the process, and delays the handshake until the authenticator has answered:

    replica ── handshake ──> PUB of ours ── ZAP request ──> authenticator: is the key on the list?
                              <───────────── 200 or 400 ────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import zmq
from zmq.utils import z85

from kvd.net.streamlog import StreamLog
from kvd.net.zsocket import ZSocket
from kvd.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.net.zsocket import Context

Options = dict[int, int | bytes]

ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq sends its requests
ZAP_REQUEST_FRAMES = 7  # version, request, domain, address, identity, mechanism, key
DOMAIN = b"replicas"

log = get_logger(__name__)


class KeyPair:
    """Our own keys; without a given secret key, a new pair that lives as long as the process."""

    def __init__(self, secret: str | None = None) -> None:
        """Raises zmq.ZMQError where libzmq has no CURVE."""
        if secret is None:
            self.public, self._secret = zmq.curve_keypair()
        else:
            self._secret = secret.encode()
            self.public = zmq.curve_public(self._secret)

    def client(self, server_key: str) -> Options:
        """Returns the options of a socket that connects to the owner of `server_key`."""
        return {
            zmq.CURVE_SERVERKEY: server_key.encode(),
            zmq.CURVE_PUBLICKEY: self.public,
            zmq.CURVE_SECRETKEY: self._secret,
        }

    def server(self) -> Options:
        """Returns the options of a socket that accepts only clients whom an authenticator admits.

        Without an authenticator it accepts none.
        """
        return {
            zmq.CURVE_SERVER: 1,
            zmq.CURVE_SECRETKEY: self._secret,
            zmq.ZAP_DOMAIN: DOMAIN,
            zmq.ZAP_ENFORCE_DOMAIN: 1,
        }


class ZapAuthenticator:
    """Admits clients with one of the `keys`, which may be replaced. One per context."""

    def __init__(self, context: Context, keys: Iterable[str]) -> None:
        """Raises zmq.ZMQError."""
        self.keys = frozenset(keys)
        self.refused = 0
        self._log = StreamLog(log, "socket", DOMAIN.decode())
        self._socket = ZSocket(context, zmq.REP, {})
        self._socket.socket.bind(ZAP_ENDPOINT)

    async def run(self) -> NoReturn:
        """Answers libzmq until cancelled; then closes the socket."""
        try:
            while True:
                request = await self._socket.receive()
                self._socket.socket.send_multipart(self._answer(request), zmq.NOBLOCK)
        finally:
            self._socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, number, _, address, _, _, *rest = request
        key = z85.encode(rest[0]).decode() if len(request) == ZAP_REQUEST_FRAMES else ""
        if key in self.keys:
            return [version, number, b"200", b"OK", b"", b""]
        self.refused += 1
        self._log.warning("client_refused", address=address.decode("latin-1"), key=key)
        return [version, number, b"400", b"unknown key", b"", b""]
