"""A small HTTP/1.1 client: the demo talks to its daemon as any other program would."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httptools
import trio

RECEIVE_BYTES = 65_536


class HungUp(Exception):
    """The daemon cannot be reached, or has closed the connection."""


class Refused(Exception):
    """The daemon's answer is an error, in the daemon's own words."""


class Answer:
    """One response; httptools calls the `on_` methods while it parses."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True

    def json(self) -> Any:
        return json.loads(self.body)

    def shown(self) -> str:
        """Returns its `x-` headers and its body."""
        lines = [f"{name}: {value}" for name, value in self.headers.items() if "x-" in name]
        return "\n".join([*lines, "", self.body.decode()])


class Client:
    """One keep-alive connection; one request at a time."""

    def __init__(self, stream: trio.SocketStream, host: str) -> None:
        self._stream = stream
        self._host = host

    async def request(self, method: str, path: str, value: object | None = None) -> Answer:
        """Sends `value` as JSON, if any. Raises HungUp, and Refused for a status other than 200."""
        body = b"" if value is None else json.dumps(value).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        answer = Answer()
        parser = httptools.HttpResponseParser(answer)
        try:
            await self._stream.send_all(head.encode() + body)
            while not answer.complete:
                data = await self._stream.receive_some(RECEIVE_BYTES)
                if not data:
                    raise HungUp(f"{self._host} hung up during {method} {path}")
                parser.feed_data(data)
        except trio.BrokenResourceError as error:
            raise HungUp(f"{self._host} reset {method} {path}") from error
        if (status := parser.get_status_code()) != 200:
            raise Refused(f"{path} answered {status}: {answer.body.decode()}")
        return answer


@asynccontextmanager
async def connected(base_url: str) -> AsyncIterator[Client]:
    """Opens a connection to the server of a URL. Raises HungUp if there is none."""
    url = urlsplit(base_url)
    try:
        stream = await trio.open_tcp_stream(url.hostname or "", url.port or 80)
    except OSError as error:
        raise HungUp(str(error)) from error
    async with stream:
        yield Client(stream, url.netloc)
