"""A gateway for the tests here, with two simulated engines that can have faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from examples.engine.options import EngineOptions
from tests.support.gateways import Client, Running, serving
from tests.support.processes import Server


class Gateway:
    """The URL of a gateway, its engines, and the clients that tests open."""

    def __init__(self, client: Client, engines: list[Running]) -> None:
        self.client = client
        self.engines = engines
        self._opened: list[Any] = []

    def opened(self, client: Any) -> Any:
        """Returns a library's client, which is closed when the test is over."""
        self._opened.append(client)
        return client

    def close(self) -> None:
        for client in self._opened:
            client.close()

    @property
    def url(self) -> str:
        return str(self.client.http.base_url).rstrip("/")

    @property
    def requests(self) -> int:
        return sum(each.server.requests for each in self.engines)


@pytest.fixture
async def gateway(kvd_process: Callable[..., Server]) -> AsyncIterator[Gateway]:
    async with serving(kvd_process, EngineOptions(), EngineOptions()) as (client, engines):
        opened = Gateway(client, engines)
        yield opened
        opened.close()
