"""Counts exactly how many requests fail while the engines change.

Each engine has its own address, all at one port. A resolver determines which of them are behind a
name, or a fleet file lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import httpx
import pytest
import trio

from examples.engine.options import EngineOptions
from kvd.fleet_file.follower import FleetFileFollower
from kvd.fleet_file.targets import UpstreamTarget
from kvd.gateway.dns_names import Wanted
from kvd.gateway.tunnels import UpstreamTls
from kvd.gateway.upstreams import SETTINGS
from kvd.net.dialing import Dialer
from kvd.wire.egress import EgressPolicy
from tests.support.asking import make_certificate
from tests.support.gateways import Client, Running, engines, outcome, tls_of
from tests.support.inner_gateways import InnerGateway, inner_gateway
from tests.support.resolving import Names
from tests.support.zmtp_fakes import until

NAME = "vllm.test"
LOADS = 6  # clients that send one request after the other
LOOKUP_S, LOOKUP_EVERY_S = 0.05, 0.02
NO_ANSWER_S = 3600.0  # seconds


class Fleet:
    """Engines behind a name, a gateway that follows it, and a client."""

    def __init__(
        self,
        names: Names,
        wanted: Wanted,
        running: list[Running],
        inner: InnerGateway,
        client: Client,
    ) -> None:
        self.wanted = wanted
        self.running = running
        self.inner = inner
        self.client = client
        self.met: Counter[str] = Counter()  # outcomes of requests
        self._names = names
        self._numbers = count()
        self._asks = True

    def point(self, *engines: Running) -> None:
        """Makes the name resolve to these engines."""
        self._names.known[NAME] = [one.host for one in engines]

    async def mean(self, *engines: Running) -> None:
        """Makes the name resolve to these engines, and waits until they alone serve."""
        self.point(*engines)
        await self.inner.until_serving(*(one.url for one in engines))

    async def fail(self, seconds: float | None = None) -> None:
        """Makes some lookups fail: the name is unknown, or no answer comes for so many seconds."""
        if seconds is None:
            del self._names.known[NAME]
        else:
            self._names.known[NAME] = seconds
        before = self._names.asked
        await until(lambda: self._names.asked > before + 3)

    async def ask(self, *, stream: bool = False) -> str:
        """Sends a prompt that was not sent before; returns the outcome."""
        first = next(self._numbers) * 100
        body = {"model": "demo", "prompt": [*range(first, first + 64)], "max_tokens": 4}
        answered = await self.client.post("/v1/completions", {**body, "stream": stream})
        return outcome(answered, stream=stream)

    async def load(self, streams: bool) -> None:
        """Sends requests until `stop`."""
        while self._asks:
            self.met[await self.ask(stream=streams)] += 1

    def stop(self) -> None:
        self._asks = False

    async def go_on(self) -> None:
        """Waits until each client has got an answer from now on."""
        before = self.met.total()
        await until(lambda: self.met.total() > before + 2 * LOADS)

    @asynccontextmanager
    async def streams(self, number: int) -> AsyncIterator[Counter[str]]:
        """Begins so many streams, and at the end counts their outcomes."""
        begun: list[None] = []
        ends: Counter[str] = Counter()

        async def stream() -> None:
            body = {"model": "demo", "prompt": [1], "max_tokens": 200, "stream": True}
            received = b""
            async with self.client.http.stream("POST", "/v1/completions", json=body) as response:
                try:
                    async for piece in response.aiter_raw():
                        if not received:
                            begun.append(None)
                        received += piece
                    ends[
                        "whole" if received.endswith(b"data: [DONE]\n\n") else "quietly short"
                    ] += 1
                except httpx.RemoteProtocolError:
                    ends["cut"] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(number):
                nursery.start_soon(stream)
            await until(lambda: len(begun) == number)
            yield ends


@asynccontextmanager
async def fleet(*options: EngineOptions, certificate: Path | None = None) -> AsyncIterator[Fleet]:
    """Yields engines, the first one behind the name, with TLS if there is a certificate."""
    names = Names()
    tls = None if certificate is None else tls_of(certificate)
    trust = None if certificate is None else UpstreamTls(ca_file=certificate / "cert.pem")
    scheme = "" if certificate is None else "https://"
    trio.socket.set_custom_hostname_resolver(names)
    dialer = Dialer(lookup_s=LOOKUP_S, lookup_every_s=LOOKUP_EVERY_S)
    async with engines(*options, tls=tls, side_by_side=True) as running:
        names.known[NAME] = [running[0].host]
        wanted = Wanted(f"dns:{scheme}{NAME}:{running[0].port}")
        async with inner_gateway(wanted, dialer=dialer, tls=trust) as inner:
            host, port = inner.running.address
            async with httpx.AsyncClient(
                base_url=f"http://{host}:{port}", trust_env=False, verify=False, timeout=60
            ) as http:
                await inner.until_serving(running[0].url)
                yield Fleet(names, wanted, running, inner, Client(http))


def quiet(**options: float) -> EngineOptions:
    return EngineOptions(events=False, **options)  # type: ignore[arg-type]


async def test_no_request_fails_while_addresses_come_and_go() -> None:
    """Streams and plain answers: an engine that has left the name finishes what it has begun."""
    async with fleet(*(quiet(step_s=0.002) for _ in range(3))) as here:
        first, second, third = here.running
        async with trio.open_nursery() as nursery:
            for number in range(LOADS):
                nursery.start_soon(here.load, bool(number % 2))
            await here.go_on()
            await here.mean(first, second)
            await until(lambda: second.server.requests)
            await here.mean(second)
            await here.go_on()
            await here.fail()  # NXDOMAIN
            await here.go_on()
            await here.fail(NO_ANSWER_S)
            await here.go_on()
            assert here.inner.serving() == {second.url}
            await here.mean(third)  # replaces all engines at once
            await here.go_on()
            await here.mean(first, second, third)
            await here.go_on()
            here.stop()
        assert here.met == {"whole": here.met.total()}
        assert here.inner.stats.retries.total() == 0


async def test_no_request_fails_while_a_fleet_file_replaces_all_engines(tmp_path: Path) -> None:
    """The old ones serve until the new ones do, although one new engine never answers probes."""
    async with fleet(*(quiet(step_s=0.002) for _ in range(4))) as here:
        by_name, first, second, third = here.running
        path = tmp_path / "fleet.toml"
        targets = {"upstream": UpstreamTarget(here.inner.upstreams)}
        file = FleetFileFollower(path, EgressPolicy(), targets)

        async def list_engines(*engines: Running) -> None:
            path.write_text("".join(f'[[upstream]]\nurl = "{one.url}"\n' for one in engines))
            await file.read()

        await list_engines(first)
        await here.inner.until_serving(by_name.url, first.url)
        here.inner.upstreams.unwant(here.wanted, SETTINGS)
        assert here.inner.serving() == {first.url}
        async with trio.open_nursery() as nursery:
            for number in range(LOADS):
                nursery.start_soon(here.load, bool(number % 2))
            await here.go_on()
            await list_engines(second)
            assert here.inner.serving() == {second.url}
            await here.go_on()
            first.end()
            await list_engines(first, third)
            assert here.inner.serving() == {third.url}
            await here.go_on()
            here.stop()
        assert here.met == {"whole": here.met.total()}
        assert here.inner.stats.retries.total() == 0


async def test_no_answer_fails_whose_engine_dies_as_its_address_goes() -> None:
    """An answer is held until it is whole, so another engine can answer instead."""
    async with fleet(*(quiet(step_s=0.002) for _ in range(3))) as here:
        await here.mean(*here.running)
        async with trio.open_nursery() as nursery:
            for _ in range(LOADS):
                nursery.start_soon(here.load, False)
            await here.go_on()
            for one in here.running:
                others = [other for other in here.running if other is not one]
                one.end()
                await here.mean(*others)
                await here.go_on()
                await one.start()
                await here.mean(*here.running)
            here.stop()
        assert here.met == {"whole": here.met.total()}


async def test_streams_of_an_address_that_has_gone_end_whole() -> None:
    async with fleet(quiet(step_s=0.005), quiet()) as here:
        async with here.streams(4) as ends:
            await here.mean(here.running[1])
            assert [await here.ask() for _ in range(4)] == ["whole"] * 4
        assert ends == {"whole": 4}
        assert [one.server.requests for one in here.running] == [4, 4]


async def test_streams_of_an_engine_that_dies_are_cut_and_nothing_else() -> None:
    async with fleet(quiet(step_s=0.01), quiet()) as here:
        async with here.streams(4) as ends:
            here.running[0].end()
            await here.mean(here.running[1])
            assert [await here.ask() for _ in range(4)] == ["whole"] * 4
        assert ends == {"cut": 4}


async def test_a_name_without_engines_is_followed_on() -> None:
    """All engines and their name vanish; then the name comes back with another engine."""
    async with fleet(quiet(), quiet()) as here:
        first, second = here.running
        first.end()
        await here.fail()
        assert {await here.ask() for _ in range(4)} <= {"502", "503"}
        assert await here.ask() == "503"
        await here.mean(second)
        assert [await here.ask() for _ in range(4)] == ["whole"] * 4


async def test_addresses_of_a_name_behind_tls(tmp_path: Path) -> None:
    """Engines' certificates must be for the name; one for an address is not enough."""
    make_certificate(tmp_path, f"DNS:{NAME}")
    async with fleet(quiet(), quiet(), certificate=tmp_path) as here:
        _, second = here.running
        assert [await here.ask(stream=bool(number % 2)) for number in range(4)] == ["whole"] * 4
        await here.mean(second)
        assert await here.ask() == "whole"
        assert [one.server.requests for one in here.running] == [4, 1]


