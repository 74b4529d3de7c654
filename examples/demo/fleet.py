"""Drives the demo's engines: registers them, routes each turn by what the daemon answers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import trio

from examples.demo.client import Client
from examples.demo.display import Traffic
from examples.demo.engines import BLOCK_SIZE, Engine, Publisher
from examples.demo.workload import Conversation, Workload

Instances = dict[str, dict[str, int]]  # the part of /query's answer that is used here

MODEL = "demo"
TURN_PAUSE_S = 0.05  # time for a step's events to reach the index before the next question
LOAD_DECAY = 0.5  # per turn: an engine that just worked through a prompt is dearer for a while


@dataclass(slots=True)
class Worker:
    """An engine, where it publishes, and how many prompt tokens it computed lately."""

    instance_id: int
    engine: Engine
    publisher: Publisher
    load_tokens: float = 0.0

    def __str__(self) -> str:
        engine, endpoint = self.engine, self.publisher.endpoint
        memory = f"{engine.device_blocks} blocks on the GPU"
        if engine.host_blocks:
            memory += f", {engine.host_blocks} in host memory"
        return f"instance {self.instance_id}  {engine.label:<10}  {endpoint}  {memory}"


class Fleet:
    """The engines behind one daemon, and a router that asks it."""

    def __init__(self, client: Client, workers: Sequence[Worker], random: Random) -> None:
        self.traffic = Traffic()
        self.latest_tokens: Sequence[int] = ()  # of the conversation served last
        self._client = client
        self._workers = workers
        self._workload = Workload(random)

    async def register(self) -> str | None:
        """Registers every engine and waits until the daemon listens to it.

        Returns what the daemon said if it does not take one of them.
        """
        for worker in self._workers:
            registration = {
                "instance_id": worker.instance_id,
                "endpoint": worker.publisher.endpoint,
                "model_name": MODEL,
                "block_size": BLOCK_SIZE,
            }
            status, body = await self._client.request("POST", "/register", registration)
            if status != 201:
                return f"/register answered {status}: {body.decode()}"
            await worker.publisher.subscribed()
            worker.publisher.publish(worker.engine.first_events(), time.time())
        return None

    async def unregister(self, client: Client) -> None:
        """Takes the engines out again, over a connection that no request was cut off on."""
        for worker in self._workers:
            departure = {"instance_id": worker.instance_id, "model_name": MODEL}
            await client.request("POST", "/unregister", departure)

    async def ask(self, tokens: Sequence[int]) -> bytes:
        status, body = await self._client.request("POST", "/query", question(tokens))
        if status != 200:
            raise RuntimeError(f"/query answered {status}: {body.decode()}")
        return body

    async def turn(self) -> None:
        """Asks where the next turn's prompt is cached, serves it there, publishes the events."""
        conversation = self._workload.ask()
        instances: Instances = json.loads(await self.ask(conversation.tokens))["instances"]
        self._check(conversation, instances)
        await self._serve(conversation, self._cheapest(conversation, instances))

    def _check(self, conversation: Conversation, instances: Instances) -> None:
        """Counts the turn, and whether the answer is what the engines hold."""
        truth = {
            str(worker.instance_id): worker.engine.held(conversation.tokens)
            for worker in self._workers
        }
        answer = {name: reach_blocks(instances.get(name)) for name in truth}
        self.traffic.turns += 1
        self.traffic.right += answer == truth

    def _cheapest(self, conversation: Conversation, instances: Instances) -> Worker:
        """Picks by the tokens to compute, plus what the engine is busy with."""

        def cost(worker: Worker) -> float:
            reach = instances.get(str(worker.instance_id), {}).get("longest_matched", 0)
            return len(conversation.tokens) - reach + worker.load_tokens

        return min(self._workers, key=cost)

    async def _serve(self, conversation: Conversation, chosen: Worker) -> None:
        cached = chosen.engine.held(conversation.tokens)[1] * BLOCK_SIZE
        self.traffic.prompt_tokens += len(conversation.tokens)
        self.traffic.cached_tokens += cached
        for worker in self._workers:
            worker.load_tokens *= LOAD_DECAY
        chosen.load_tokens += len(conversation.tokens) - cached
        chosen.publisher.publish(chosen.engine.serve(conversation.tokens), time.time())
        self._workload.reply(conversation)
        chosen.publisher.publish(chosen.engine.serve(conversation.tokens), time.time())
        self.latest_tokens = conversation.tokens
        await trio.sleep(TURN_PAUSE_S)


def question(tokens: Sequence[int]) -> dict[str, object]:
    return {"model_name": MODEL, "token_ids": list(tokens)}


def reach_blocks(instance: dict[str, int] | None) -> tuple[int, int]:
    """Returns the blocks of an answer's instance on the device, and on device then host."""
    if instance is None:
        return 0, 0
    return instance["gpu"] // BLOCK_SIZE, instance["cpu"] // BLOCK_SIZE
