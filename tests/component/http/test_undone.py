"""A handler's work is undone if its client cannot be sent the answer."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

import pytest
import trio

from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope
from tests.support.serving import Client, eventually, serving

LEAVING: dict[str, Callable[[Client], None]] = {
    "closed": lambda client: client.stream.socket.close(),
    "half-closed": lambda client: client.stream.socket.shutdown(socket.SHUT_WR),
    "reset": Client.reset,
}
PIECES = {
    "whole": b"POST /book HTTP/1.1\r\nhost: kvd\r\ncontent-length: 0\r\n\r\n",
    "the long way": b"POST /book HTTP/1.0\r\nhost: kvd\r\ncontent-length: 0\r\n\r\n",
    "with another behind it": b"POST /book HTTP/1.1\r\ncontent-length: 0\r\n\r\n" * 2,
}


class Booked:
    """A handler that books, and meanwhile calls a function of the test."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None
        self.size = 2
        self.booked = self.undone = 0

    def book(self, request: Request) -> Response:
        self.booked += 1
        self.meanwhile()
        return Response(201, b"x" * self.size, b"text/plain", undo=self._undo)

    async def book_later(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        return self.book(request)

    def _undo(self) -> None:
        self.undone += 1

    def route(self, *, waits: bool) -> Route:
        handler = partial(Booked.book_later, self) if waits else self.book
        return Route("POST", "/book", handler, hot=True, scope=Scope.LIFECYCLE)


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("leaving", LEAVING)
async def test_a_client_leaves_while_its_answer_is_made(
    leaving: str, pieces: str, waits: bool, layers: str
) -> None:
    booked = Booked()
    async with serving(routes=(booked.route(waits=waits),)) as running, running.client() as client:
        booked.meanwhile = partial(LEAVING[leaving], client)
        await client.send(PIECES[pieces])
        await running.until(client_gone=1)
        assert (booked.booked, booked.undone) == (1, 1)
        assert running.front.stats.handler_bugs == 0


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("pieces", PIECES)
async def test_who_is_answered_keeps_what_is_booked(pieces: str, waits: bool, layers: str) -> None:
    booked = Booked()
    async with serving(routes=(booked.route(waits=waits),)) as running:
        for leave in LEAVING.values():
            async with running.client() as client:
                await client.send(PIECES[pieces])
                for _ in range(PIECES[pieces].count(b"POST")):
                    assert (await client.read_reply()).status == 201
                leave(client)
            await running.until_empty()
    assert booked.undone == 0


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("pieces", PIECES)
async def test_what_cannot_be_sent_whole_is_undone(pieces: str, waits: bool, layers: str) -> None:
    booked = Booked()
    booked.size = 64 << 20
    limits = {"send_s": 0.05}
    routes = (booked.route(waits=waits),)
    async with serving(routes=routes, **limits) as running, running.client() as client:
        await client.send(PIECES[pieces])
        await running.until(send_timeouts=1)
        await eventually(lambda: booked.undone == 1)
    assert booked.booked == 1
