"""Has a daemon in front of simulated engines serve conversations, and shows how well it does."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any

import trio
import zmq

from examples.demo.client import Answer, Client, Refused, connected
from examples.demo.display import (
    Addresses,
    EventStats,
    LiveLine,
    Traffic,
    introduction,
    live_text,
    parse_event_stats,
)
from examples.demo.workload import Workload
from examples.engine.caches import BLOCK_SIZE
from examples.engine.options import EngineOptions
from examples.engine.server import EngineServer
from examples.engine.tokenizer import ids_of_messages

MODEL = "demo"
BLOCKS = {"vllm": 192, "sglang": 96}  # too few for all live conversations: blocks are evicted
PREFILL_S = 100e-6  # per prompt token that an engine computes
STEP_S = 2e-3  # per token that it generates
ANSWER_TOKENS = 12
TURN_PAUSE_S = 0.05  # time for a step's events to reach the index before the next turn
STATUS_PAUSE_S = 0.05  # between two checks whether the engines can be used
WARM_UP_TURNS = 24  # enough for every system prompt to be cached somewhere
SAMPLE_TOKENS = 5 * BLOCK_SIZE  # a whole system prompt and more, yet short enough to paste
SEED = 1  # the same conversations at every start


class Driver:
    """A client of the gateway, which sends one turn of a conversation after the other."""

    def __init__(self, client: Client) -> None:
        self.traffic = Traffic()
        self._client = client
        self._workload = Workload(Random(SEED))

    async def turn(self) -> tuple[dict[str, object], Answer]:
        """Sends the next turn of a conversation; returns the request and the answer.

        Compares the cached tokens that kvd expected with those that the engine reports.
        """
        conversation = self._workload.ask()
        request: dict[str, object] = {
            "model": MODEL,
            "messages": list(conversation.messages),
            "max_tokens": ANSWER_TOKENS,
        }
        answer = await self._client.request("POST", "/v1/chat/completions", request)
        members = answer.json()
        conversation.messages.append(members["choices"][0]["message"])
        used = members["usage"]
        cached = used["prompt_tokens_details"]["cached_tokens"]
        self.traffic.turns += 1
        # kvd expects no number if the engines did not tokenize the prompt in time.
        self.traffic.right += answer.headers.get("x-kvd-matched-tokens") == str(cached)
        self.traffic.prompt_tokens += used["prompt_tokens"]
        self.traffic.cached_tokens += cached
        await trio.sleep(TURN_PAUSE_S)
        return request, answer


async def run_traffic(addresses: Addresses, engines: Sequence[EngineServer]) -> str:
    """Runs until cancelled; returns only if the daemon refuses to serve, with its error.

    Cancel it before the daemon stops answering.
    """
    refusal = ""
    try:
        async with connected(addresses.gateway) as client, connected(addresses.indexer) as indexer:
            serving = await all_serving(client)
            for engine in engines:
                assert engine.publisher is not None
                await engine.publisher.subscribed()
            start = await read_totals(indexer), trio.current_time()
            driver = Driver(client)
            for _ in range(WARM_UP_TURNS):
                request, answer = await driver.turn()
            question: dict[str, object] = {
                "model_name": MODEL,
                "token_ids": sample(request["messages"]),
            }
            found = await indexer.request("POST", "/query", question)
            chat, query = (request, answer.shown()), (question, found.body.decode())
            sys.stdout.write(introduction(addresses, serving, chat, query))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(show_live, indexer, driver.traffic, start, LiveLine(sys.stdout))
                while True:
                    await driver.turn()
    except* Refused as refusals:
        refusal = str(refusals.exceptions[0])
    return refusal


def sample(messages: Any) -> list[int]:
    """Returns token ids to ask the indexer for: the beginning of a prompt."""
    return ids_of_messages(messages)[:SAMPLE_TOKENS]


async def all_serving(client: Client) -> list[str]:
    """Waits until the gateway serves with every engine; returns a line for each.

    Raises Refused if the gateway cannot use one of them.
    """
    while True:
        rows = (await client.request("GET", "/status")).json()["upstreams"]
        for row in rows:
            if row["problem"] is not None:
                raise Refused(f"{row['url']}: {row['problem']}")
        if all(row["standing"] == "serving" for row in rows):
            return [
                f"{row['url']}  {row['engine']:<6}  worker {row['worker_id']}, "
                f"{row['blocks']} blocks of {row['block_size']} tokens"
                for row in rows
            ]
        await trio.sleep(STATUS_PAUSE_S)


@asynccontextmanager
async def simulated_engines() -> AsyncIterator[tuple[list[EngineServer], list[str]]]:
    """Serves the engines on free ports; yields them with their URLs."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        async with trio.open_nursery() as nursery:
            engines, urls = [], []
            for kind, blocks in BLOCKS.items():
                options = EngineOptions(
                    MODEL, kind=kind, blocks=blocks, prefill_s=PREFILL_S, step_s=STEP_S
                )
                engine = EngineServer(options, context)
                serve = partial(trio.serve_tcp, engine.serve, 0, host="127.0.0.1")
                (listener,) = await nursery.start(serve)
                engines.append(engine)
                port = listener.socket.getsockname()[1]
                urls.append(f"http://127.0.0.1:{port}")
            yield engines, urls
            nursery.cancel_scope.cancel()
    finally:
        context.destroy(linger=0)


async def read_totals(indexer: Client) -> EventStats:
    return parse_event_stats((await indexer.request("GET", "/metrics")).body.decode())


async def show_live(
    indexer: Client, traffic: Traffic, start: tuple[EventStats, float], line: LiveLine
) -> None:
    """Shows the live line until cancelled; its first rates are those since `start` (totals, s)."""
    before, since_s = start
    while True:
        now, now_s = await read_totals(indexer), trio.current_time()
        line.show(live_text(before, now, now_s - since_s, traffic))
        before, since_s = now, now_s
        await trio.sleep(line.period_s)
