"""Well-behaved clients get equal answers from hot routes and through the application."""

from __future__ import annotations

import json
import logging

import pytest
import quart
import trio

from kvd.http.app import build_app
from kvd.http.context import ServerContext
from kvd.http.front import Front
from kvd.http.limits import HttpLimits
from kvd.http.messages import Request, Response
from kvd.http.routes import Route
from tests.support.serving import BIG, ECHO_LIMIT, QUERY_LIMIT, Client, Unwilling, serving

pytestmark = pytest.mark.usefixtures("layers")

PREFIXES = pytest.mark.parametrize("prefix", ["", "/app"], ids=["hot", "app"])


@PREFIXES
async def test_a_handler_sees_the_request_and_its_response_is_sent_as_it_is(prefix: str) -> None:
    async with serving() as running, running.client() as client:
        reply = await client.request("POST", f"{prefix}/query?a=%20b&a=1", b"{}")
        assert reply.status == 200
        assert reply.body == f"POST {prefix}/query b'a=%20b&a=1' 2".encode()
        assert reply.headers["content-type"] == "text/plain"
        assert reply.headers["x-kvd"] == "1"
        assert reply.headers["date"].endswith(" GMT")
        assert "server" not in reply.headers
        assert reply.persists()
        assert running.observed == [("POST", f"{prefix}/query", 200)]


async def test_the_application_knows_the_scheme(layers: str) -> None:
    def scheme(request: Request) -> Response:
        return Response(200, quart.request.scheme.encode(), b"text/plain")

    async with serving(routes=(Route("GET", "/scheme", scheme),)) as running:
        async with running.client() as client:
            reply = await client.request("GET", "/scheme")
        assert reply.body == {"plain": b"http", "tls": b"https"}[layers]


@PREFIXES
async def test_an_empty_response_has_no_content_type(prefix: str) -> None:
    async with serving() as running, running.client() as client:
        reply = await client.request("GET", f"{prefix}/health?ignored")
        assert (reply.status, reply.body) == (200, b"")
        assert reply.headers.keys() == {"content-length", "date"}


@PREFIXES
async def test_head_is_get_without_the_body(prefix: str) -> None:
    async with serving() as running, running.client() as client:
        for path in (prefix + "/describe", prefix + "/big", "/counted"):
            head = await client.request("HEAD", path)
            reply = await client.request("GET", path)
            assert head.status == reply.status == 200
            lengths = [r.headers.get("content-length") for r in (head, reply)]
            assert lengths[0] == lengths[1] or path.endswith("/describe")  # it prints the method


async def test_an_unknown_path_is_404_also_with_a_body_or_a_slash() -> None:
    async with serving() as running, running.client() as client:
        for path in ("/nope", "/", "/health/", "/health/x", "/%ff%00", "/a#b"):
            reply = await client.request("GET", path)
            assert (reply.status, json.loads(reply.body)) == (404, {"error": "not found"})
        assert (await client.request("POST", "/nope", b"{}")).status == 404
        assert running.observed == []


@PREFIXES
async def test_another_method_is_405_and_names_those_allowed(prefix: str) -> None:
    async with serving() as running, running.client() as client:
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"):
            reply = await client.request(method, f"{prefix}/health")
            assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")
            assert json.loads(reply.body) == {"error": "method not allowed"}
        reply = await client.request("GET", f"{prefix}/query")
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
        assert running.observed[-1] == ("GET", f"{prefix}/query", 405)


@PREFIXES
async def test_a_path_is_what_it_is_spelled_like(prefix: str) -> None:
    async with serving() as running, running.client() as client:
        for path in ("/%68ealth", "/health/", "//health", "/health/."):
            assert (await client.request("GET", prefix + path)).status == 404


