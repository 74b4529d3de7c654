"""Engines that publish batches of blocks, and replay those that a listener has missed."""

from __future__ import annotations

from threading import Thread

import msgpack
import zmq

BLOCK_SIZE, BATCH_BLOCKS, ENGINES = 16, 64, 16
END = b"\xff" * 8  # the number of the answer that ends a replay


def address_of(bound: zmq.Socket[bytes]) -> str:
    endpoint = bound.last_endpoint
    assert isinstance(endpoint, bytes)
    return endpoint.decode()


class Engines:
    """Engines with their replay servers, all in one thread."""

    def __init__(self, blocks: int) -> None:
        self._context = zmq.Context()
        self._pubs, self._routers = [], []
        self._kept: list[list[bytes]] = []
        per_engine = max(1, blocks // ENGINES // BATCH_BLOCKS)
        for engine in range(ENGINES):
            pub, router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
            for each in (pub, router):
                each.sndhwm = 0
                each.bind("tcp://127.0.0.1:0")
            self._pubs.append(pub)
            self._routers.append(router)
            self._kept.append([batch(engine, number) for number in range(per_engine)])
        self._next = [0] * ENGINES
        self._ending = False
        self._wanted = [0] * ENGINES  # batches to be published
        self.subscribers = 0
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def workers(self) -> str:
        """Returns the engines as `--workers` names them."""
        return ",".join(
            f"{number}={address_of(pub)};{address_of(router)}"
            for number, (pub, router) in enumerate(zip(self._pubs, self._routers, strict=True), 1)
        )

    def publish_all(self) -> None:
        """Publishes all batches that are not published yet, in the background."""
        self._wanted = [len(kept) for kept in self._kept]

    def publish_one_more(self) -> None:
        for engine, kept in enumerate(self._kept):
            kept.append(batch(engine, len(kept)))
        self.publish_all()

    @property
    def is_done(self) -> bool:
        return self._next == self._wanted

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (*self._pubs, *self._routers):
            poller.register(socket, zmq.POLLIN)
        while not self._ending:
            busy = any(map(int.__lt__, self._next, self._wanted))
            for socket, _ in poller.poll(0 if busy else 5):
                if socket in self._pubs:
                    self.subscribers += socket.recv()[:1] == b"\1"
                else:
                    self._answer(socket)
            for engine, number in enumerate(self._next):
                if number < self._wanted[engine]:
                    payload = self._kept[engine][number]
                    self._pubs[engine].send_multipart([b"", number.to_bytes(8), payload])
                    self._next[engine] += 1

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        asker, empty, start = router.recv_multipart()
        kept = self._kept[self._routers.index(router)]
        for number in range(int.from_bytes(start), len(kept)):
            router.send_multipart([asker, empty, number.to_bytes(8), kept[number]])
        router.send_multipart([asker, empty, END, b""])

    def close(self) -> None:
        self._ending = True
        self._thread.join()
        self._context.destroy(linger=0)


def batch(engine: int, number: int) -> bytes:
    """Returns a batch of one chain of blocks, which only this engine has."""
    first = (engine * 1_000_000 + number) * BATCH_BLOCKS
    hashes = list(range(first + 1, first + BATCH_BLOCKS + 1))
    event = ["BlockStored", hashes, None, tokens_of(engine, number), BLOCK_SIZE, None]
    payload: bytes = msgpack.packb([0.0, [event], 0])
    return payload


def tokens_of(engine: int, number: int) -> list[int]:
    first = (engine * 1_000_000 + number) % 1_000_003
    return [(first + each * 31) % 128_000 for each in range(BATCH_BLOCKS * BLOCK_SIZE)]
