"""The demo of `kvd serve --demo`: two simulated engines and a router, beside a real daemon.

Everything passes through the daemon's public doors: the engines register over HTTP and publish
over ZMQ; the router asks /query for each turn of a conversation, sends the turn to the engine
that is cheapest, and checks the answer against what the engines really hold.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import TextIO
from urllib.parse import urlsplit

import trio
import zmq

from kvd.demo.client import Client
from kvd.demo.display import DemoStats, LiveLine, Traffic, introduction, live_text
from kvd.demo.engines import BLOCK_SIZE, Publisher, SglangEngine, VllmEngine
from kvd.demo.fleet import Fleet, Worker, question

__all__ = ["DemoStats", "run_demo"]

VLLM_BLOCKS = 192  # device blocks; too few for all live conversations, so that blocks are evicted
SGLANG_BLOCKS = 96
SGLANG_HOST_BLOCKS = 160
WARM_UP_TURNS = 24  # enough for every system prompt to be cached somewhere
SAMPLE_TOKENS = 5 * BLOCK_SIZE  # a whole system prompt and more, yet short enough to paste
FAREWELL_S = 1.0  # at most this long the engines try to unregister at the end
SEED = 1  # the same conversations at every start


async def run_demo(
    base_url: str,
    *,
    stats: Callable[[], DemoStats],
    out: TextIO = sys.stdout,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs until cancelled; `base_url` is the plain listener of this process's KV indexer.

    `stats` reads the daemon's totals. Reports as started once the engines are registered and the
    daemon listens to them. Cancel it before the daemon stops answering.
    """
    async with simulated_fleet(base_url) as (fleet, workers):
        await fleet.register()
        task_status.started()
        start = stats(), trio.current_time()
        for _ in range(WARM_UP_TURNS):
            await fleet.turn()
        sample = fleet.latest_tokens[:SAMPLE_TOKENS]
        answer = await fleet.ask(sample)
        out.write(introduction(base_url, list(map(str, workers)), question(sample), answer))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(show_live, fleet.traffic, stats, start, LiveLine(out))
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
                with trio.move_on_after(FAREWELL_S, shield=True), suppress(OSError):
                    async with connected(base_url) as fresh:
                        await fleet.unregister(fresh)
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def connected(base_url: str) -> AsyncIterator[Client]:
    url = urlsplit(base_url)
    async with await trio.open_tcp_stream(url.hostname or "", url.port or 80) as stream:
        yield Client(stream, url.netloc)


async def show_live(
    traffic: Traffic,
    stats: Callable[[], DemoStats],
    start: tuple[DemoStats, float],
    line: LiveLine,
) -> None:
    """Shows the live line until cancelled; its first rates are those since `start` (stats, s)."""
    before, since_s = start
    while True:
        now, now_s = stats(), trio.current_time()
        line.show(live_text(before, now, now_s - since_s, traffic))
        before, since_s = now, now_s
        await trio.sleep(line.period_s)
