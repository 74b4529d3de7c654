"""A front on loopback, and a client that sends raw bytes and parses replies.

With the fixture `layers` a test runs twice, without TLS and with it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from kvd.errors import NotFound
from kvd.http.access import AccessLog
from kvd.http.auth import AccessPolicy, Authorizer
from kvd.http.certificates import load_credentials
from kvd.http.cold import ColdApp
from kvd.http.context import ServerContext
from kvd.http.front import Front
from kvd.http.limits import HttpLimits
from kvd.http.listeners import open_listeners
from kvd.http.messages import Request, Response
from kvd.http.options import TlsFiles
from kvd.http.routes import Route, Scope
from kvd.http.tls import TlsServer
from kvd.telemetry.counts import RequestCounts
from tests.support.narrow import narrow_stream

# A test shortens only the deadline that it waits for: on a busy machine another short one could
# expire first.
PATIENT = HttpLimits(linger_s=0.1, graceful_s=0.5)
SOON = 0.15  # seconds; the one deadline that a test shortens
# For a head on a connection that has carried a request: handshakes have the same deadline, and a
# client that has asked nothing when it expires gets no answer.
HASTY = replace(PATIENT, head_s=SOON)
PUBLIC = AccessPolicy(allowed_hosts=("kvd",))
TEST_SECONDS = 60  # limit of a test; most take milliseconds on an idle machine
BIG = b"x" * (16 * 1024 * 1024)  # more than a narrow stream can buffer


def echo(request: Request) -> Response:
    """Answers with the body of the request."""
    return Response(200, request.body, b"application/octet-stream")


def describe(request: Request) -> Response:
    """Answers with all that a handler learns of a request, except its headers."""
    text = f"{request.method} {request.path} {request.query!r} {len(request.body)}"
    return Response(200, text.encode(), b"text/plain", [(b"x-kvd", b"1")])


def health(request: Request) -> Response:
    return Response(200, b"", b"")


def missing(request: Request) -> Response:
    raise NotFound("no indexer for model=m")


def buggy(request: Request) -> Response:
    raise RuntimeError("secret")


def big(request: Request) -> Response:
    return Response(200, BIG, b"text/plain")


def counted(request: Request) -> Response:
    async def pieces() -> AsyncGenerator[bytes, None]:
        for number in range(3):
            await trio.lowlevel.checkpoint()
            yield b"%d" % number

    return Response(200, pieces(), b"text/plain")


def broken_off(request: Request) -> Response:
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"begun"
        raise RuntimeError("secret")

    return Response(200, pieces(), b"text/plain")


async def counted_later(request: Request) -> Response:
    return counted(request)


async def slow(request: Request) -> Response:
    """Takes as many milliseconds as the query says."""
    await trio.sleep(int(request.query) / 1000)
    return Response(200, b"late", b"text/plain")


def named(request: Request) -> Response:
    return Response(200, request.captured, b"text/plain")


def unnamed(request: Request) -> Response:
    return Response(200, b"no name", b"text/plain")


def both(method: str, path: str, handler: object, limit: int = 2 * 1024 * 1024) -> list[Route]:
    """Returns a hot route, and a cold one under /app."""
    return [
        Route(method, path, handler, hot=True, body_limit=limit, scope=Scope.READ),  # type: ignore[arg-type]
        Route(method, "/app" + path, handler, body_limit=limit, scope=Scope.READ),  # type: ignore[arg-type]
    ]


ECHO_LIMIT = 1000
QUERY_LIMIT = 8 * 1024 * 1024
ROUTES: tuple[Route, ...] = (
    *both("POST", "/echo", echo, ECHO_LIMIT),
    *both("POST", "/query", describe, QUERY_LIMIT),
    *both("GET", "/describe", describe),
    *both("GET", "/health", health),
    *both("GET", "/missing", missing),
    *both("GET", "/bug", buggy),
    *both("GET", "/big", big),
    *both("GET", "/named/{name}/state", named),
    *both("GET", "/named/exact/state", unnamed),
    *both("GET", "/counted", counted),
    *both("GET", "/counted/later", counted_later),
    *both("GET", "/broken", broken_off),
    Route("GET", "/slow", slow),
    Route("GET", "/waiting", slow, hot=True),
    Route("DELETE", "/gone/{name}", named, hot=True, scope=Scope.LIFECYCLE),
)


@dataclass
class Reply:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def persists(self) -> bool:
        return self.headers.get("connection") != "close"


class SecuredStream:
    """TLS over a stream, with the members of a plain stream that tests use."""

    def __init__(self, below: trio.SocketStream, trust: ssl.SSLContext) -> None:
        """The handshake comes with the first bytes, unless `do_handshake` is called before."""
        self._tls = trio.SSLStream(below, trust, server_hostname="127.0.0.1", https_compatible=True)
        self.do_handshake = self._tls.do_handshake
        self.send_all = self._tls.send_all
        self.receive_some = self._tls.receive_some
        self.setsockopt = below.setsockopt
        self.send_eof = below.send_eof  # that of TLS would end receiving, too
        self.socket = below.socket


class Client:
    """One connection; `read` calls raise trio.EndOfChannel where a reply ends too early."""

    def __init__(self, stream: trio.SocketStream | SecuredStream) -> None:
        self.stream = stream
        self._buffer = bytearray()  # grows without copies: replies may be long

    async def handshake(self) -> None:
        """Completes the handshake of TLS, if there is TLS."""
        if isinstance(self.stream, SecuredStream):
            await self.stream.do_handshake()

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
        """Sends a request and returns the reply; `content_type` etc. are its headers."""
        lines = [f"{method} {path} HTTP/1.1"]
        headers = {"host": "kvd", **headers}
        if body or method == "POST":
            headers = {"content_type": "application/json", **headers}
            lines.append(f"content-length: {len(body)}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        return await self.read_reply(bodiless=method == "HEAD")

    async def read_reply(self, bodiless: bool = False) -> Reply:
        head = (await self._read_until(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        headers = (line.partition(": ") for line in lines)
        reply = Reply(int(first.split(" ")[1]), {name.lower(): text for name, _, text in headers})
        if not bodiless and reply.status >= 200:
            reply.body = await self._read_body(reply.headers)
        return reply

    async def _read_body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            if "content-length" not in headers:
                return await self.read_to_end()
            return await self._read(int(headers["content-length"]))
        pieces = []
        while size := int(await self._read_until(b"\r\n"), 16):
            pieces.append(await self._read(size))
            assert await self._read(2) == b"\r\n"
        assert await self._read(2) == b"\r\n"
        return b"".join(pieces)

    async def read_to_end(self) -> bytes:
        """Returns everything up to the end of the connection, which may be a reset."""
        try:
            while data := await self.stream.receive_some():
                self._buffer += data
        except trio.BrokenResourceError:
            pass
        return self._take(len(self._buffer))

    async def _read_until(self, end: bytes) -> bytes:
        while (at := self._buffer.find(end)) < 0:
            await self._fill()
        return self._take(at + len(end))[:at]

    async def _read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._fill()
        return self._take(size)

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def _fill(self) -> None:
        data = await self.stream.receive_some()
        if not data:
            raise trio.EndOfChannel(f"reply ends after {self._buffer!r}")
        self._buffer += data

    def reset(self) -> None:
        """Closes the connection so that the server sees a reset."""
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.stream.socket.close()


class TLS:
    """The certificates of the running test's fronts, None without TLS; `layers` sets them."""

    certificates: Path | None = None


