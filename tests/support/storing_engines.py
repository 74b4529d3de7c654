"""An engine that publishes the same few stored blocks, as often as a test wants."""

from __future__ import annotations

from itertools import count

import msgpack
import zmq

TOKENS = list(range(16))
STORED = msgpack.packb([0.5, [["BlockStored", [1, 2, 3], None, TOKENS[:12], 4, None, "GPU"]], 0])


class StoringEngine:
    """A rank that publishes without a replay endpoint; its blocks hold the first 12 of TOKENS."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.PUB)
        self.socket.linger = 0
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.numbers = count()

    def publish(self) -> None:
        self.socket.send_multipart([b"", next(self.numbers).to_bytes(8, "big"), STORED])
