"""Sends answers: whole or as streams, and with the faults that a test wants."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import trio

from examples.engine import api
from examples.engine.options import Fault

LONG_HEAD_BYTES = 128 * 1024  # no reader takes so much
FORGETFUL = struct.pack("ii", 1, 0)  # SO_LINGER: a close is a reset


class Hangup(Exception):
    """The connection ends here, on purpose."""


class Answer:
    """One answer on its way to the client."""

    def __init__(
        self,
        stream: trio.SocketStream,
        form: api.Form,
        words: list[str],
        used: api.Usage,
        fault: Fault | None,
    ) -> None:
        self._stream = stream
        self._form = form
        self._words = words
        self._used = used
        self._fault = fault
        self.more: dict[str, Any] = {}  # further members, of a whole answer only
        self.chunks = True

    async def whole(self) -> None:
        answer = self._form.whole("".join(self._words), self._used) | self.more
        body = json.dumps(answer).encode()
        if self._fault is Fault.ABORTS:
            body = body.replace(b'"finish_reason": "length"', b'"finish_reason": "abort"')
        head = json_head(200, len(body))
        if self._fault is Fault.AFTER_HEAD:
            await hang_up_behind(self._stream, head)
        if self._fault is Fault.AFTER_EVENT:
            await hang_up_behind(self._stream, head + body[: len(body) // 2])
        await self._send(head + body)

    async def stream(self, step_s: float, *, with_usage: bool) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        head += b"transfer-encoding: chunked\r\n\r\n" if self.chunks else b"\r\n"
        if self._fault is Fault.AFTER_HEAD:
            await hang_up_behind(self._stream, head)
        if self._fault is Fault.EMPTY:
            return await self._end(head)
        if self._fault is Fault.ERROR_EVENT:
            failure = api.event(api.error(503, "the queue is full", "Service Unavailable"))
            return await self._end(head + self._framed(failure + api.DONE))
        form, used = self._form, self._used
        await self._send(head + b"".join(map(self._framed, form.opening(used))))
        for at, word in enumerate(self._words):
            data = self._framed(form.piece(word, first=at == 0))
            if at == 1 and self._fault is Fault.AFTER_EVENT:
                raise Hangup
            if at == 1 and self._fault is Fault.IN_EVENT:
                await hang_up_behind(self._stream, data[: len(data) // 2])
            await self._send(data)
            if step_s:
                await trio.sleep(step_s)
        for failure in form.closing("".join(self._words), used, with_usage=with_usage):
            await self._send(self._framed(failure))
        if form.ends and self._fault is not Fault.UNMARKED:
            await self._send(self._framed(form.ends))
        if self._fault is Fault.AFTER_DONE:
            raise Hangup
        await self._end()

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self.chunks else data

    async def _end(self, data: bytes = b"") -> None:
        """Ends a stream after a last piece."""
        await self._send(data + b"0\r\n\r\n" if self.chunks else data)
        if not self.chunks:
            raise Hangup

    async def _send(self, data: bytes) -> None:
        if self._fault is not Fault.BYTES:
            return await self._stream.send_all(data)
        for at in range(len(data)):
            await self._stream.send_all(data[at : at + 1])


async def refuse(
    stream: trio.SocketStream, form: type[api.Form], fault: Fault, retry_after: str | None
) -> None:
    """Plays the faults that come before an answer; raises Hangup if no answer follows."""
    if fault is Fault.CLOSE:
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, FORGETFUL)
        raise Hangup
    if fault is Fault.SILENCE:
        await stream.receive_some(1)  # until the client gives up
        raise Hangup
    if fault is Fault.HALF_CLOSED:
        await stream.send_eof()
        await stream.receive_some(1)  # as above
        raise Hangup
    if fault is Fault.LONG_HEAD:
        await hang_up_behind(stream, b"HTTP/1.1 200 OK\r\nx-long: " + b"a" * LONG_HEAD_BYTES)
    if fault is Fault.GARBAGE:
        await hang_up_behind(stream, b"\x16\x03\x01 this is not HTTP\r\n\r\n")
    if fault is Fault.SHUTS_DOWN:
        text = "cannot schedule new futures after shutdown"
        await send_json(stream, 500, form.error(500, text, "InternalServerError"))
        raise Hangup
    if fault in (Fault.REFUSE_429, Fault.REFUSE_500, Fault.REFUSE_503):
        status = int(fault)
        more = "" if retry_after is None else f"retry-after: {retry_after}\r\n"
        await send_json(stream, status, form.error(status, f"simulated {status}"), more)
        raise Hangup


async def hang_up_behind(stream: trio.SocketStream, data: bytes) -> None:
    await stream.send_all(data)
    raise Hangup


def json_head(
    status: int, length: int, content_type: str = "application/json", more: str = ""
) -> bytes:
    """Returns the head of an answer; `more` are further lines of it."""
    lines = f"content-type: {content_type}\r\ncontent-length: {length}\r\n{more}"
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode()


async def send_json(stream: trio.SocketStream, status: int, answer: Any, more: str = "") -> None:
    """Sends an answer as JSON, but text and audio as they are."""
    if isinstance(answer, str):
        body, kind = answer.encode(), "text/plain"
    elif isinstance(answer, bytes):
        body, kind = answer, "audio/wav"
    else:
        body, kind = json.dumps(answer).encode(), "application/json"
    await stream.send_all(json_head(status, len(body), kind, more) + body)
