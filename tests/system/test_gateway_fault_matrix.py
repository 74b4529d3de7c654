"""The fault matrix: exactly how many requests fail. None fails whose client has no byte yet.

Each request of a row meets its fault once, at the engine that is asked first. Engines that are
killed, stopped or started again are in test_gateway_faults.
"""

from __future__ import annotations

import ssl
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from examples.engine.options import EngineOptions, Fault
from tests.support.gateways import (
    Client,
    engines,
    gateway_of,
    outcome,
    serving,
    tls_of,
    wait_serving,
)
from tests.support.processes import Server
from tests.support.zmtp_fakes import until

Start = Callable[..., Server]
REQUESTS = 6
ANSWER, STREAM = False, True
BROKEN = 'kvd_gateway_relayed_requests_total{outcome="broken"}'


class Row(NamedTuple):
    """A fault, and the outcome of each request that meets it."""

    fault: Fault
    stream: bool
    outcome: str
    asked: int  # engines per request

    @property
    def name(self) -> str:
        return f"{self.fault}-{'stream' if self.stream else 'answer'}"


ROWS = (
    # Nothing has reached the client, so another engine answers.
    Row(Fault.CLOSE, ANSWER, "whole", 2),
    Row(Fault.CLOSE, STREAM, "whole", 2),
    Row(Fault.HALF_CLOSED, ANSWER, "whole", 2),
    Row(Fault.HALF_CLOSED, STREAM, "whole", 2),
    Row(Fault.AFTER_HEAD, ANSWER, "whole", 2),
    Row(Fault.AFTER_HEAD, STREAM, "whole", 2),
    Row(Fault.EMPTY, STREAM, "whole", 2),
    Row(Fault.AFTER_EVENT, ANSWER, "whole", 2),  # the gateway holds a body until it is whole
    Row(Fault.GARBAGE, ANSWER, "whole", 2),
    Row(Fault.GARBAGE, STREAM, "whole", 2),
    Row(Fault.LONG_HEAD, ANSWER, "whole", 2),
    Row(Fault.LONG_HEAD, STREAM, "whole", 2),
    Row(Fault.ERROR_EVENT, STREAM, "whole", 2),
    Row(Fault.REFUSE_429, ANSWER, "whole", 2),
    Row(Fault.REFUSE_429, STREAM, "whole", 2),
    Row(Fault.REFUSE_503, ANSWER, "whole", 2),
    Row(Fault.REFUSE_503, STREAM, "whole", 2),
    Row(Fault.ABORTS, ANSWER, "whole", 2),
    # The whole answer has come.
    Row(Fault.BYTES, ANSWER, "whole", 1),
    Row(Fault.BYTES, STREAM, "whole", 1),
    Row(Fault.AFTER_DONE, STREAM, "whole", 1),
    # The client has received a part.
    Row(Fault.AFTER_EVENT, STREAM, "cut", 1),
    Row(Fault.IN_EVENT, STREAM, "cut", 1),
    Row(Fault.UNMARKED, STREAM, "cut", 1),
    # The prompt may be the cause, so no other engine is asked.
    Row(Fault.REFUSE_500, ANSWER, "500", 1),
    Row(Fault.REFUSE_500, STREAM, "500", 1),
)


UNDER_WAY = (Fault.AFTER_HEAD, Fault.AFTER_EVENT, Fault.IN_EVENT, Fault.AFTER_DONE, Fault.BYTES)


async def ask(client: Client, number: int, *, stream: bool) -> str:
    """Sends a new prompt, as token ids; returns the outcome."""
    ids = [number * 100 + at for at in range(64)]
    body = {"model": "demo", "prompt": ids, "max_tokens": 4, "stream": stream}
    return outcome(await client.post("/v1/completions", body), stream=stream)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_requests_that_meet_a_fault(kvd_process: Start, row: Row) -> None:
    await meet(kvd_process, row)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_requests_that_meet_a_fault_behind_tls(
    kvd_process: Start, certificate: Path, row: Row
) -> None:
    flags = ("--upstream-tls-ca", str(certificate / "cert.pem"))
    await meet(kvd_process, row, flags, tls_of(certificate))


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.stream and row.fault in UNDER_WAY],
    ids=lambda row: row.name,
)
async def test_streams_that_end_with_their_connection(kvd_process: Start, row: Row) -> None:
    """By the last event of a stream, the gateway tells a whole answer from an engine's death."""
    await meet(kvd_process, row, chunks=False)


async def meet(
    start: Start,
    row: Row,
    flags: Sequence[str] = (),
    tls: ssl.SSLContext | None = None,
    *,
    chunks: bool = True,
) -> None:
    faults: deque[Fault] = deque()
    engine = EngineOptions(faults=faults, chunks=chunks)
    both = engine, engine
    async with serving(start, *both, flags=flags, tls=tls) as (client, running):
        met: Counter[str] = Counter()
        for number in range(REQUESTS):
            faults.append(row.fault)
            met[await ask(client, number, stream=row.stream)] += 1
            assert not faults
            await wait_serving(client, 2)  # the engine that failed is probed
        assert met == {row.outcome: REQUESTS}
        assert sum(each.server.requests for each in running) == REQUESTS * row.asked
        broken = (await client.metrics()).get(BROKEN, 0)
        assert broken == (REQUESTS if row.outcome == "cut" else 0)


async def test_requests_that_meet_silence(kvd_process: Start) -> None:
    """The silent engine may still work on a request, so none is sent to another one."""
    faults = deque([Fault.SILENCE] * REQUESTS)
    both = EngineOptions(faults=faults), EngineOptions(faults=faults)
    flags = ("--gateway-silence-s", "1")
    async with serving(kvd_process, *both, flags=flags) as (client, running):
        met: Counter[str] = Counter()

        async def note(number: int, *, stream: bool) -> None:
            met[await ask(client, number, stream=stream)] += 1

        async with trio.open_nursery() as nursery:
            for number in range(REQUESTS):
                nursery.start_soon(partial(note, number, stream=bool(number % 2)))
        assert met == {"504": REQUESTS}
        assert sum(each.server.requests for each in running) == REQUESTS
        assert await ask(client, REQUESTS, stream=False) == "whole"


async def test_requests_of_engines_that_come_and_go(kvd_process: Start) -> None:
    """Like addresses of a name. Running requests end at their engine, new ones go elsewhere."""
    three = [EngineOptions(step_s=0.002) for _ in range(3)]
    async with engines(*three) as running, gateway_of(kvd_process, [running[0].url]) as client:
        met: Counter[str] = Counter()
        numbers, goes_on = count(), True

        async def load() -> None:
            while goes_on:
                number = next(numbers)
                met[await ask(client, number, stream=bool(number % 2))] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(load)
            for each in running[1:] * 3:
                added = await client.post("/upstreams", {"url": each.url})
                await wait_serving(client, 2)
                before = each.server.requests
                await until(lambda: each.server.requests > before + 8)  # noqa: B023 - awaited here
                left = await client.http.delete(f"/upstreams/{added.json['worker_id']}")
                assert (added.status, left.status_code) == (201, 200)
            goes_on = False
        assert met == {"whole": next(numbers)}
