"""Gets one document from a peer that may be broken or hostile.

    connect ── request ── head ── the caller's sink for it ── body, piece by piece ── its end

Redirects, proxies of the environment and compressed bodies are not accepted: they could lead
elsewhere than the operator said, or expand without bound. A name is looked up once, and only an
allowed address is connected to (`kvd.net.dialing`). Time, bytes and the head are bounded here; the
caller's sink bounds what the body may contain. httptools parses, as it does in kvd's server.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass

import httptools
import trio

from kvd._version import VERSION
from kvd.net.dialing import Dialer, Unreachable, reason_of
from kvd.wire.urls import Target, parse_url

RECEIVE_BYTES = 64 * 1024  # bytes of a peer's answer received at once
# Bytes of framing for each byte of the body, beside as many as a head may have: a chunk of one byte
# has five. Extensions and trailers can go on for ever, and the parser keeps trailers.
MOST_FRAMING = 8

Headers = dict[bytes, bytes]
Sink = Callable[[bytes], None]


class FetchError(Exception):
    """The document could not be fetched; the text is for the log."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of one fetch."""

    connect_s: float = 3.0
    stall_s: float = 10.0  # without a byte; Dynamo writes nothing for 4 s per 1M blocks
    total_s: float = 60.0  # 1M blocks take a second between hosts; from Dynamo, four
    head_bytes: int = 16 * 1024
    body_bytes: int = 4 * 1024**3  # 45M blocks as text, 91 bytes each


async def fetch(
    url: str,
    accept: bytes,
    limits: FetchLimits,
    begin: Callable[[Headers], Sink],
    dialer: Dialer,
    *,
    token: bytes = b"",
) -> None:
    """Passes the document at `url` to the sink that `begin` returns for its headers.

    The request carries the bearer `token`, if there is one. Raises FetchError unless the answer is
    200, uncompressed and complete; by then the sink may have received a part of it. Exceptions of
    `begin` and the sink pass through.
    """
    try:
        target = parse_url(url)
    except ValueError as error:
        raise FetchError(str(error)) from None
    try:
        with trio.fail_after(limits.total_s):
            with trio.fail_after(limits.connect_s):
                stream = await _connect(target, dialer)
            async with stream:
                await stream.send_all(_request(target, accept, token))
                await _receive(stream, limits, begin)
    except trio.TooSlowError:
        raise FetchError("the request took too long") from None
    except (OSError, trio.BrokenResourceError, Unreachable) as error:
        raise FetchError(f"the connection failed: {reason_of(error)}") from None


async def _connect(target: Target, dialer: Dialer) -> trio.abc.Stream:
    """Connects to the first of the target's addresses that answers; raises OSError, Unreachable."""
    *others, last = await dialer.addresses(target.host)
    for address in others:
        try:
            return await _open(target, address)
        except OSError:
            continue
    return await _open(target, last)


async def _open(target: Target, address: str) -> trio.abc.Stream:
    stream = await trio.open_tcp_stream(address, target.port)
    if not target.tls:
        return stream
    context = ssl.create_default_context()
    return trio.SSLStream(stream, context, server_hostname=target.host, https_compatible=True)


def _request(target: Target, accept: bytes, token: bytes) -> bytes:
    shown = b"authorization: Bearer %b\r\n" % token if token else b""
    return (
        b"GET %b HTTP/1.1\r\nhost: %b\r\naccept: %b\r\naccept-encoding: identity\r\n"
        b"user-agent: kvd/%b\r\n%bconnection: close\r\n\r\n"
        % (target.path.encode(), target.authority.encode(), accept, VERSION.encode(), shown)
    )


async def _receive(
    stream: trio.abc.Stream, limits: FetchLimits, begin: Callable[[Headers], Sink]
) -> None:
    answer = _Answer(limits)
    sink: Sink | None = None
    while not answer.complete:
        with trio.fail_after(limits.stall_s):
            data = await stream.receive_some(RECEIVE_BYTES)
        if not data:
            if answer.delimited or sink is None:
                raise FetchError("the answer ended early")
            return  # the end of the connection ends the body; the sink checks that it is complete
        answer.feed(bytes(data))
        if not answer.headers_complete:
            continue
        if sink is None:
            answer.check_head()
            sink = begin(answer.headers)
        for piece in answer.take():
            sink(piece)


class _Answer:
    """Parses one HTTP response as it comes in. httptools calls the `on_` methods."""

    def __init__(self, limits: FetchLimits) -> None:
        self.headers: Headers = {}
        self.headers_complete = False
        self.complete = False
        self._limits = limits
        self._parser = httptools.HttpResponseParser(self)
        self._framing_bytes = 0  # all that is not the body
        self._body_bytes = 0
        self._pieces: list[bytes] = []

    @property
    def delimited(self) -> bool:
        """Whether the headers say where the body ends."""
        return b"content-length" in self.headers or b"transfer-encoding" in self.headers

    def feed(self, data: bytes) -> None:
        """Parses more bytes; raises FetchError unless they are one answer within the limits."""
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise FetchError(f"not an HTTP answer: {error.__context__ or error}") from None
        if self._framing_bytes > self._limits.head_bytes + MOST_FRAMING * self._body_bytes:
            part = "framing" if self.headers_complete else "head"
            raise FetchError(f"the {part} of the answer is too long")
        if self._body_bytes > self._limits.body_bytes:
            raise FetchError("the answer is too long")

    def check_head(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            raise FetchError(f"the answer has status {status}")
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise FetchError("the answer is compressed")
        if self.headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise FetchError("the answer has a transfer encoding other than chunked")

    def take(self) -> list[bytes]:
        """Returns the pieces of the body that came since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.headers[name] = self.headers[name] + b", " + value if name in self.headers else value

    def on_headers_complete(self) -> None:
        self.headers_complete = True

    def on_body(self, piece: bytes) -> None:
        self._framing_bytes -= len(piece)
        self._body_bytes += len(piece)
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        self.complete = True
