"""The TLS server of a face: the front's connections, on streams of TLS.

    handshake ─ requests, as without TLS ─ close_notify; what still comes is read and dropped

This module hands received bytes to OpenSSL, and sends the bytes that OpenSSL returns. If OpenSSL
read the socket itself, one call would last for as long as messages without data come, such as key
updates. The fast path reads sockets itself and knows no TLS, so requests go through the task of
their connection.
Why not trio's stream: docs/decisions/2026-11-23-tls-pump-instead-of-trios-stream.md.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

import trio

from kvd.http.asgi import AsgiApp
from kvd.http.auth import is_local
from kvd.http.certificates import TlsCredentials
from kvd.http.connection import Connection
from kvd.http.context import ServerContext
from kvd.http.fast_path import has_left
from kvd.http.front import Front
from kvd.http.limits import HttpLimits
from kvd.http.routes import Route
from kvd.http.transport import RECEIVE_BYTES, SEND_BYTES, ByteStream

SEALED_BYTES = 64 * 1024  # bytes encrypted before the client has to take them
# Encrypted bytes received at a time: if they are full of key updates, they take 10 ms.
SEALED_RECEIVE_BYTES = 16 * 1024
# Encrypted bytes received without any data before the connection ends; an incomplete record may
# have 16 KiB.
VAIN_BYTES = 20 * 1024


class TlsServer(Front):
    """Serves the routes of one face over TLS."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        app: AsgiApp,
        credentials: TlsCredentials,
        limits: HttpLimits,
        context: ServerContext,
    ) -> None:
        super().__init__(routes, app, limits, context)
        self.credentials = credentials

    def set_credentials(self, credentials: TlsCredentials) -> None:
        """Applies other credentials to handshakes from now on.

        If they do not admit all clients that the old ones did, no existing connection carries
        another request.
        """
        before, self.credentials = self.credentials, credentials
        if not credentials.admit_all_of(before):
            for connection in self._running:
                connection.retire()

    def _connect(self, sock: socket.socket) -> Connection:
        # A client with a certificate is no browser that a stranger's page has led here.
        open_to_pages = sock.family != socket.AF_UNIX and self.credentials.authorities is None
        checks_host = open_to_pages and is_local(sock)
        stream = TlsStream(sock, self.credentials)
        return Connection(stream, self._shared, self._listener, checks_host)

    def _turn_away(self, sock: socket.socket) -> None:
        sock.close()  # an answer would need a handshake first

    async def _run_fast_path(self) -> None:
        """Does nothing: no connection parks in the fast path."""


class TlsStream(ByteStream):
    """TLS over a client's socket."""

    scheme = "https"
    parks = False

    __slots__ = (
        "_ahead",
        "_finished",
        "_incoming",
        "_outgoing",
        "_sealed",
        "_sealing",
        "_tls",
        "_vain",
    )

    def __init__(self, sock: socket.socket, credentials: TlsCredentials) -> None:
        super().__init__(sock)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = credentials.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._sealed = b""  # taken out of `_outgoing`, but not by the kernel yet
        self._sealing = 0  # bytes of data that are encrypted there
        self._vain = 0  # encrypted bytes received since the last data
        self._ahead = b""  # data that was read while checking for the client's end
        self._finished = False

    async def open(self) -> None:
        """Shakes hands; raises OSError if that fails, for whatever reason."""
        done = False
        while not done:
            try:
                self._tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            while not self._flush():
                await trio.lowlevel.wait_writable(self.sock)
            await trio.lowlevel.checkpoint()  # it took a millisecond
            if not done:
                await self._receive_more()

    async def _receive_more(self) -> None:
        while True:
            try:
                return self._feed(self.sock.recv(SEALED_RECEIVE_BYTES))
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.sock)

    def receive_now(self, size: int) -> bytes:
        """Returns the next data; once the stream is finished, received bytes as they are."""
        if self._finished:
            return self.sock.recv(size)
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
            return data
        return self._decrypt(size)

    def finish(self) -> None:
        """Sends TLS's own end of the stream, if there is room for it."""
        if not self._finished:
            self._finished = True
            with contextlib.suppress(OSError):  # the client has not ended its side yet
                self._tls.unwrap()
            with contextlib.suppress(OSError):  # the client is gone
                self._flush()

    def reset_at_end(self) -> None:
        super().reset_at_end()
        self._finished = True  # so that `finish` does not send TLS's own end

    def has_left(self) -> bool:
        if has_left(self.sock.fileno()):
            return True
        if self._ahead:
            return False
        try:
            self._ahead = self._decrypt(RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return not self._ahead

    def has_more(self) -> bool:
        return bool(self._ahead) or self._is_pending()

    def _is_pending(self) -> bool:
        return self._incoming.pending > 0 or self._tls.pending() > 0

    def _decrypt(self, size: int) -> bytes:
        """Returns the next data, nothing at the client's end.

        Raises:
            BlockingIOError: there is none yet.
            OSError: the client sent something that is no TLS, or too much without data.
        """
        while (data := self._read(size)) is None:
            self._flush()  # OpenSSL's replies to messages without data
            if self._vain > VAIN_BYTES:
                raise ConnectionAbortedError("the client sent too much TLS without data")
            received = self.sock.recv(SEALED_RECEIVE_BYTES)
            self._feed(received)
            self._vain += len(received)
        self._vain = 0
        return data

    def _read(self, size: int) -> bytes | None:
        """Returns the data received already, up to `size`; None if no record is complete."""
        try:
            data = self._tls.read(size)
        except ssl.SSLWantReadError:
            return None
        if not data or len(data) == size or not self._is_pending():
            return data
        pieces, missing = [data], size - len(data)
        with contextlib.suppress(ssl.SSLWantReadError):
            while missing and (data := self._tls.read(missing)):
                pieces.append(data)
                missing -= len(data)
        return b"".join(pieces)

    def _feed(self, received: bytes) -> None:
        if received:
            self._incoming.write(received)
        else:
            self._incoming.write_eof()

    def send_now(self, data: bytes | memoryview) -> int:
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
        while self._sealing < len(data):  # one record at a time
            self._sealing += self._tls.write(data[self._sealing :])

    def _flush(self) -> bool:
        """Sends OpenSSL's output; returns whether the kernel has taken all of it."""
        while self._sealed or self._outgoing.pending:
            self._sealed = self._sealed or self._outgoing.read()
            try:
                sent = self.sock.send(self._sealed)
            except BlockingIOError:
                return False
            self._sealed = self._sealed[sent:]
        return True
