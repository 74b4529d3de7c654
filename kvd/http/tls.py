"""The TLS listener of a face: the front's connections, over TLS.

    handshake ─ requests, as without TLS ─ close_notify, and what still comes read away

OpenSSL is handed what has been received, and says what to send. Were it to read the socket itself,
one call would go on for as long as messages come that carry no data, as key updates do. The lane
receives by itself and knows nothing of TLS, so requests go through the connection's task.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

import trio

from kvd.http.asgi import AsgiApp
from kvd.http.auth import is_local
from kvd.http.certificates import TlsCredentials
from kvd.http.connection import Connection, Service
from kvd.http.context import ServerContext
from kvd.http.front import Front
from kvd.http.limits import HttpLimits
from kvd.http.transport import RECEIVE_BYTES, Phase, Shared
from kvd.http.types import Route

SEND_BYTES = 256 * 1024  # bytes encrypted in one go: 0.2 ms
SEALED_BYTES = 64 * 1024  # encrypted bytes made at a time, since they wait for the client
# Encrypted bytes received at a time: full of key updates they take 10 ms.
SEALED_RECEIVE_BYTES = 16 * 1024
# Encrypted bytes received without any data before the connection ends; a record that is not
# complete yet has 16 KiB.
VAIN_BYTES = 20 * 1024


class TlsServer(Front):
    """Serves the routes of one face over TLS."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        app: AsgiApp,
        terms: TlsCredentials,
        limits: HttpLimits,
        context: ServerContext,
    ) -> None:
        super().__init__(routes, app, limits, context)
        self.terms = terms

    def set_credentials(self, terms: TlsCredentials) -> None:
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

    scheme = "https"

    __slots__ = (
        "_ended",
        "_incoming",
        "_outgoing",
        "_retired",
        "_sealed",
        "_sealing",
        "_stream",
        "_terms",
        "_vain",
    )

    def __init__(
        self,
        sock: socket.socket,
        shared: Shared,
        service: Service,
        checks_host: bool,
        terms: TlsCredentials,
    ) -> None:
        super().__init__(sock, shared, service, checks_host)
        self._terms = terms
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._stream = terms.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._sealed = b""  # out of `_outgoing`, and not taken by the kernel yet
        self._sealing = 0  # bytes of data that are in there
        self._vain = 0  # received since there was data
        self._ended = False  # there is nothing more to say
        self._retired = False

    def retire(self) -> None:
        """Serves no other request than the one under way."""
        self._retired = True
        self.close_if_idle()

    async def _open(self) -> bool:
        """Shakes hands; returns False with who is gone, late, no client of TLS, or unknown."""
        self.arm(Phase.HANDSHAKE, self.shared.limits.head_seconds)
        try:
            await self._shake_hands()
        except OSError:
            if not self.expired:
                self.shared.stats.handshakes_failed += 1
                with contextlib.suppress(OSError):  # who is gone hears nothing
                    await self.linger()  # OpenSSL tells the client why
            return False
        self._recv, self._send = self._decrypt, self._encrypt
        return True

    async def _shake_hands(self) -> None:
        """Raises OSError if that fails, for whatever reason."""
        done = False
        while not done:
            try:
                self._stream.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            while not self._flush():
                await trio.lowlevel.wait_writable(self.fd)
            await trio.lowlevel.checkpoint()  # it took a millisecond
            if not done:
                self._feed(await self.receive(SEALED_RECEIVE_BYTES))

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
        self._recv = self.sock.recv
        await super().linger()

    def _end(self) -> None:
        """Sends the end of the stream as TLS has it, if there is room for that."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(OSError):  # the client's end is not there yet
                self._stream.unwrap()
            with contextlib.suppress(OSError):  # it is gone
                self._flush()

    def _close(self) -> None:
        super()._close()
        self._recv, self._send = self.sock.recv, self.sock.send  # or else it is garbage in a ring

    def _unread(self) -> bool:
        return super()._unread() or self._has_more()

    def _has_more(self) -> bool:
        return self._incoming.pending > 0 or self._stream.pending() > 0

    async def _watch_client(self, serving: trio.CancelScope) -> None:
        while not self.buffer:
            await trio.lowlevel.wait_readable(self.fd)
            if self._client_has_left():
                serving.cancel()
                return

    def _client_has_left(self) -> bool:
        """Returns whether the client's end is there; of what comes before it some is kept."""
        if super()._client_has_left():
            return True
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
        """Returns data, as far as one receive brings any, and nothing at the client's end.

        Raises:
            BlockingIOError: there is none yet.
            OSError: what came is no TLS, or never any data.
        """
        while (data := self._read(size)) is None:
            self._flush()  # what OpenSSL says to messages without data
            if self._vain > VAIN_BYTES:
                raise ConnectionAbortedError("TLS without data")
            received = self.sock.recv(SEALED_RECEIVE_BYTES)
            self._feed(received)
            self._vain += len(received)
        self._vain = 0
        return data

    def _read(self, size: int) -> bytes | None:
        """Returns data that has been received, in one piece; None if a record is not all there."""
        try:
            data = self._stream.read(size)
        except ssl.SSLWantReadError:
            return None
        if not data or len(data) == size or not self._has_more():
            return data
        pieces, missing = [data], size - len(data)
        with contextlib.suppress(ssl.SSLWantReadError):
            while missing and (data := self._stream.read(missing)):
                pieces.append(data)
                missing -= len(data)
        return b"".join(pieces)

    def _feed(self, received: bytes) -> None:
        if received:
            self._incoming.write(received)
        else:
            self._incoming.write_eof()

    def _encrypt(self, data: bytes | memoryview) -> int:
        """Returns how much of `data` the kernel has; the rest is to be given again."""
        sent, most = 0, min(len(data), SEND_BYTES)
        with memoryview(data) as view:
            while sent < most:
                if not self._sealing:
                    self._seal(view[sent : sent + SEALED_BYTES])
                if not self._flush():
                    break
                sent += self._sealing
                self._sealing = 0
        return sent

    def _seal(self, data: memoryview) -> None:
        while self._sealing < len(data):  # a record at a time
            self._sealing += self._stream.write(data[self._sealing :])

    def _flush(self) -> bool:
        """Sends what OpenSSL has to say; returns whether the kernel has it all."""
        while self._sealed or self._outgoing.pending:
            self._sealed = self._sealed or self._outgoing.read()
            try:
                sent = self.sock.send(self._sealed)
            except BlockingIOError:
                return False
            self._sealed = self._sealed[sent:]
        return True
