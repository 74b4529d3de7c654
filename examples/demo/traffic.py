"""Has simulated engines serve conversations behind a daemon, and shows how well it answers."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import TextIO
from urllib.parse import urlsplit

import trio
import zmq

from examples.demo.client import Client, HungUp
from examples.demo.display import LiveLine, Totals, Traffic, introduction, live_text, parse_totals
from examples.demo.engines import BLOCK_SIZE, Publisher, SglangEngine, VllmEngine
from examples.demo.fleet import Fleet, Worker, question

VLLM_BLOCKS = 192  # device blocks; too few for all live conversations, so that blocks are evicted
SGLANG_BLOCKS = 96
SGLANG_HOST_BLOCKS = 160
WARM_UP_TURNS = 24  # enough for every system prompt to be cached somewhere
SAMPLE_TOKENS = 5 * BLOCK_SIZE  # a whole system prompt and more, yet short enough to paste
FAREWELL_S = 1.0  # at most this long the engines try to unregister at the end
SEED = 1  # the same conversations at every start


async def run_traffic(base_url: str, out: TextIO = sys.stdout) -> str:
    """Runs until cancelled; returns only if the daemon refuses an engine, with what it says.

    `base_url` is that of the daemon's KV indexer. Cancel it before the daemon stops answering.
    """
    async with simulated_fleet(base_url) as (fleet, workers):
        if (refusal := await fleet.register()) is not None:
            return refusal
        start = await read_totals(base_url), trio.current_time()
        for _ in range(WARM_UP_TURNS):
            await fleet.turn()
        sample = fleet.latest_tokens[:SAMPLE_TOKENS]
        answer = await fleet.ask(sample)
        out.write(introduction(base_url, list(map(str, workers)), question(sample), answer))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(show_live, base_url, fleet.traffic, start, LiveLine(out))
            while True:
                await fleet.turn()


@asynccontextmanager
async def simulated_fleet(base_url: str) -> AsyncIterator[tuple[Fleet, list[Worker]]]:
    """Opens the engines' sockets and a connection to the daemon; unregisters them at the end."""
    engines = [VllmEngine(VLLM_BLOCKS), SglangEngine(SGLANG_BLOCKS, SGLANG_HOST_BLOCKS)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        workers = [Worker(n, engine, Publisher(context)) for n, engine in enumerate(engines, 1)]
        async with connected(base_url) as client:
            fleet = Fleet(client, workers, Random(SEED))
            try:
                yield fleet, workers
            finally:
                with trio.move_on_after(FAREWELL_S, shield=True), suppress(HungUp):
                    async with connected(base_url) as fresh:
                        await fleet.unregister(fresh)
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def connected(base_url: str) -> AsyncIterator[Client]:
    url = urlsplit(base_url)
    try:
        stream = await trio.open_tcp_stream(url.hostname or "", url.port or 80)
    except OSError as error:
        raise HungUp(str(error)) from error
    async with stream:
        yield Client(stream, url.netloc)


async def read_totals(base_url: str) -> Totals:
    async with connected(base_url) as client:
        status, body = await client.request("GET", "/metrics")
    if status != 200:
        raise RuntimeError(f"/metrics answered {status}: {body.decode()}")
    return parse_totals(body.decode())


async def show_live(
    base_url: str, traffic: Traffic, start: tuple[Totals, float], line: LiveLine
) -> None:
    """Shows the live line until cancelled; its first rates are those since `start` (totals, s)."""
    before, since_s = start
    while True:
        now, now_s = await read_totals(base_url), trio.current_time()
        line.show(live_text(before, now, now_s - since_s, traffic))
        before, since_s = now, now_s
        await trio.sleep(line.period_s)
