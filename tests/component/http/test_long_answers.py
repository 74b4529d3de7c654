"""Long answers are sent in steps, between which others are served, and leave nothing behind."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvd.http.messages import Request, Response
from kvd.http.routes import Route
from kvd.http.transport import SEND_BYTES, ConnectionPhase
from tests.support.serving import BIG, ROUTES, SOON, TEST_SECONDS, Running, eventually, serving

PIECE = b"x" * 10_000


class Endless:
    """A hot route whose answers have no end, and how many of them are being written."""

    def __init__(self) -> None:
        self.open = 0
        self.begun, self.closed = trio.Event(), trio.Event()

    def routes(self) -> tuple[Route, ...]:
        return (Route("GET", "/endless", self.answer, hot=True),)

    def answer(self, request: Request) -> Response:
        return Response(200, self._pieces(), b"text/plain")

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        self.open += 1
        try:
            while True:
                yield PIECE
                self.begun.set()
        finally:
            self.open -= 1
            self.closed.set()


class Passes:
    """Counts the passes of the loop."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self) -> None:
        while True:
            await trio.lowlevel.checkpoint()
            self.count += 1


@pytest.mark.parametrize("path", ["/big", "/app/big"])
async def test_a_long_answer_is_sent_in_steps(
    path: str, layers: str, nursery: trio.Nursery
) -> None:
    passes = Passes()
    async with serving() as running, running.client() as client:
        await client.request("GET", "/app/health")  # loads the application
        nursery.start_soon(passes.run)
        before = passes.count
        reply = await client.request("GET", path)
        assert len(reply.body) == len(BIG)
        assert passes.count - before >= len(BIG) // SEND_BYTES
        nursery.cancel_scope.cancel()


async def leaves_nothing(running: Running, endless: Endless) -> None:
    await endless.closed.wait()
    await running.until_empty()
    assert endless.open == 0


async def test_a_client_that_leaves_ends_its_answer(layers: str) -> None:
    endless = Endless()
    async with serving(routes=endless.routes()) as running:
        async with running.client() as client:
            await client.send(b"GET /endless HTTP/1.1\r\nhost: kvd\r\n\r\n")
            await endless.begun.wait()
        await leaves_nothing(running, endless)
        await running.until(client_gone=1)


async def test_a_client_that_does_not_read_ends_its_answer(layers: str) -> None:
    endless = Endless()
    async with serving(routes=endless.routes(), send_s=SOON) as running:
        async with running.narrow_client() as client:
            await client.send(b"GET /endless?a=b HTTP/1.1\r\nhost: kvd\r\n\r\n")
            await leaves_nothing(running, endless)
        await running.until(send_timeouts=1)


async def test_a_stop_ends_answers(layers: str) -> None:
    endless = Endless()
    async with serving(routes=endless.routes()) as running, running.narrow_client() as client:
        await client.send(b"GET /endless HTTP/1.1\r\nhost: kvd\r\n\r\n")
        await endless.begun.wait()
        running.stop.set()
        await leaves_nothing(running, endless)


async def long(request: Request) -> Response:
    async def pieces() -> AsyncGenerator[bytes, None]:
        for at in range(0, len(BIG), len(PIECE)):
            yield BIG[at : at + len(PIECE)]

    return Response(200, pieces(), b"text/plain")


LONG = (Route("GET", "/long", long, hot=True), Route("GET", "/app/long", long), *ROUTES)


@pytest.mark.parametrize("path", ["/big", "/long", "/app/big", "/app/long"])
async def test_an_answer_begun_before_a_stop_ends_its_connection(
    path: str, layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("connection", "server"):
        monkeypatch.setattr(f"kvd.http.{module}.LAST_REQUEST_S", 0)
    async with (
        serving(routes=LONG, graceful_s=TEST_SECONDS) as running,
        running.narrow_client() as client,
    ):
        await client.send(f"GET {path} HTTP/1.1\r\nhost: kvd\r\n\r\n".encode())
        (connection,) = running.front._running
        await eventually(lambda: connection.phase is ConnectionPhase.SENDING)
        running.stop.set()
        await wait_all_tasks_blocked()  # what was idle at the stop has been closed
        assert (await client.read_reply()).body == BIG
        await running.until_empty()