@PREFIXES
async def test_a_segment_of_a_path_is_captured_as_it_is_spelled(prefix: str) -> None:
    async with serving() as running, running.client() as client:
        for segment in (b"a", b"a%2Fb", b"%C3%A9", b"%zz", b"state"):
            reply = await client.request("GET", f"{prefix}/named/{segment.decode()}/state")
            assert (reply.status, reply.body) == (200, segment)
            assert running.observed[-1] == ("GET", f"{prefix}/named/{{name}}/state", 200)
        assert (await client.request("GET", f"{prefix}/named/exact/state")).body == b"no name"
        for path in ("/named//state", "/named/a/b/state", "/named/a/state/", "/named/state"):
            assert (await client.request("GET", prefix + path)).status == 404
        reply = await client.request("POST", f"{prefix}/named/a/state")
        assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")


@PREFIXES
async def test_a_failure_a_handler_expects_has_its_status_and_text(prefix: str) -> None:
    async with serving() as running, running.client() as client:
        reply = await client.request("GET", f"{prefix}/missing")
        assert reply.status == 404 and reply.persists()
        assert reply.headers["content-type"] == "application/json"
        assert json.loads(reply.body) == {"error": "no indexer for model=m"}


@PREFIXES
async def test_a_bug_is_logged_and_answered_500_without_details(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as running, running.client() as client:
        reply = await client.request("GET", f"{prefix}/bug")
        assert (reply.status, json.loads(reply.body)) == (500, {"error": "internal error"})
        assert not reply.persists() and await client.read_to_end() == b""
        assert running.front.stats.handler_bugs == 1
        async with running.client() as another:
            assert (await another.request("GET", "/health")).status == 200
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None and "secret" in str(record.exc_info[1])


CONTENT_TYPES = {
    "application/json": 200,
    "application/json; charset=utf-8": 200,
    "Application/JSON;charset=x": 200,
    "application/vnd.kvd+json": 200,
    "application/problem+JSON; a=b": 200,
    "text/plain": 415,
    "text/json": 415,
    "application/jsonp": 415,
    "application/x-www-form-urlencoded": 415,
    "": 415,
}


@PREFIXES
async def test_a_body_must_be_announced_as_json(prefix: str) -> None:
    async with serving() as running, running.client() as client:
        for content_type, status in CONTENT_TYPES.items():
            reply = await client.request("POST", f"{prefix}/echo", b"{}", content_type=content_type)
            assert (content_type, reply.status) == (content_type, status)
            assert status == 200 or "Content-Type" in json.loads(reply.body)["error"]
        await client.send(b"POST %b/echo HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}" % prefix.encode())
        assert (await client.read_reply()).status == 415
        await client.send(b"POST %b/echo HTTP/1.1\r\n\r\n" % prefix.encode())
        assert (await client.read_reply()).status == 200  # without a body no type is needed


@PREFIXES
async def test_the_body_limit_itself_is_accepted(prefix: str) -> None:
    async with serving(linger_s=30.0) as running:  # sending a long body may take long
        async with running.client() as client:
            body = b"x" * QUERY_LIMIT
            reply = await client.request("POST", f"{prefix}/query", body)
            assert reply.body.endswith(b" 8388608")
            reply = await client.request("POST", f"{prefix}/echo", body[:ECHO_LIMIT])
            assert reply.body == body[:ECHO_LIMIT]
        for path, size in (("/query", QUERY_LIMIT + 1), ("/echo", ECHO_LIMIT + 1)):
            async with running.client() as client:
                reply = await client.request("POST", prefix + path, b"x" * size)
                assert (reply.status, reply.persists()) == (413, False)
                assert json.loads(reply.body) == {
                    "error": f"the body is longer than {size - 1} bytes"
                }
        assert running.front.stats.too_large == 2
        assert running.observed[-1] == ("POST", f"{prefix}/echo", 413)


async def test_a_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    async with serving() as running, running.client() as client:
        await client.send(b"POST /echo HTTP/1.1\r\ncontent-length: 1001\r\n\r\n")
        assert (await client.read_reply()).status == 413
        assert await client.read_to_end() == b""


CHUNKED = b"POST /echo HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"


async def test_a_chunked_body_is_read_whole() -> None:
    async with serving() as running, running.client() as client:
        await client.send(CHUNKED + b"\r\n4;x=y\r\nWiki\r\n")
        await client.send(
            b"5\r\npedia\r\n0\r\ntrailer: x\r\n\r\n" + b"GET /health HTTP/1.1\r\n\r\n"
        )
        assert (await client.read_reply()).body == b"Wikipedia"
        assert (await client.read_reply()).status == 200


async def test_a_chunked_body_over_the_limit_is_refused_as_soon_as_it_shows() -> None:
    async with serving() as running, running.client() as client:
        await client.send(CHUNKED + b"\r\n3e8\r\n" + b"x" * 1000 + b"\r\n2\r\ny")
        reply = await client.read_reply()
        assert (reply.status, reply.persists()) == (413, False)


async def test_a_client_that_expects_100_continue_is_asked_for_its_body() -> None:
    async with serving() as running, running.client() as client:
        head = b"POST /echo HTTP/1.1\r\ncontent-type: application/json\r\nexpect: 100-Continue\r\n"
        await client.send(head + b"content-length: 2\r\n\r\n")
        assert (await client.read_reply()).status == 100
        await client.send(b"{}")
        assert (await client.read_reply()).body == b"{}"
        await client.send(head + b"transfer-encoding: chunked\r\n\r\n")
        assert (await client.read_reply()).status == 100
        await client.send(b"1\r\nx\r\n0\r\n\r\n")
        assert (await client.read_reply()).body == b"x"
        await client.send(head + b"content-length: 2\r\n\r\n{}")  # the body is there: no 100
        assert (await client.read_reply()).body == b"{}"
        await client.send(head + b"content-length: 1001\r\n\r\n")
        assert (await client.read_reply()).status == 413
        assert await client.read_to_end() == b""


async def test_another_expectation_fails() -> None:
    async with serving() as running, running.client() as client:
        reply = await client.request("POST", "/echo", b"{}", expect="tea")
        assert (reply.status, reply.persists()) == (417, False)
        assert running.front.stats.expectation_failed == 1


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as running, running.client() as client:
        requests = [b"GET /describe?%d HTTP/1.1\r\n\r\n" % number for number in range(500)]
        requests.insert(100, b"GET /app/describe?app HTTP/1.1\r\n\r\n")
        requests.insert(200, b"\r\n\r\nPOST /echo HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
        await client.send(b"".join(requests))
        for number in range(502):
            reply = await client.read_reply()
            assert reply.status == 200
            if number == 501:
                assert reply.body == b"GET /describe b'499' 0"


async def test_a_request_may_come_byte_by_byte() -> None:
    async with serving() as running, running.client() as client:
        request = b"\r\nPOST /echo?x HTTP/1.1\r\nHost: kvd\r\nempty:\r\ncontent-length: 2\r\n"
        for byte in request + b"content-type: application/json\r\n\r\n{}":
            await client.send(bytes([byte]))
        assert (await client.read_reply()).body == b"{}"


async def test_upgrades_are_declined_by_answering() -> None:
    async with serving() as running, running.client() as client:
        for value in ("h2c", "websocket", "foo/1"):
            for settings in ("A", "AAAA", "AAMAAABkAARAAAAAAAIAAAAA"):
                headers = {"upgrade": value, "connection": "Upgrade", "http2-settings": settings}
                assert (await client.request("GET", "/health", **headers)).status == 200
                assert (await client.request("POST", "/echo", b"{}", **headers)).body == b"{}"
                assert (await client.request("GET", "/app/health", **headers)).status == 200


async def test_persistence_is_what_the_client_asks_for() -> None:
    cases = {
        b"HTTP/1.1\r\n": (None, True),
        b"HTTP/1.1\r\nConnection: Close\r\n": ("close", False),
        b"HTTP/1.1\r\nConnection: foo, close\r\n": ("close", False),
        b"HTTP/1.1\r\nConnection: foo\r\nConnection: close\r\n": ("close", False),
        b"HTTP/1.0\r\n": ("close", False),
        b"HTTP/1.0\r\nConnection: Keep-Alive\r\n": ("keep-alive", True),
    }
    async with serving() as running:
        for path in (b"/describe", b"/app/describe"):
            for lines, (connection, persists) in cases.items():
                async with running.client() as client:
                    await client.send(b"GET %b %b\r\n" % (path, lines))
                    reply = await client.read_reply()
                    assert (reply.status, reply.headers.get("connection")) == (200, connection)
                    if persists:
                        assert (await client.request("GET", "/health")).status == 200
                    else:
                        assert await client.read_to_end() == b""


@PREFIXES
@pytest.mark.parametrize("path", ["/counted", "/counted?a=b", "/counted/later"])
async def test_a_streamed_response_is_chunked_or_ends_with_the_connection(
    prefix: str, path: str
) -> None:
    async with serving() as running, running.client() as client:
        for _ in range(2):
            reply = await client.request("GET", prefix + path)
            assert (reply.headers["transfer-encoding"], reply.body) == ("chunked", b"012")
            assert reply.persists()
        reply = await client.request("HEAD", prefix + path)
        assert (reply.status, reply.headers["content-type"], reply.body) == (200, "text/plain", b"")
        assert (await client.request("GET", "/health")).status == 200
        await client.send(f"GET {prefix}{path} HTTP/1.0\r\n\r\n".encode())
        reply = await client.read_reply()
        assert (reply.headers["connection"], reply.body) == ("close", b"012")
        route = prefix + path.partition("?")[0]
        of_route = [each for each in running.observed if each[1] == route]
        assert of_route == [("GET", route, 200)] * 2 + [("HEAD", route, 200), ("GET", route, 200)]


@PREFIXES
async def test_a_stream_that_fails_is_visibly_cut_off(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as running, running.client() as client:
        with pytest.raises(trio.EndOfChannel):
            await client.request("GET", f"{prefix}/broken")
        assert any(record.exc_info for record in caplog.records)
        await running.until(handler_bugs=1)


@PREFIXES
async def test_a_long_response_waits_for_its_reader(prefix: str) -> None:
    async with serving() as running, running.client() as client:
        reply = await client.request("GET", f"{prefix}/big")
        assert len(reply.body) == len(BIG)


async def test_absolute_targets_are_taken_as_paths() -> None:
    async with serving() as running, running.client() as client:
        for target in ("http://kvd/describe?q", "HTTP://user@kvd:1/describe?q"):
            assert (await client.request("GET", target)).body == b"GET /describe b'q' 0"
        assert (await client.request("GET", "http://kvd")).status == 404
        assert (await client.request("GET", "http://kvd?q")).status == 404


@pytest.mark.parametrize("target", ["http:///describe", "http://?q", "ftp://kvd/describe", "kvd"])
async def test_targets_that_are_no_url_of_a_server_are_refused(target: str) -> None:
    async with serving() as running, running.client() as client:
        assert (await client.request("GET", target)).status == 400


def test_a_table_of_routes_that_cannot_be_served_is_a_mistake() -> None:
    route = Route("GET", "/a", lambda request: Response(200, b""))
    app = build_app((route,), HttpLimits(), ServerContext())
    with pytest.raises(ValueError, match="two routes for GET /a"):
        Front((route, route), app, HttpLimits(), ServerContext())


async def test_a_bug_of_the_server_costs_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as running, running.client() as client, running.client() as other:
        await other.request("GET", "/health")
        running.recorder.requests = Unwilling()
        with pytest.raises(trio.EndOfChannel):
            await client.request("GET", "/health")
        running.recorder.requests = []
        assert running.front.stats.bugs == 1
        running.front.stats.bugs = 0
        assert (await other.request("GET", "/health")).status == 200
        assert any(record.getMessage() == "connection_failed" for record in caplog.records)


async def test_connections_share_the_server_fairly() -> None:
    async with serving() as running, running.client() as greedy, running.client() as modest:
        many = 2000
        await greedy.send(b"GET /health HTTP/1.1\r\n\r\n" * many)
        reply = await modest.request("GET", "/describe")
        assert reply.status == 200
        assert running.front.stats.requests < many  # it did not wait for all of the others
        await _read(greedy, many)


async def _read(client: Client, count: int) -> None:
    for _ in range(count):
        assert (await client.read_reply()).status == 200