class Recorder(RequestCounts):
    """Remembers requests instead of counting them."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, str, int]] = []

    def observe(self, path: str, method: str, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.requests.append((method, path, status))


class Unwilling(list[tuple[str, str, int]]):
    """A list that makes a Recorder fail, which its callers do not expect."""

    def append(self, item: object) -> None:
        raise RuntimeError("no room")


@dataclass
class Running:
    """A front that serves."""

    front: Front
    address: tuple[str, int]
    stop: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    recorder: Recorder = field(default_factory=Recorder)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    trust: ssl.SSLContext | None = None  # with TLS

    @property
    def observed(self) -> list[tuple[str, str, int]]:
        """The requests that were counted: method, path of the route, status."""
        return self.recorder.requests

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with await trio.open_tcp_stream(*self.address) as plain:
            yield self._client_of(plain)

    @asynccontextmanager
    async def narrow_client(self) -> AsyncIterator[Client]:
        """Yields a client that buffers little while it does not read."""
        async with await narrow_stream(*self.address) as plain:
            yield self._client_of(plain)

    def _client_of(self, plain: trio.SocketStream) -> Client:
        return Client(plain if self.trust is None else SecuredStream(plain, self.trust))

    async def until(self, **counters: int) -> None:
        """Waits until each of the front's counters has this value, at least."""
        stats = self.front.stats
        await eventually(lambda: all(getattr(stats, n) >= v for n, v in counters.items()))

    async def until_refusing(self) -> None:
        """Waits until the front accepts no more connections."""
        while True:
            try:
                await (await trio.open_tcp_stream(*self.address)).aclose()
            except OSError:
                return

    async def until_empty(self) -> None:
        """Waits until no connection is open."""
        await eventually(lambda: not self.front.stats.connections_open)


@asynccontextmanager
async def serving(
    limits: HttpLimits = PATIENT,
    routes: tuple[Route, ...] = ROUTES,
    policy: AccessPolicy = PUBLIC,
    access: AccessLog | None = None,
    **changes: float,
) -> AsyncIterator[Running]:
    """Runs a front on a free port; `changes` are limits that differ."""
    limits = replace(limits, **changes)  # type: ignore[arg-type]
    listeners = await open_listeners("127.0.0.1:0")

    recorder = Recorder()
    context = ServerContext(Authorizer(policy), recorder, access=access or AccessLog())
    app = ColdApp(routes, limits, context)
    running = Running(
        Front(routes, app, limits, context), listeners[0].getsockname(), recorder=recorder
    )
    if TLS.certificates is not None:
        files = TlsFiles(TLS.certificates / "cert.pem", TLS.certificates / "key.pem")
        running.front = TlsServer(routes, app, load_credentials(files), limits, context)
        running.trust = ssl.create_default_context(cafile=TLS.certificates / "cert.pem")
        running.trust.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF  # on with some builds of Python
    front = running.front

    async def serve(task_status: trio.TaskStatus[None]) -> None:
        with running.scope:
            await front.serve(listeners, running.stop, task_status=task_status)
        running.ended.set()

    with trio.fail_after(TEST_SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(serve)
            yield running
            running.stop.set()
            await running.ended.wait()
    assert front.stats.bugs == 0
    assert front.stats.connections_open == 0


async def eventually(condition: Callable[[], bool]) -> None:
    """Polls until `condition` holds, as counters have no event to wait for."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.002)
