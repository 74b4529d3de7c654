"""A small HTTP/1.1 client: the demo talks to its daemon as any other program would."""

from __future__ import annotations

import json

import httptools
import trio

RECEIVE_BYTES = 65_536


class HungUp(Exception):
    """The daemon is not there, or not any more."""


class Client:
    """One keep-alive connection; one request at a time."""

    def __init__(self, stream: trio.SocketStream, host: str) -> None:
        self._stream = stream
        self._host = host

    async def request(
        self, method: str, path: str, value: object | None = None
    ) -> tuple[int, bytes]:
        """Sends `value` as JSON, if any; returns status and body. Raises HungUp."""
        body = b"" if value is None else json.dumps(value).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        answer = _Answer()
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
        return parser.get_status_code(), bytes(answer.body)


class _Answer:
    """What httptools calls while it parses one response."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.complete = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True
