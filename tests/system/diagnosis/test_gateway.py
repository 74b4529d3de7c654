"""A gateway and its engines: healthy, with one engine away, and with its kvd away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from examples.engine.options import EngineOptions
from tests.support.gateways import Client, gateway_of, serving, wait_heard
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.zmtp_fakes import NOT_MY_FAULT_S

Start = Callable[..., Server]


async def findings(client: Client) -> list[dict[str, Any]]:
    return list((await client.get("/diagnose?probe=1")).json["findings"])


async def finds(client: Client, name: str) -> dict[str, Any]:
    """Waits for a finding and returns it."""
    with trio.fail_after(NOT_MY_FAULT_S):
        while True:
            named = [each for each in await findings(client) if each["name"] == name]
            if named:
                return named[0]
            await trio.sleep(0.02)


async def test_nothing_is_wrong(kvd_process: Start) -> None:
    kinds = EngineOptions(), EngineOptions(kind="sglang"), EngineOptions(events=False)
    async with serving(kvd_process, *kinds) as (client, running):
        for number in range(12):
            text = " ".join(f"w{number}-{word}" for word in range(60))
            assert (await client.chat(text)).status == 200
        await wait_heard(client, running[:2])
        assert await findings(client) == []


async def test_an_engine_is_not_there(kvd_process: Start) -> None:
    nowhere = f"http://127.0.0.1:{find_free_port()}"
    for away in (nowhere, "dns:no-such-name.invalid:8000"):
        async with gateway_of(kvd_process, [away], count=0) as client:
            found = await finds(client, "upstream_unusable")
            assert found["subject"] == f"upstream {away}" and away in found["remedy"]


async def test_there_is_no_engine(kvd_process: Start) -> None:
    servers: list[Server] = []

    def start(*flags: str, face: str) -> Server:
        servers.append(kvd_process(*flags, face=face))
        return servers[0]

    async with gateway_of(start, []) as client:
        assert [each["name"] for each in await findings(client)] == ["upstreams_missing"]
        assert "event=upstreams_missing" in servers[0].stderr


async def test_a_name_leads_to_no_engine(kvd_process: Start) -> None:
    async with gateway_of(kvd_process, ["dns:engines.invalid:8000"], count=0) as client:
        found = await finds(client, "upstream_unusable")
        assert found["subject"] == "upstream dns:engines.invalid:8000"
        assert "engines.invalid" in found["evidence"]


async def test_no_kvd_chooses(kvd_process: Start) -> None:
    away = f"http://127.0.0.1:{find_free_port()}"
    flags = ["--gateway-kvd", away]
    async with gateway_of(kvd_process, [], flags) as client:
        assert (await finds(client, "kvd_unreachable"))["subject"] == f"kvd {away}"
