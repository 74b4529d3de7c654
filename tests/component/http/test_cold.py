"""The application for cold requests is loaded only when the first of them comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from kvd.http.asgi import AsgiExchange
from tests.support.collecting import freed_at_once
from tests.support.serving import Running, serving


async def test_cold_requests_that_come_first_at_once_are_all_answered() -> None:
    statuses = []

    async def ask() -> None:
        async with running.client() as client:
            statuses.append((await client.request("GET", "/app/health")).status)

    async with serving() as running, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
    assert statuses == [200] * 3


@asynccontextmanager
async def loaded() -> AsyncIterator[Running]:
    """Yields a server that has loaded the application, and keeps nothing else of a request."""
    async with serving() as running:
        async with running.client() as client:
            assert (await client.request("GET", "/app/health")).status == 200
        await running.until_empty()
        with freed_at_once(AsgiExchange):
            yield running
            await running.until_empty()


async def test_a_request_for_no_route_needs_no_collector_to_go() -> None:
    """Anybody can send such requests."""
    async with loaded() as running, running.client() as client:
        for method, path, status in (("GET", "/none", 404), ("DELETE", "/app/echo", 405)):
            assert (await client.request(method, path)).status == status


async def test_a_client_that_left_a_cold_request_needs_no_collector_to_go() -> None:
    async with loaded() as running, running.narrow_client() as client:
        await client.send(b"GET /app/big HTTP/1.1\r\nhost: kvd\r\n\r\n")
        await running.until(requests_app=2)
        client.reset()
