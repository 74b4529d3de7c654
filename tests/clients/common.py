"""What tests of all clients need."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest
import trio

from examples.engine.options import EngineOptions
from tests.support.gateways import Client, Running
from tests.support.processes import Server

Start = Callable[..., Server]
T = TypeVar("T")
THREE = (EngineOptions(), EngineOptions(), EngineOptions())
PROMPT = " ".join(f"w{number}" for number in range(100))


def client_package(name: str) -> Any:
    """Returns a package of the extra `clients`; without it the tests of the module are skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, of what they import
        return pytest.importorskip(name, reason=f"{name} is of the extra `clients`: make clients")


async def work(what: Callable[..., T], *args: Any, **named: Any) -> T:
    """Calls something that blocks."""
    return await trio.to_thread.run_sync(partial(what, *args, **named))


def base_url(client: Client) -> str:
    return str(client.http.base_url).rstrip("/")


def place(headers: Any, running: list[Running]) -> int:
    """Returns which of the engines has answered."""
    return [each.url for each in running].index(headers["x-kvd-endpoint"])
