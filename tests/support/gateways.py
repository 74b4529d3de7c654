"""Simulated engines in the test's own process, and a gateway in front of them."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import trio
import zmq

from examples.engine.options import EngineOptions
from examples.engine.server import EngineServer
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.relaying import Script
from tests.support.zmtp_fakes import NOT_MY_FAULT_S

CHAT = "/v1/chat/completions"


class TlsConnection:
    """A TLS connection of an engine, with the methods that the engine uses of a plain one."""

    def __init__(self, plain: trio.SocketStream, context: ssl.SSLContext) -> None:
        self._plain = plain
        self.socket = plain.socket
        self._tls = trio.SSLStream(plain, context, server_side=True, https_compatible=True)
        self.receive_some = self._tls.receive_some
        self.send_all = self._tls.send_all

    async def __aenter__(self) -> TlsConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tls.aclose()

    async def send_eof(self) -> None:
        """Ends its side of the TCP connection."""
        await self._plain.send_eof()


def trusting(certificate: Path) -> tuple[str, ...]:
    """Returns the flags of a gateway that trusts engines with the certificate in a folder."""
    return "--upstream-tls-ca", str(certificate / "cert.pem")


def tls_of(folder: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """Returns the TLS context of an engine with the certificate in a folder.

    With `client_ca` it demands a client's certificate by that authority.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@dataclass
class Running:
    """An engine on a port of its own, which can end and come back."""

    server: EngineServer
    nursery: trio.Nursery
    port: int
    scope: trio.CancelScope | None = None
    tls: ssl.SSLContext | None = None
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{self.host}:{self.port}"

    async def start(self) -> None:
        self.scope = await self.nursery.start(self._run)

    def end(self) -> None:
        """Ends it at once, with all of its connections."""
        assert self.scope is not None
        self.scope.cancel()

    async def _run(self, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                listeners = await trio.open_tcp_listeners(self.port, host=self.host)
                nursery.start_soon(trio.serve_listeners, self._serve, listeners)
                if self.tls is not None:
                    # Other engines take prompts over without TLS, on a port that only they know.
                    beside = await trio.open_tcp_listeners(0, host=self.host)
                    nursery.start_soon(trio.serve_listeners, self.server.serve, beside)
                    self.server.address = beside[0].socket.getsockname()
                task_status.started(scope)

    async def _serve(self, stream: trio.SocketStream) -> None:
        if self.tls is not None:
            stream = cast("trio.SocketStream", TlsConnection(stream, self.tls))
        await self.server.serve(stream)


@asynccontextmanager
async def engines(
    *options: EngineOptions, tls: ssl.SSLContext | None = None, side_by_side: bool = False
) -> AsyncIterator[list[Running]]:
    """Yields running engines, with TLS if that is given.

    Each has a port of its own; those `side_by_side` have one port and different addresses.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        async with trio.open_nursery() as nursery:
            started = [
                Running(EngineServer(each, context), nursery, find_free_port(), tls=tls)
                for each in options
            ]
            if side_by_side:
                for number, one in enumerate(started, 1):
                    one.host, one.port = f"127.0.0.{number}", started[0].port
            for each in started:
                await each.start()
            yield started
            nursery.cancel_scope.cancel()
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def scripted_engine(script: Script) -> AsyncIterator[str]:
    """Yields the URL of a server with OpenAI's API whose answers to POST are up to a script.

    The connection ends behind such an answer.
    """

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            while request := await _read_request(stream):
                if request.startswith(b"POST "):
                    return await script(stream)
                known = {b"/health": b"{}", b"/v1/models": b'{"data":[{"id":"demo"}]}'}
                body = known.get(request.split(b" ")[1])
                line = b"404 Not Found" if body is None else b"200 OK"
                head = b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n" % (line, len(body or b""))
                await stream.send_all(head + (body or b""))

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def _read_request(stream: trio.SocketStream) -> bytes:
    """Returns a request with its body; nothing at the end of the connection."""
    data, size = b"", -1
    while len(data) != size:
        piece = await stream.receive_some()
        if not piece:
            return b""
        data += piece
        if (end := data.find(b"\r\n\r\n") + 4) > 3:
            length = re.search(rb"\r\ncontent-length: (\d+)", data[:end])
            size = end + (0 if length is None else int(length[1]))
    return data


@dataclass
class Answered:
    """What a client saw of an answer."""

    status: int
    headers: httpx.Headers
    body: bytes
    clean: bool  # the answer ended as it should

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        found = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [each if each == "[DONE]" else json.loads(each) for each in found]

    @property
    def text(self) -> str:
        """The text of a streamed chat."""
        choices = [each["choices"][0] for each in self.events if each != "[DONE]"]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


def outcome(answered: Answered, *, stream: bool) -> str:
    """Returns how a request ended: its status, or if that is 200 whether its answer was whole."""
    if answered.status != 200:
        return str(answered.status)
    if not stream:
        return "whole" if answered.clean else "cut answer"
    if answered.clean:
        return "whole" if answered.body.endswith(b"data: [DONE]\n\n") else "quietly short"
    return "cut" if answered.body.startswith(b"data: ") else "cut without a byte"


class Client:
    """A client of a gateway."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answered:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        data = b""
        async with self.http.stream("POST", path, content=content, headers=sent) as response:
            try:
                async for piece in response.aiter_raw():
                    data += piece
                clean = True
            except httpx.RemoteProtocolError:
                clean = False
            return Answered(response.status_code, response.headers, data, clean)

    async def chat(
        self, *texts: str, headers: dict[str, str] | None = None, **more: Any
    ) -> Answered:
        messages = [{"role": "user", "content": text} for text in texts]
        members = {"model": "demo", "max_tokens": 4, "messages": messages, **more}
        return await self.post(CHAT, members, headers)

    async def get(self, path: str) -> Answered:
        response = await self.http.get(path)
        return Answered(response.status_code, response.headers, response.content, True)

    async def metrics(self) -> dict[str, float]:
        """Returns the gateway's metrics by name and labels."""
        lines = (await self.get("/metrics")).body.decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}


