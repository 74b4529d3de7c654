"""The access log has a line for each request, however it is served, and repeats no secrets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.http.access import AccessLog, echoed, rendered
from tests.support.loglines import logged
from tests.support.serving import ECHO_LIMIT, HASTY, SOON, Client, serving

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
SECRET = "hunter2"

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Yields the lines of the access log, without members that differ from run to run."""
    with ExitStack() as stack:
        written = stack.enter_context(logged("error", "json"))

        def found() -> list[dict[str, Any]]:
            assert SECRET not in written()
            rows = [json.loads(line) for line in written().splitlines()]
            rows = [row for row in rows if row["logger"] == "kvd.access"]
            for row in rows:
                assert row.pop("ts") and row.pop("duration_ms") >= 0
                assert row.pop("level") == "info" and row.pop("event") == "request"
                assert row.pop("logger") == "kvd.access"
            return rows

        yield found


def turned_on(face: str = "test") -> AccessLog:
    access = AccessLog(face)
    access.enabled = True
    return access


@pytest.mark.parametrize(
    ("method", "path", "label", "status"),
    [
        ("POST", "/query?token=hunter2", "/query", 200),  # a hot handler, on the fast path
        ("GET", "/named/hunter2/state", "/named/{name}/state", 200),
        ("GET", "/waiting?1", "/waiting", 200),  # an asynchronous handler
        ("GET", "/app/describe", "/app/describe", 200),  # through the application
        ("GET", "/counted", "/counted", 200),  # answered in chunks
        ("HEAD", "/describe", "/describe", 200),
        ("GET", "/missing", "/missing", 404),
        ("GET", "/bug", "/bug", 500),
        ("GET", "/nowhere/hunter2", "-", 404),
        ("DELETE", "/query", "/query", 405),
        ("GET", "/broken", "/broken", 200),
    ],
)
async def test_each_request_is_a_line_and_carries_its_id_back(
    lines: Lines, method: str, path: str, label: str, status: int
) -> None:
    size = len(b"begun")
    async with serving(access=turned_on()) as running, running.client() as client:
        sent = method, path, b"{}" if method == "POST" else b""
        ids = {"traceparent": PARENT, "x_request_id": "r-1", "authorization": SECRET}
        if path == "/broken":
            with pytest.raises(Exception):  # noqa: B017 the answer breaks off
                await client.request(*sent, **ids)
        else:
            reply = await client.request(*sent, **ids)
            assert reply.status == status
            assert reply.headers["x-request-id"] == "r-1"
            size = len(reply.body)
        await running.until(connections_total=1)
    (row,) = lines()
    assert row == {
        "face": "test",
        "method": method,
        "path": label,
        "status": status,
        "bytes": size,
        "trace_id": TRACE,
        "request_id": "r-1",
    }


async def test_a_refused_body_is_a_line(lines: Lines) -> None:
    async with serving(access=turned_on()) as running:
        for path in ("/echo", "/app/echo"):
            async with running.client() as client:
                body = b"x" * (ECHO_LIMIT + 1)
                refused = await client.request("POST", path, body)
                assert refused.status == 413
            assert lines()[-1] == {
                "face": "test",
                "method": "POST",
                "path": path,
                "status": 413,
                "bytes": len(refused.body),
            }


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"hunter2\r\n\r\n", 400),
        (b"GET /hunter2 HTTP/1.1\r\nhost: a b\r\n\r\n", 400),
        (b"GET /%b HTTP/1.1\r\nhost: kvd\r\n\r\n" % (b"a" * 20_000), 431),
    ],
)
async def test_a_refused_head_is_a_line(lines: Lines, head: bytes, status: int) -> None:
    async with serving(access=turned_on()) as running, running.client() as client:
        await client.send(head)
        refused = await client.read_reply()
    (row,) = lines()
    assert row == line_of_no_head(status, len(refused.body))


async def test_a_slow_head_is_a_line(lines: Lines) -> None:
    async with serving(access=turned_on()) as running, running.client() as client:
        await client.request("GET", "/describe")
        running.front.set_limits(HASTY)
        await client.send(b"GET /hunter2 HTTP/1.1\r\n")
        refused = await client.read_reply()
    assert lines()[1:] == [line_of_no_head(408, len(refused.body))]


def line_of_no_head(status: int, size: int) -> dict[str, Any]:
    return {"face": "test", "method": "-", "path": "-", "status": status, "bytes": size}


async def test_a_handler_that_takes_too_long_is_a_line(lines: Lines) -> None:
    async with serving(handler_s=SOON, access=turned_on()) as running:
        for path in ("/waiting", "/slow"):
            async with running.client() as client:
                late = await client.request("GET", f"{path}?60000")
                assert late.status == 503
            (row,) = (row for row in lines() if row["path"] == path)
            assert (row["status"], row["bytes"]) == (503, len(late.body))


async def test_a_client_that_leaves_before_its_answer_is_a_line(lines: Lines) -> None:
    async with serving(access=turned_on()) as running:
        async with running.client() as client:
            await client.send(b"GET /waiting?60000 HTTP/1.1\r\nhost: kvd\r\n\r\n")
            await running.until(connections_waiting=1)
        await running.until_empty()
    (row,) = lines()
    assert (row["path"], row["status"], row["bytes"]) == ("/waiting", 0, 0)


async def test_without_it_there_is_no_line_and_no_id(lines: Lines) -> None:
    async with serving(access=AccessLog("test")) as running, running.client() as client:
        for path in ("/describe", "/app/describe"):
            reply = await client.request("GET", path, x_request_id="r-1")
            assert reply.status == 200 and "x-request-id" not in reply.headers
    assert lines() == []


async def ask(client: Client, **headers: str) -> None:
    assert (await client.request("GET", "/describe", **headers)).status == 200


@pytest.mark.parametrize(
    ("parent", "trace"),
    [
        (PARENT, TRACE),
        (f"cc-{TRACE}-00f067aa0ba902b7-01-what-comes-later", TRACE),
        (f"{PARENT}-more", None),  # version 00 has no further fields
        (PARENT.upper(), None),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", None),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE}-00f067aa0ba902b7", None),
        ("x" * 55, None),
    ],
)
async def test_a_trace_counts_in_its_proper_form_only(
    lines: Lines, parent: str, trace: str | None
) -> None:
    async with serving(access=turned_on()) as running, running.client() as client:
        await ask(client, traceparent=parent)
    assert lines()[0].get("trace_id") == trace


@given(st.binary(max_size=140))
def test_no_id_adds_a_header_or_more_than_itself(value: bytes) -> None:
    headers = [(b"host", b"kvd"), (b"x-request-id", value)]
    line = rendered(echoed(headers))
    if echoed(headers):
        assert line == b"x-request-id: " + value + b"\r\n"
        assert 1 <= len(value) <= 128 and not set(value) & set(b' \r\n\0"')
    else:
        assert line == b""
