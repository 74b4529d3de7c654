"""A selection service in a process of its own, driven in lockstep with simulated time.

Events of engines are published on real PUB sockets, and requests are sent over HTTP. Before each
selection the router asks the service for the prompt's overlaps until they equal what the engines
hold: then the service has applied all events that concern the choice, and correctly. kvd's core
follows the service's choices, and counts those that cost no more than any other choice.

Blocks are published with made-up tokens, so that services hash them as they hash an engine's.
"""

from __future__ import annotations

import http.client
import json
import time
from array import array
from collections.abc import Callable, Sequence
from struct import pack
from typing import Any

import msgpack
import zmq
from errors import BenchError
from servers import Server

from kvd.replay.cache import Event, Stored
from kvd.replay.recording import RecordedRequest
from kvd.replay.routers import CoreRouter
from kvd.replay.simulation import SimulatedFleet
from kvd_core.base.hashing import local_hashes, sequence_hashes

TOPIC = b"kv-events"
PATIENCE_S = 20.0  # until events have been applied, or an engine has a subscriber
MODEL = {"model_name": "replayed"}

Json = dict[str, Any]


class ServiceRouter:
    """A fleet registered with kvd's selection service, or with Dynamo's."""

    def __init__(self, fleet: SimulatedFleet, server: Server, follower: CoreRouter) -> None:
        self.choices = self.cheapest = 0
        self._follower = follower
        self._block_size = fleet.block_size
        self._local: dict[int, int] = {}  # local hashes by block
        self._http = http.client.HTTPConnection(server.address, timeout=PATIENCE_S)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = [self._engine(number) for number in range(fleet.engines)]
        self._sent = [0] * fleet.engines
        for socket in self._sockets:
            if not socket.poll(int(PATIENCE_S * 1000)):
                raise BenchError(f"{server.name} does not subscribe to an engine")

    def close(self) -> None:
        self._http.close()
        self._context.destroy(linger=0)

    def hear(self, engine: int, event: Event, now: float) -> None:
        batch = msgpack.packb([now, [self._published(event)], 0])
        self._sockets[engine].send_multipart([TOPIC, pack(">Q", self._sent[engine]), batch])
        self._sent[engine] += 1
        self._follower.hear(engine, event, now)

    def route(self, request: RecordedRequest, held: Callable[[], list[int]], now: float) -> int:
        local = array("Q", map(self._local_hash, request.blocks))
        prompt = {
            **MODEL,
            "block_hashes": _signed(local),
            "sequence_hashes": _signed(sequence_hashes(local)),
            "isl_tokens": request.input_tokens,
        }
        self._wait_applied(prompt, held())
        # The id has two names, as Dynamo 1.6.1 reads another one.
        names = {"reservation_id": request.name, "selection_id": request.name}
        answer = self._ask("POST", "/select_and_reserve", {**prompt, **names})
        chosen: int = answer["worker_id"]
        self.choices += 1
        self.cheapest += self._follower.judge(request, chosen, now)
        return chosen

    def prefill_complete(self, request: RecordedRequest) -> None:
        self._ask("POST", f"/reservations/{request.name}/prefill_complete")
        self._follower.prefill_complete(request)

    def finished(self, request: RecordedRequest) -> None:
        self._ask("DELETE", f"/reservations/{request.name}")
        self._follower.finished(request)

    def _published(self, event: Event) -> list[Any]:
        """Returns an event in vLLM's positional form."""
        if not isinstance(event, Stored):
            return ["BlockRemoved", list(event.blocks), "GPU"]
        tokens = [token for block in event.blocks for token in self._tokens(block)]
        stored = list(event.blocks), event.parent, tokens, self._block_size, None, "GPU"
        return ["BlockStored", *stored]

    def _tokens(self, block: int) -> list[int]:
        """Returns made-up tokens for a block: small numbers, which are short in msgpack."""
        digits = [block >> shift & 127 for shift in range(0, 64, 7)]
        return digits + [0] * (self._block_size - len(digits))

    def _local_hash(self, block: int) -> int:
        if block not in self._local:
            (self._local[block],) = local_hashes(self._tokens(block), self._block_size)
        return self._local[block]

    def _engine(self, number: int) -> zmq.Socket[bytes]:
        """Registers an engine; returns the socket that publishes its events."""
        socket = self._context.socket(zmq.XPUB)  # a PUB that shows when it has a subscriber
        socket.sndhwm = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        worker = {
            **MODEL,
            "worker_id": number,
            "endpoint": f"http://engine-{number}:8000",
            "block_size": self._block_size,
            "kv_events_endpoints": {"0": f"tcp://127.0.0.1:{port}"},
        }
        record = self._ask("POST", "/workers", worker)
        if record["lifecycle"] != "schedulable":
            raise BenchError(f"engine {number} is not schedulable: {record}")
        return socket

    def _wait_applied(self, prompt: Json, held: list[int]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (seen := self._overlaps(prompt, len(held))) != held:
            if time.monotonic() > deadline:
                raise BenchError(f"overlaps are {seen} and should be {held}")

    def _overlaps(self, prompt: Json, engines: int) -> list[int]:
        rows = self._ask("POST", "/overlap_scores", prompt)["workers"]
        seen = {row["worker_id"]: row["device_blocks"] for row in rows}
        return [seen.get(number, 0) for number in range(engines)]

    def _ask(self, method: str, path: str, body: Json | None = None) -> Json:
        # No body where none is needed: Dynamo does not read it, and may close the connection.
        headers = {} if body is None else {"Content-Type": "application/json"}
        payload = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        self._http.request(method, path, payload, headers)
        response = self._http.getresponse()
        answer = response.read()
        if response.status >= 300:
            raise BenchError(f"{method} {path}: {response.status} {answer.decode()[:200]}")
        members: Json = json.loads(answer)
        return members


def _signed(hashes: Sequence[int]) -> list[int]:
    return [value - 2**64 if value >= 2**63 else value for value in hashes]
