"""The TLS listener of a face: the front's connections, over TLS.

    handshake ─ requests, as without TLS ─ close_notify, and what still comes read away

OpenSSL reads and writes the socket itself, which does not block. The lane receives by itself and
knows nothing of TLS, so requests go through the connection's task.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from functools import partial

import trio

from kvd.http.asgi import AsgiApp
from kvd.http.certificates import Terms
from kvd.http.connection import Connection, Service
from kvd.http.front import Front
from kvd.http.limits import HttpLimits
from kvd.http.permits import is_local
from kvd.http.reception import Reception
from kvd.http.transport import RECEIVE_BYTES, Phase, Shared
from kvd.http.types import Route

# Handed to OpenSSL in one go, which returns after each record of 16 KiB: 0.2 ms
SEND_BYTES = 256 * 1024


class TlsServer(Front):
    """Serves the routes of one face over TLS."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        app: AsgiApp,
        terms: Terms,
        limits: HttpLimits,
        reception: Reception,
    ) -> None:
        super().__init__(routes, app, limits, reception)
        self.terms = terms

    def renew(self, terms: Terms) -> None:
        """Has other terms hold for handshakes from now on.

        If they do not take all clients that the old ones took, no connection that is there carries
        another request.
        """
        before, self.terms = self.terms, terms
        if not terms.admit_all_of(before):
            for connection in self._running:
                assert isinstance(connection, TlsConnection)
                connection.retire()

    def _connect(self, sock: socket.socket) -> Connection:
        # Who shows a certificate is no browser that a page has led here.
        open_to_pages = sock.family != socket.AF_UNIX and self.terms.authorities is None
        checks_host = open_to_pages and is_local(sock)
        return TlsConnection(sock, self._shared, self._service, checks_host, self.terms)

    def _turn_away(self, sock: socket.socket) -> None:
        sock.close()  # an answer would need a handshake first

    async def _run_lane(self) -> None:
        """Has nothing to run: nobody parks there."""


class TlsConnection(Connection):
    """Serves one client over TLS."""

    __slots__ = ("_ended", "_retired", "_secured", "_terms")

    def __init__(
        self,
        sock: socket.socket,
        shared: Shared,
        service: Service,
        checks_host: bool,
        terms: Terms,
    ) -> None:
        super().__init__(sock, shared, service, checks_host)
        self._terms = terms
        self._secured: ssl.SSLSocket | None = None
        self._ended = False  # there is nothing more to say
        self._retired = False

    def retire(self) -> None:
        """Serves no other request than the one under way."""
        self._retired = True
        self.close_if_idle()

    async def _open(self) -> None:
        """Shakes hands.

        Raises:
            OSError: the client is gone, speaks no TLS, or has no certificate where it needs one.
        """
        self.arm(Phase.HANDSHAKE, self.shared.limits.head_seconds)
        try:
            context = self._terms.context
            secured = context.wrap_socket(self.sock, True, do_handshake_on_connect=False)
            self.sock = self._secured = secured
            self._recv, self._send = self._decrypt, self._encrypt
            await _shake_hands(secured)
        except OSError:
            if not self.expired:
                self.shared.stats.handshakes_failed += 1
                if self._secured is not None:
                    await self.linger()  # OpenSSL has told the client why
            raise

    async def _serve(self) -> None:
        await super()._serve()
        self._end()  # not after a failure: an answer that breaks off shows as cut

    async def _fill(self) -> bool:
        while not self._retired and not self.buffer:
            self.buffer = await self.receive()
            if not self.buffer:
                return False
        return not self._retired

    async def linger(self) -> None:
        """Does so without decrypting anything."""
        self._end()
        self._recv = partial(socket.socket.recv, self.sock)
        await super().linger()

    def _end(self) -> None:
        """Sends the end of the stream as TLS has it, if there is room for that."""
        if self._secured is not None and not self._ended:
            self._ended = True
            with contextlib.suppress(OSError):  # the client's end is not there yet, or it is gone
                self._secured.unwrap()

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, how)  # SSLSocket's forgets its keys

    def _unread(self) -> bool:
        return super()._unread() or (self._secured is not None and self._secured.pending() > 0)

    async def _watch_client(self, serving: trio.CancelScope) -> None:
        while not self.buffer:
            await trio.lowlevel.wait_readable(self.fd)
            if self._client_has_left():
                serving.cancel()
                return

    def _client_has_left(self) -> bool:
        """Returns whether the client's end is next; of what comes before it a record is kept."""
        if self.buffer:
            return False
        try:
            self.buffer = self._decrypt(RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return not self.buffer

    def _decrypt(self, size: int) -> bytes:
        assert self._secured is not None
        try:
            return self._secured.recv(size)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None

    def _encrypt(self, data: bytes | memoryview) -> int:
        assert self._secured is not None
        sent, most = 0, min(len(data), SEND_BYTES)
        with memoryview(data) as view:
            try:
                while sent < most:
                    sent += self._secured.send(view[sent:])
            except ssl.SSLWantWriteError:  # the same bytes are to be tried again
                if not sent:
                    raise BlockingIOError from None
        return sent


async def _shake_hands(secured: ssl.SSLSocket) -> None:
    while True:
        try:
            secured.do_handshake()
        except ssl.SSLWantReadError:
            await trio.lowlevel.wait_readable(secured.fileno())
        except ssl.SSLWantWriteError:
            await trio.lowlevel.wait_writable(secured.fileno())
        else:
            await trio.lowlevel.checkpoint()  # it took a millisecond
            return
