"""Engines behind TLS: certificates of both sides, and that answers are the same as without TLS.

test_gateway_fault_matrix has faults behind TLS, and test_gateway and test_gateway_engines have
clients and engines that leave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from examples.engine.options import EngineOptions
from tests.support.asking import make_client_certificates
from tests.support.gateways import (
    Client,
    engines,
    gateway_of,
    serving,
    tls_of,
    trusting,
    wait_serving,
)
from tests.support.processes import Server
from tests.support.zmtp_fakes import NOT_MY_FAULT_S

Start = Callable[..., Server]
LONG = " ".join(f"w{number}" for number in range(100))


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two clients' certificates, and the authority that has signed one of them."""
    folder = tmp_path_factory.mktemp("clients")
    make_client_certificates(folder, "gateway", "stranger")
    return folder


def showing(clients: Path, name: str) -> tuple[str, ...]:
    pem, key = f"{clients}/{name}.pem", f"{clients}/{name}.key"
    return "--upstream-tls-certfile", pem, "--upstream-tls-keyfile", key


async def problem_of(client: Client, url: str) -> str:
    """Returns why an engine is not used, once that is known."""
    with trio.fail_after(NOT_MY_FAULT_S):
        while True:
            shown = (await client.get("/status")).json["upstreams"]
            [row] = [each for each in shown if each["url"] == url]
            if row["problem"] is not None:
                return str(row["problem"])
            await trio.sleep(0.02)


async def test_answers_are_those_of_an_engine_without_tls(
    kvd_process: Start, certificate: Path
) -> None:
    """Tokens, events, usage and decisions; a follow-up turn goes where its prompt is cached."""
    both, tls = (EngineOptions(), EngineOptions()), tls_of(certificate)
    flags = trusting(certificate)
    async with serving(kvd_process, *both, flags=flags, tls=tls) as (client, running):
        first = await client.chat(LONG, stream=True)
        assert (first.status, first.clean, first.events[-1]) == (200, True, "[DONE]")
        assert first.headers["x-kvd-tokens"] == "tokenize"
        for _ in range(3):
            again = await client.chat(LONG, "more")
            assert again.headers["x-kvd-endpoint"] == first.headers["x-kvd-endpoint"]
            assert again.headers["x-kvd-tokens"] == "memory"
        assert sorted(each.server.requests for each in running) == [0, 4]
        metrics = await client.metrics()
        assert metrics['kvd_gateway_relayed_requests_total{outcome="complete"}'] == 4
        embedded = await client.post("/v1/embeddings", {"model": "demo", "input": "x"})
        assert embedded.status == 200


async def test_an_engine_that_comes_back_serves_again(
    kvd_process: Start, certificate: Path
) -> None:
    """No client notices: while one engine is away, the other answers."""
    both, tls = (EngineOptions(), EngineOptions()), tls_of(certificate)
    flags = trusting(certificate)
    async with serving(kvd_process, *both, flags=flags, tls=tls) as (client, running):
        for one in running:
            one.end()
            assert [(await client.chat(LONG)).status for _ in range(4)] == [200] * 4
            await one.start()
            await wait_serving(client, 2)


async def test_only_a_valid_certificate_is_believed(
    kvd_process: Start, certificate: Path, clients: Path
) -> None:
    async with engines(EngineOptions(), tls=tls_of(certificate)) as (one,):
        for flags, why in (
            ((), "TLS: its certificate is not valid: self-signed certificate"),
            (("--upstream-tls-ca", str(clients / "ca.pem")), "TLS: its certificate is not valid"),
            (
                (*trusting(certificate), "--upstream-tls-server-name", "another.example"),
                "TLS: its certificate is not valid: Hostname mismatch",
            ),
        ):
            async with gateway_of(kvd_process, [one.url], flags, count=0) as client:
                assert (await problem_of(client, one.url)).startswith(why)
        assert one.server.requests == 0
        async with gateway_of(
            kvd_process, [one.url], ("--upstream-tls-insecure", "true")
        ) as client:
            assert (await client.chat(LONG)).status == 200


async def test_a_server_without_tls_is_no_engine(kvd_process: Start) -> None:
    async def refuse(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, refuse, 0, host="127.0.0.1"))
        url = f"https://127.0.0.1:{listener.socket.getsockname()[1]}"
        async with gateway_of(kvd_process, [url], count=0) as client:
            assert (await problem_of(client, url)).startswith("TLS: ")
        nursery.cancel_scope.cancel()


async def test_an_engine_is_shown_the_gateways_certificate(
    kvd_process: Start, certificate: Path, clients: Path
) -> None:
    trust = trusting(certificate)
    async with engines(EngineOptions(), tls=tls_of(certificate, clients / "ca.pem")) as (one,):
        async with gateway_of(
            kvd_process, [one.url], (*trust, *showing(clients, "gateway"))
        ) as client:
            assert (await client.chat(LONG)).status == 200
        for flags in (trust, (*trust, *showing(clients, "stranger"))):
            async with gateway_of(kvd_process, [one.url], flags, count=0) as client:
                assert await problem_of(client, one.url)
        assert one.server.requests == 1
