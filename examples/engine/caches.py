"""Simulates the prefix cache of two inference engines and publishes their KV events.

What is real: the chained block hashes, the events' members and their order, the ZMQ frames
[topic, sequence number, msgpack batch], least-recently-used eviction, leaf first. What is not:
there is no model.

    vLLM 0.33    sha256 over pickle, its last 8 bytes unsigned; one BlockRemoved a block
    SGLang 0.5   sha256 over the tokens, its first 8 bytes signed; a chain of blocks leaves in one
                 event, and goes to host memory first (HiCache, write-back), from where a later
                 prompt loads it again

So the two name the same tokens differently, as engines in one fleet do.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile
from struct import pack
from typing import Any

import msgpack
import trio
import zmq

BLOCK_SIZE = 16  # tokens; vLLM's default
TOPIC = b"kv-events"
VLLM_NONE_HASH = sha256(pickle.dumps("vllm-none-hash", protocol=5)).digest()  # before block 0

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a prompt: `digest` names the whole prefix that ends with it."""

    digest: bytes
    parent: bytes | None
    tokens: tuple[int, ...]


class Engine(ABC):
    """A bounded prefix cache that reports what it stores and removes.

    Both tiers are ordered from least to most recently used, and a block is always used after
    its children; so the first of the order is a leaf.
    """

    def __init__(self, device_blocks: int, host_blocks: int = 0) -> None:
        self._device: OrderedDict[bytes, Block] = OrderedDict()
        self._host: OrderedDict[bytes, Block] = OrderedDict()
        self.device_blocks = device_blocks
        self.host_blocks = host_blocks

    def __len__(self) -> int:
        """Returns how many blocks are on the device."""
        return len(self._device)

    def held(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Returns how many leading blocks are on the device, and on device then host."""
        chain = self._chain(tokens)
        device = len(list(takewhile(lambda block: block.digest in self._device, chain)))
        host = len(list(takewhile(lambda block: block.digest in self._host, chain[device:])))
        return device, device + host

    def serve(self, tokens: Sequence[int]) -> list[Event]:
        """Makes the whole blocks of `tokens` resident; returns the events of that step."""
        chain = self._chain(tokens)[: self.device_blocks]
        new = [block for block in chain if block.digest not in self._device]
        for block in reversed(chain):
            self._device[block.digest] = block
            self._device.move_to_end(block.digest)
        surplus = max(len(self._device) - self.device_blocks, 0)
        victims = [self._device.popitem(last=False)[1] for _ in range(surplus)]
        return [*self._evicted(victims), *([self._stored(new, "GPU")] if new else [])]

    @abstractmethod
    def _digest(self, parent: bytes | None, tokens: tuple[int, ...]) -> bytes: ...

    @abstractmethod
    def _name(self, digest: bytes) -> int:
        """Returns the block hash that stands for `digest` on the wire."""

    @abstractmethod
    def _stored(self, run: Sequence[Block], medium: str) -> Event: ...

    @abstractmethod
    def _evicted(self, victims: Sequence[Block]) -> list[Event]:
        """Returns the events of the device's `victims`, which are in the order of eviction."""

    def _chain(self, tokens: Sequence[int]) -> list[Block]:
        chain: list[Block] = []
        parent = None
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            run = tuple(tokens[start : start + BLOCK_SIZE])
            chain.append(Block(self._digest(parent, run), parent, run))
            parent = chain[-1].digest
        return chain

    def _names(self, run: Sequence[Block]) -> dict[str, Any]:
        """Returns the members that every BlockStored has, for a run of consecutive blocks."""
        parent = run[0].parent
        return {
            "type": "BlockStored",
            "block_hashes": [self._name(block.digest) for block in run],
            "parent_block_hash": None if parent is None else self._name(parent),
            "token_ids": [token for block in run for token in block.tokens],
            "block_size": BLOCK_SIZE,
            "lora_id": None,
        }


class VllmEngine(Engine):
    """vLLM 0.33: events as maps with attention groups; no host tier."""

    def _digest(self, parent: bytes | None, tokens: tuple[int, ...]) -> bytes:
        return sha256(pickle.dumps((parent or VLLM_NONE_HASH, tokens, None), protocol=5)).digest()

    def _name(self, digest: bytes) -> int:
        return int.from_bytes(digest[-8:], "big")

    def _stored(self, run: Sequence[Block], medium: str) -> Event:
        return {
            **self._names(run),
            "medium": medium,
            "lora_name": None,
            "extra_keys": [None] * len(run),
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    def _evicted(self, victims: Sequence[Block]) -> list[Event]:
        return [
            {
                "type": "BlockRemoved",
                "block_hashes": [self._name(block.digest)],
                "medium": "GPU",
                "group_idx": 0,
            }
            for block in victims
        ]


class SglangEngine(Engine):
    """SGLang 0.5 with a write-back host tier."""

    def _digest(self, parent: bytes | None, tokens: tuple[int, ...]) -> bytes:
        return sha256((parent or b"") + pack(f"<{len(tokens)}I", *tokens)).digest()

    def _name(self, digest: bytes) -> int:
        return int.from_bytes(digest[:8], "big", signed=True)

    def _stored(self, run: Sequence[Block], medium: str) -> Event:
        return {**self._names(run), "medium": medium}

    def _removed(self, run: Sequence[Block], medium: str) -> Event:
        names = [self._name(block.digest) for block in run]
        return {"type": "BlockRemoved", "block_hashes": names, "medium": medium}

    def _evicted(self, victims: Sequence[Block]) -> list[Event]:
        events: list[Event] = []
        for run in chains(victims):
            fresh = [block for block in reversed(run) if block.digest not in self._host]
            events += [self._stored(part, "CPU_PINNED") for part in chains(fresh)]
            events.append(self._removed(run, "GPU"))
            self._keep_on_host(run)
        surplus = max(len(self._host) - self.host_blocks, 0)
        dropped = [self._host.popitem(last=False)[1] for _ in range(surplus)]
        return events + [self._removed(run, "CPU_PINNED") for run in chains(dropped)]

    def _keep_on_host(self, run: Sequence[Block]) -> None:
        for block in reversed(run):
            self._host[block.digest] = block
            self._host.move_to_end(block.digest)


def chains(victims: Sequence[Block]) -> list[list[Block]]:
    """Joins blocks that were evicted in the order child, parent into runs, each root first."""
    runs: list[list[Block]] = []
    for block in victims:
        if runs and runs[-1][0].parent == block.digest:
            runs[-1].insert(0, block)
        else:
            runs.append([block])
    return runs


class Publisher:
    """Sends an engine's batches, numbered from 0, on a PUB socket of a free loopback port."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        # XPUB is PUB on the wire and lets `subscribed` see that a subscriber has joined.
        self._socket = context.socket(zmq.XPUB)
        self._socket.linger = 0
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._sequence = 0

    async def subscribed(self) -> None:
        """Waits for a subscriber; events that are published before are lost."""
        while True:
            try:
                self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                await trio.lowlevel.wait_readable(self._socket)
            else:
                return

    def publish(self, events: Sequence[Event], timestamp_s: float) -> None:
        if not events:
            return
        payload = msgpack.packb([timestamp_s, events, 0])
        self._socket.send_multipart([TOPIC, pack(">Q", self._sequence), payload], zmq.NOBLOCK)
        self._sequence += 1
