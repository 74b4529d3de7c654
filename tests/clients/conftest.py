"""A gateway for all tests here: two engines, and a fault when a test wants one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from examples.engine.options import EngineOptions
from tests.support.gateways import Client, Running, serving
from tests.support.processes import Server


class Gateway:
    """What clients need to know of the gateway, and what tests do to its engines."""

    def __init__(self, client: Client, engines: list[Running]) -> None:
        self.client = client
        self.engines = engines

    @property
    def url(self) -> str:
        return str(self.client.http.base_url).rstrip("/")

    @property
    def requests(self) -> int:
        return sum(each.server.requests for each in self.engines)


@pytest.fixture
async def gateway(kvd_process: Callable[..., Server]) -> AsyncIterator[Gateway]:
    async with serving(kvd_process, EngineOptions(), EngineOptions()) as (client, engines):
        yield Gateway(client, engines)
