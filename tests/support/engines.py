"""Simulated engines for tests of daemons: they publish events, answer replays, know their cache."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from threading import Event, Lock, Thread

import msgpack
import zmq

BLOCK_SIZE = 4
END = b"\xff" * 8

_hashes = count(1)  # names of blocks, distinct among all engines of a run


def address_of(bound: zmq.Socket[bytes]) -> str:
    endpoint = bound.last_endpoint
    assert isinstance(endpoint, bytes)
    return endpoint.decode()


class Engine:
    """One rank: an XPUB socket, a ROUTER for replays, and its cache.

    It runs in a thread of its own, so that it goes on while the test waits.
    """

    def __init__(self, replays: bool = True, buffered: int = 10_000) -> None:
        """Starts the engine; its replay server, if any, keeps the last `buffered` batches."""
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)  # it receives subscriptions
        self._pub.xpub_verboser = True
        self._pub.sndhwm = 0
        self._pub.bind("tcp://127.0.0.1:0")
        self.endpoint = address_of(self._pub)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.sndhwm = 0
        self._router.bind("tcp://127.0.0.1:0")
        self.replay_endpoint = address_of(self._router) if replays else None
        self._buffered = buffered
        self._lock = Lock()
        self._ending = Event()
        self.subscribed = Event()  # set once a subscription has arrived
        self.replays = 0  # requests so far
        self.restart()
        self._thread = Thread(target=self._serve, daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """Becomes a new engine process, with an empty cache."""
        with self._lock:
            self._kept: deque[tuple[int, bytes]] = deque(maxlen=self._buffered)
            self.seq = 0
            self.cache: dict[int, tuple[int | None, tuple[int, ...]]] = {}  # parent, tokens
            self._by_path: dict[tuple[int | None, tuple[int, ...]], int] = {}

    def store(self, tokens: Sequence[int]) -> None:
        """Caches the full blocks of a prompt, and publishes those that are new."""
        parent: int | None = None
        first_parent: int | None = None
        new: list[int] = []
        stored: list[int] = []
        for start in range(0, len(tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
            path = parent, tuple(tokens[start : start + BLOCK_SIZE])
            known = self._by_path.get(path)
            if known is None:
                if not new:
                    first_parent = parent
                known = self._by_path[path] = next(_hashes)
                self.cache[known] = path
                new.append(known)
                stored += path[1]
            parent = known
        if new:
            self.publish([["BlockStored", new, first_parent, stored, BLOCK_SIZE, None]])

    def evict(self, hash: int) -> None:
        """Drops a block and all of its descendants."""
        gone = [hash]
        for one in gone:
            gone += [other for other, (parent, _) in self.cache.items() if parent == one]
        for one in gone:
            del self._by_path[self.cache.pop(one)]
        self.publish([["BlockRemoved", gone]])

    def paths(self) -> set[tuple[int, ...]]:
        """Returns, for each cached block, its tokens with all tokens before them."""
        return {self._tokens(hash) for hash in self.cache}

    def _tokens(self, hash: int | None) -> tuple[int, ...]:
        if hash is None:
            return ()
        parent, tokens = self.cache[hash]
        return (*self._tokens(parent), *tokens)

    def publish(self, events: list[object]) -> None:
        """Publishes a batch of events."""
        payload = msgpack.packb([time.time(), events, 0])
        with self._lock:
            self._kept.append((self.seq, payload))
            self._pub.send_multipart([b"", self.seq.to_bytes(8), payload])
            self.seq += 1

    def _serve(self) -> None:
        while not self._ending.is_set():
            with self._lock:
                while self._pub.poll(0):
                    if self._pub.recv()[:1] == b"\1":
                        self.subscribed.set()
            if not self._router.poll(20):
                continue
            asker, empty, start = self._router.recv_multipart()
            self.replays += 1
            with self._lock:
                kept = [each for each in self._kept if each[0] >= int.from_bytes(start)]
            for seq, payload in kept:
                self._router.send_multipart([asker, empty, seq.to_bytes(8), payload])
            self._router.send_multipart([asker, empty, END, b""])

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._context.destroy(linger=0)
