"""An honest engine: a cache with tiers per rank, and numbered batches that announce every change.

Most engines have one rank. Some have several behind one port; then each batch names its rank.

A block is the path of values from the root to it. A cache holds copies of blocks; every copy is
announced once when it is stored and once when it is removed. After each batch the engine records
what it holds, so that a replica can be compared with any moment of the engine's life.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import msgpack

from kvd.model import RankKey

Path = tuple[int, ...]
Event = dict[str, object]
Depths = tuple[int, int, int]

BLOCK = 2  # tokens
VALUES = 3  # different blocks, each one token repeated; so few that prompts share prefixes and fork
MEDIUMS = ("GPU", "CPU", "DISK")
MAX_HELD = 24  # copies on the device; an engine with more evicts


def tokens_of(path: Path) -> list[int]:
    return [value for value in path for _ in range(BLOCK)]


@dataclass
class Cache:
    """Copies of blocks by tier."""

    tiers: tuple[Counter[Path], ...] = field(default_factory=lambda: (Counter(),) * 0)

    def __post_init__(self) -> None:
        self.tiers = self.tiers or tuple(Counter() for _ in MEDIUMS)

    def copy(self) -> Cache:
        return Cache(tuple(tier.copy() for tier in self.tiers))

    def depths(self, path: Path) -> Depths:
        """Returns the blocks of `path` that match on device, then through host and disk."""
        at, depths = 0, []
        for tier in self.tiers:
            while at < len(path) and path[: at + 1] in tier:
                at += 1
            depths.append(at)
        return depths[0], depths[1], depths[2]

    def add(self, tier: int, path: Path) -> None:
        self.tiers[tier][path] += 1

    def take(self, tier: int, path: Path) -> None:
        self.tiers[tier][path] -= 1
        if not self.tiers[tier][path]:
            del self.tiers[tier][path]


Caches = dict[int, Cache]  # by rank


@dataclass
class Process:
    """One process of an engine: its batches, and what its ranks held after each of them."""

    number: int
    after: list[Caches]
    batches: list[bytes] = field(default_factory=list)

    @property
    def id(self) -> bytes:
        """The publisher id that its batches may carry."""
        return hashlib.blake2b(b"%d" % self.number, digest_size=16).digest()


class Engine:
    """An engine behind one port: its processes, one after the other.

    It is registered as one rank, and may have `others`, ranks that only its batches name.
    """

    def __init__(self, key: RankKey, chance: random.Random, kind: bool, others: int = 0) -> None:
        self.key = key
        self.ranks = [key.dp_rank + 10 * number for number in range(1 + others)]
        self.chance = chance
        self.endpoint = f"ipc://{key.partition.tenant_id}-{key.instance_id}-{key.dp_rank}:1"
        self.has_replay = kind or chance.random() < 0.8
        self.replay_endpoint = self.endpoint[:-1] + "2" if self.has_replay else None
        self.proxied = not kind and chance.random() < 0.15
        self.vllm = chance.random() < 0.5  # groups are numbered, offloads come by name alone
        self.new_names = chance.random() < 0.5  # a restarted process has new names for its blocks
        self.names_rank = others > 0 or chance.random() < 0.5
        self.kept = 100_000 if kind else chance.choice((1, 3, 10, 10, 100_000))
        self.in_batches = False  # each batch carries the id of its process after the rank
        self.processes: list[Process] = []
        self._asked: dict[Path, None] = {}
        self.where: dict[bytes, tuple[int, int]] = {}  # process and number of every batch
        self.start()

    @property
    def process(self) -> Process:
        return self.processes[-1]

    def start(self) -> None:
        """Begins a new process with an empty cache."""
        self.caches = {rank: Cache() for rank in self.ranks}
        self.processes.append(Process(len(self.processes), [self.caches]))
        self._turn(self.key.dp_rank)
        self.ring: deque[tuple[int, bytes]] = deque(maxlen=self.kept)

    @property
    def asked(self) -> list[Path]:
        """Every prompt that it has computed, in order."""
        return list(self._asked)

    def _turn(self, rank: int) -> None:
        """Makes a rank act from now on, on a copy of its cache: the recorded one stays the same."""
        self._rank = rank
        self.cache = self.caches[rank].copy()
        self.caches = {**self.caches, rank: self.cache}

    def truth(self, process: int, batches: int, rank: int) -> Cache:
        """Returns what a rank of the process held after its first `batches` batches."""
        return self.processes[process].after[batches][rank]

    def act(self) -> tuple[int, bytes]:
        """Has a rank do something and returns the batch that announces it."""
        self._turn(self.chance.choice(self.ranks) if len(self.ranks) > 1 else self.key.dp_rank)
        events: list[Event] = []
        for _ in range(self.chance.choice((1, 1, 2, 4))):
            kinds = (self._serve, self._evict, self._offload, self._again, self._clear)
            events += self.chance.choices(kinds, (50, 25, 15, 8, 1))[0]()
        while sum(self.cache.tiers[0].values()) > MAX_HELD:
            events += self._evict()
        return self._publish(events)

    def beat(self, bare: bool) -> tuple[int, bytes]:
        """Returns a sign of life: an empty batch, or an empty payload."""
        return self._keep(b"") if bare else self._publish([])

    def clear(self) -> list[tuple[int, bytes]]:
        """Drops everything on every tier of every rank, one after the other."""
        return [self._clear_rank(rank) for rank in self.ranks]

    def _clear_rank(self, rank: int) -> tuple[int, bytes]:
        self._turn(rank)
        events = []
        if self.vllm:
            for tier in (1, 2):
                gone = list(self.cache.tiers[tier].elements())
                events += [self._removed(tier, [path]) for path in gone]
        return self._publish(events + self._clear())

    # ---- what an engine does

    def _serve(self) -> list[Event]:
        """Computes the blocks of a prompt behind those that are on the device."""
        prompt = self._prompt()
        at = self.cache.depths(prompt)[0]
        return [self._stored(0, prompt, at)] if at < len(prompt) else []

    def _again(self) -> list[Event]:
        """Computes the last block of a cached prompt again, which makes a second copy."""
        held = [path for path in self.cache.tiers[0] if len(path) > 1 and self._whole(path)]
        if not held:
            return []
        path = self.chance.choice(held)
        return [self._stored(0, path, len(path) - 1)]

    def _whole(self, path: Path) -> bool:
        return self.cache.depths(path)[0] == len(path)

    def _offload(self) -> list[Event]:
        """Copies a block of the device to a lower tier that does not have it yet."""
        tier = self.chance.choice((1, 1, 2))
        lower = self.cache.tiers[tier]
        held = [path for path in self.cache.tiers[0] if path not in lower and self._whole(path)]
        if not held:
            return []
        path = self.chance.choice(held)
        return [self._stored(tier, path, len(path) - 1)]

    def _evict(self) -> list[Event]:
        """Drops one copy each of some blocks of one tier."""
        tier = self.chance.choice((0, 0, 0, 1, 2))
        copies = list(self.cache.tiers[tier].elements())
        if not copies:
            return []
        gone = self.chance.sample(copies, min(len(copies), self.chance.choice((1, 1, 3))))
        return [self._removed(tier, list(dict.fromkeys(gone)))]

    def _clear(self) -> list[Event]:
        """Resets the cache: as vLLM only on the device, as SGLang on every tier."""
        for tier in self.cache.tiers[: 1 if self.vllm else 3]:
            tier.clear()
        return [{"type": "AllBlocksCleared"}]

    def _prompt(self) -> Path:
        known = list(self.cache.tiers[0])
        base = self.chance.choice(known) if known and self.chance.random() < 0.7 else ()
        more = self.chance.choice((1, 1, 2, 5))
        return base + tuple(self.chance.randrange(VALUES) for _ in range(more))

    # ---- how it announces

    def _stored(self, tier: int, path: Path, start: int) -> Event:
        for length in range(start, len(path)):
            self.cache.add(tier, path[: length + 1])
        self._asked[path] = None
        by_name = self.vllm and tier > 0
        return {
            "type": "BlockStored",
            "block_hashes": [self._name(path[: n + 1]) for n in range(start, len(path))],
            "parent_block_hash": self._name(path[:start]) if start else None,
            "token_ids": [] if by_name else tokens_of(path[start:]),
            "block_size": BLOCK,
            "lora_id": None,
            "medium": MEDIUMS[tier],
            "lora_name": None,
            **self._group(),
        }

    def _removed(self, tier: int, paths: list[Path]) -> Event:
        for path in paths:
            self.cache.take(tier, path)
        names = [self._name(path) for path in paths]
        medium = {"medium": MEDIUMS[tier]}
        return {"type": "BlockRemoved", "block_hashes": names, **medium, **self._group()}

    def _group(self) -> dict[str, object]:
        return {"group_idx": 0} if self.vllm else {}

    def _name(self, path: Path) -> int:
        owner = (str(self.key), self.process.number if self.new_names else 0)
        digest = hashlib.blake2b(repr((owner, path)).encode(), digest_size=8).digest()
        return int.from_bytes(digest)

    def _publish(self, events: list[Event]) -> tuple[int, bytes]:
        moment = self.process.number * 1e6 + len(self.process.batches)  # stands for the timestamp
        rank = self._rank if self.names_rank else None
        batch = [moment, events, rank]
        if self.in_batches:
            batch.append(self.process.id)
        return self._keep(msgpack.packb(batch))

    def _keep(self, payload: bytes) -> tuple[int, bytes]:
        process, seq = self.process, len(self.process.batches)
        process.batches.append(payload)
        process.after.append(self.caches)
        self.ring.append((seq, payload))
        self.where[payload] = process.number, seq
        return seq, payload
