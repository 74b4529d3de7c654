"""The application is plain ASGI: under hypercorn it answers as it does behind the front."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

import pytest
import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from hypercorn.typing import ASGIFramework

from kvd.http.app import build_app
from kvd.http.auth import Authorizer
from kvd.http.context import ServerContext
from tests.support.serving import ECHO_LIMIT, PATIENT, PUBLIC, ROUTES, Client, serving


@asynccontextmanager
async def under_hypercorn() -> AsyncIterator[Client]:
    """Runs the application of `serving` under hypercorn and connects a client to it."""
    app = build_app(ROUTES, PATIENT, ServerContext(Authorizer(PUBLIC)))
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.accesslog = config.errorlog = None
    async with trio.open_nursery() as nursery:
        stop = trio.Event()
        urls = await nursery.start(
            lambda task_status: serve(
                cast("ASGIFramework", app),
                config,
                shutdown_trigger=stop.wait,
                task_status=task_status,
            )
        )
        address = urlsplit(urls[0])
        async with await trio.open_tcp_stream(address.hostname, address.port) as stream:
            yield Client(stream)
        stop.set()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/app/describe?a=%20b&&c", b""),
        ("POST", "/app/query", b"{}"),
        ("POST", "/app/echo", b"\0\xff" * 100),
        ("POST", "/app/echo", b"x" * (ECHO_LIMIT + 1)),
        ("GET", "/app/named/a%2Fb/state", b""),
        ("GET", "/app/named/exact/state", b""),
        ("GET", "/counted", b""),
        ("GET", "/app/health", b""),
        ("GET", "/app/missing", b""),
        ("GET", "/app/bug", b""),
        ("GET", "/nowhere", b""),
        ("PATCH", "/app/echo", b""),
        ("GET", "/gone/a", b""),
    ],
)
async def test_answers_are_those_of_the_front(method: str, path: str, body: bytes) -> None:
    async with serving() as running, running.client() as client:
        here = await client.request(method, path, body)
    async with under_hypercorn() as client:
        there = await client.request(method, path, body)
    assert (there.status, there.body) == (here.status, here.body)
    for name in ("content-type", "allow", "x-kvd"):
        assert there.headers.get(name) == here.headers.get(name)