@asynccontextmanager
async def serving(
    start: Callable[..., Server],
    *options: EngineOptions,
    flags: Sequence[str] = (),
    prefills: int = 0,
    unusable: int = 0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[Client, list[Running]]]:
    """Yields a client of a gateway that serves all of these engines, and the engines.

    The first `prefills` of them are prefill engines; `unusable` of them never serve.
    """
    async with engines(*options, tls=tls) as running:
        urls = [each.url for each in running]
        named = [part for url in urls[:prefills] for part in ("--prefill", url)]
        async with gateway_of(
            start, urls[prefills:], [*named, *flags], len(urls) - unusable
        ) as client:
            for each in running:
                if each.server.publisher is not None:
                    await each.server.publisher.subscribed()
            yield client, running


@asynccontextmanager
async def gateway_of(
    start: Callable[..., Server],
    urls: Sequence[str],
    flags: Sequence[str] = (),
    count: int | None = None,
) -> AsyncIterator[Client]:
    """Yields a client of a gateway of the engines at these URLs, once `count` or all serve."""
    named = [part for url in urls for part in ("--upstream", url)]
    named += ["--gateway-tokenize-s", str(NOT_MY_FAULT_S)]  # however busy the machine is
    if "--gateway-canary" not in flags:  # a canary would be one more request
        named += ["--gateway-canary", "false"]
    server = await trio.to_thread.run_sync(lambda: start(*named, *flags, face="gateway"))
    async with httpx.AsyncClient(
        base_url=server.base_url, trust_env=False, verify=False, timeout=60
    ) as http:
        client = Client(http)
        await wait_serving(client, len(urls) if count is None else count)
        yield client


async def wait_serving(client: Client, count: int) -> None:
    """Waits until so many engines serve."""
    with trio.fail_after(NOT_MY_FAULT_S):
        while (await client.get("/ready")).json["serving"] != count:  # noqa: ASYNC110 - another process
            await trio.sleep(0.02)


async def wait_heard(client: Client, running: list[Running]) -> None:
    """Waits until the index holds what the engines cache."""
    cached = sum(len(each.server.cache) for each in running)
    await wait_metric(client, 'kvd_blocks{tier="device"}', cached)


async def wait_metric(client: Client, name: str, value: float) -> None:
    """Waits until one of the gateway's metrics has this value."""
    with trio.fail_after(NOT_MY_FAULT_S):
        while (await client.metrics())[name] != value:  # noqa: ASYNC110 - another process
            await trio.sleep(0.01)
