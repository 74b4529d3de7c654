"""Engines that can be killed and stopped, and clients that keep a gateway in front of them busy."""

from __future__ import annotations

import random
import signal
import sys
from collections import Counter
from pathlib import Path

import trio

from tests.support.gateways import Client, outcome
from tests.support.ports import find_free_port
from tests.support.processes import Server, clean_environment

PROMPT = " ".join(f"w{number}" for number in range(60))
BROKEN = 'kvd_gateway_relayed_requests_total{outcome="broken"}'
CLIENTS = 16
STEP_US = 4000  # so that a stream of 12 tokens takes some 50 ms, in which its engine can die
TOKENS = 12


class EngineProcess:
    """A simulated engine as a process of its own, so that it can be killed and stopped."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._folder = folder
        self._flags = flags
        self.port = find_free_port()
        self.start()

    def start(self) -> None:
        flags = ("--port", str(self.port), "--step-us", str(STEP_US), "--prefill-us", "20")
        command = [sys.executable, "-m", "examples.engine", *flags, *self._flags]
        self._server = Server(command, self._folder, self.port, clean_environment())
        self._server.wait_healthy()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def signal(self, number: signal.Signals) -> None:
        self._server.process.send_signal(number)

    def end(self) -> None:
        self._server.process.kill()
        self._server.process.wait()


class Load:
    """Clients that send one request after the other, every second one for a stream."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._ended = False
        self._asked = 0
        self.outcomes: Counter[str] = Counter()
        self.answered = 0
        self._random = random.Random(7)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(CLIENTS):
                nursery.start_soon(self._ask)

    async def until(self, answered: int) -> None:
        while self.answered < answered:  # noqa: ASYNC110 - a count that tasks change
            await trio.sleep(0.001)

    def end(self) -> None:
        """Stops each client after its current request."""
        self._ended = True

    async def _ask(self) -> None:
        while not self._ended:
            self._asked += 1
            stream = bool(self._asked % 2)
            text = f"{self._random.randrange(40)} {PROMPT}"
            answered = await self._client.chat(text, stream=stream, max_tokens=TOKENS)
            self.outcomes[outcome(answered, stream=stream)] += 1
            self.answered += 1