async def test_an_entry_of_a_fleet_file_that_is_written_otherwise(tmp_path: Path) -> None:
    """With another spelling it is the same engine, with TLS another one."""
    path = tmp_path / "fleet.toml"
    async with inner_gateway() as inner:
        targets = {"upstream": UpstreamTarget(inner.upstreams)}
        file = FleetFileFollower(path, EgressPolicy(), targets)
        for url in ("http://A.test:9", "http://a.test:9/", "https://a.test:9", "http://a.test:9"):
            path.write_text(f'[[upstream]]\nurl = "{url}"\n')
            await file.read()
            assert [one.url for one in inner.upstreams] == [url]


async def test_engines_of_a_fleet_file_change_places_where_there_is_room_for_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former ones stay until the new ones can serve, and take up the room of some."""
    monkeypatch.setattr("kvd.gateway.upstreams.MAX_UPSTREAMS", 3)
    path = tmp_path / "fleet.toml"
    async with inner_gateway() as inner:
        targets = {"upstream": UpstreamTarget(inner.upstreams)}
        file = FleetFileFollower(path, EgressPolicy(), targets)
        for urls in (
            ["http://a.test:1", "http://a.test:2"],
            ["http://b.test:1", "http://b.test:2"],
        ):
            path.write_text("".join(f'[[upstream]]\nurl = "{url}"\n' for url in urls))
            await file.read()
            assert [one.url for one in inner.upstreams] == urls
            assert all(file.held(*entry) is not None for entry in file._entries)
