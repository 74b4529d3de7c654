"""Hot routes whose handler waits: answered without the application, ended if the client leaves."""

from __future__ import annotations

import pytest
import trio

from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope
from tests.support.serving import eventually, serving

pytestmark = pytest.mark.usefixtures("layers")


class Held:
    """A handler that holds every request until it is released."""

    def __init__(self) -> None:
        self.undone = 0
        self.holding = 0
        self.left = 0
        self.release = trio.Event()

    async def __call__(self, request: Request) -> Response:
        self.holding += 1
        try:
            await self.release.wait()
        except trio.Cancelled:
            self.left += 1
            raise
        finally:
            self.holding -= 1
        return Response(200, request.captured, b"text/plain", undo=self._undo)

    def _undo(self) -> None:
        self.undone += 1

    def routes(self) -> tuple[Route, ...]:
        async def handle(request: Request) -> Response:
            return await self(request)

        return (
            Route("GET", "/held/{name}", handle, hot=True),
            Route("POST", "/held", handle, hot=True, scope=Scope.ADMIN),
            Route("GET", "/now", lambda request: Response(200, b"now", b"text/plain"), hot=True),
        )


async def test_a_waiting_handler_answers_on_a_parked_connection() -> None:
    async with serving() as running, running.client() as client:
        for _ in range(3):
            assert (await client.request("GET", "/waiting?1")).body == b"late"
        assert running.front.stats.requests_app == 0
        assert running.observed == [("GET", "/waiting", 200)] * 3


async def test_others_are_served_while_one_waits() -> None:
    held = Held()
    async with (
        serving(routes=held.routes()) as running,
        running.client() as waiting,
        running.client() as other,
    ):
        await waiting.send(b"GET /held/a%2Fb HTTP/1.1\r\n\r\nGET /now HTTP/1.1\r\n\r\n")
        await eventually(lambda: held.holding == 1)
        assert (await other.request("GET", "/now")).body == b"now"
        held.release.set()
        assert (await waiting.read_reply()).body == b"a%2Fb"
        assert (await waiting.read_reply()).body == b"now"
        assert held.undone == 0


async def test_a_change_is_made_whether_its_client_waits_or_not() -> None:
    held = Held()
    async with serving(routes=held.routes()) as running, running.client() as other:
        async with running.client() as leaving:
            await leaving.send(b"POST /held HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
            await eventually(lambda: held.holding == 1)
        assert (await other.request("GET", "/now")).body == b"now"
        assert (held.holding, held.left) == (1, 0)
        held.release.set()
        await eventually(lambda: ("POST", "/held", 200) in running.observed)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_client_that_leaves_takes_its_request_along(reset: bool) -> None:
    held = Held()
    async with serving(routes=held.routes()) as running:
        async with running.client() as client:
            await client.send(b"GET /held/a HTTP/1.1\r\n\r\n")
            await eventually(lambda: held.holding == 1)
            if reset:
                client.reset()
        await eventually(lambda: held.left == 1)
        await running.until(client_gone=1)
        assert running.front.stats.handler_bugs == 0
        assert held.undone == 0  # the handler had nothing to undo yet


@pytest.mark.parametrize(
    "behind", [b"G", b"GET /now HTTP/1.1\r\n\r\n"], ids=["a byte", "a request"]
)
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_what_a_client_has_sent_behind_its_request_does_not_hide_that_it_left(
    reset: bool, behind: bytes
) -> None:
    held = Held()
    async with serving(routes=held.routes(), handler_s=3600.0) as running:
        async with running.client() as client:
            await client.send(b"GET /held/a HTTP/1.1\r\n\r\n")
            await eventually(lambda: held.holding == 1)
            await client.send(behind)
            for _ in range(20):  # lets the front read it
                await trio.lowlevel.checkpoint()
            if reset:
                client.reset()
        await eventually(lambda: held.left == 1)
        await running.until(client_gone=1)
        assert running.front.stats.handler_bugs == 0


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_what_is_answered_to_nobody_is_undone(reset: bool) -> None:
    """The client leaves while its answer is being made, before the front could notice."""
    held = Held()
    async with serving(routes=held.routes()) as running:
        async with running.client() as client:
            await client.send(b"GET /held/a HTTP/1.1\r\n\r\n")
            await eventually(lambda: held.holding == 1)
            if reset:
                client.reset()
            else:
                client.stream.socket.close()
            held.release.set()
            await running.until(client_gone=1)
        assert (held.left, held.undone) == (0, 1)
        assert running.front.stats.handler_bugs == 0


async def test_what_cannot_be_sent_whole_is_undone() -> None:
    undone: list[bool] = []

    async def handle(request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        return Response(200, b"x" * (64 << 20), undo=lambda: undone.append(True))

    routes = (Route("GET", "/large", handle, hot=True),)
    async with (
        serving(routes=routes, send_s=0.05) as running,
        running.narrow_client() as client,
    ):
        await client.send(b"GET /large HTTP/1.1\r\n\r\n")
        await running.until(send_timeouts=1)
        await eventually(lambda: undone == [True])


async def test_a_handler_that_waits_too_long_is_given_up() -> None:
    async with serving(handler_s=0.05) as running, running.client() as client:
        reply = await client.request("GET", "/waiting?60000")
        assert (reply.status, reply.body) == (503, b'{"error": "the request took too long"}')
        assert running.front.stats.handler_timeouts == 1


async def test_what_is_held_at_the_stop_is_answered() -> None:
    held = Held()
    async with serving(routes=held.routes()) as running, running.client() as client:
        await client.send(b"GET /held/a HTTP/1.1\r\n\r\n")
        await eventually(lambda: held.holding == 1)
        running.stop.set()
        await running.until_refusing()
        held.release.set()
        assert (await client.read_reply()).status == 200


async def test_a_placeholder_is_captured_on_the_fast_path_too() -> None:
    async with serving() as running, running.client() as client:
        for name in ("a", "a%2Fb", "state"):
            assert (await client.request("DELETE", f"/gone/{name}")).body == name.encode()
        for path in ("/gone/", "/gone/a/b", "/gone"):
            assert (await client.request("DELETE", path)).status == 404
        assert (await client.request("GET", "/gone/a")).headers["allow"] == "DELETE"
