"""The application for cold requests is loaded only when the first of them comes."""

from __future__ import annotations

import trio

from tests.support.serving import serving


async def test_cold_requests_that_come_first_at_once_are_all_answered() -> None:
    statuses = []

    async def ask() -> None:
        async with running.client() as client:
            statuses.append((await client.request("GET", "/app/health")).status)

    async with serving() as running, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
    assert statuses == [200] * 3
