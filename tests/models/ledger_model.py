"""A plain, slow ledger with the rules of `kvd_core/ledger/book.pxd`.

A block is its path from the root, numbered. A rank maps each block to the number of its live
requests that have it, and to its weight. Ledgers with the same ModelLoads share the loads of ranks
that both have added. The two sums of a rank are added up in the same order as in the core, so that
loads agree even when they are rounded at a half.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

ADDED, REPEATED, EXISTS, FULL, OVERFLOW = range(5)
MAX_TOKENS = 2**53


@dataclass
class Block:
    requests: int = 0
    weight: float = 1.0


@dataclass
class ModelRequest:
    rank: tuple[int, int]
    blocks: list[int]
    tokens: int
    admitted: float
    key: str | None
    prefilling: bool = True
    outputs: list[float] = field(default_factory=list)


@dataclass
class ModelRank:
    blocks: dict[int, Block] = field(default_factory=dict)
    prompt: float = 0.0
    output: float = 0.0


class ModelLoads:
    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int], int] = {}  # (block above, hash) -> block
        self.ledgers: list[ModelLedger] = []

    def requests_of(self, rank: tuple[int, int]) -> list[ModelRequest]:
        return [
            request
            for ledger in self.ledgers
            for request in ledger.requests.values()
            if request.rank == rank
        ]

    def rank(self, rank: tuple[int, int]) -> ModelRank:
        known = [ledger.ranks[rank] for ledger in self.ledgers if rank in ledger.ranks]
        return known[0] if known else ModelRank()


class ModelLedger:
    def __init__(self, loads: ModelLoads | None = None) -> None:
        self.loads = loads or ModelLoads()
        self.loads.ledgers.append(self)
        self.ranks: dict[tuple[int, int], ModelRank] = {}
        self.requests: dict[str, ModelRequest] = {}  # in order of admission

    def path(self, hashes: list[int]) -> list[int]:
        blocks: list[int] = []
        for value in hashes:
            above = blocks[-1] if blocks else -1
            numbers = self.loads.numbers
            blocks.append(numbers.setdefault((above, value), len(numbers)))
        return blocks

    def add_rank(self, rank: tuple[int, int]) -> None:
        self.ranks.setdefault(rank, self.loads.rank(rank))

    def remove_rank(self, rank: tuple[int, int]) -> list[str]:
        gone = [name for name, request in self.requests.items() if request.rank == rank]
        for name in gone:
            self.free(name)
        del self.ranks[rank]
        return gone

    def add(
        self,
        name: str,
        rank: tuple[int, int],
        hashes: list[int],
        tokens: int,
        now: float,
        key: str | None,
    ) -> int:
        if tokens > MAX_TOKENS:
            return OVERFLOW
        known = self.requests.get(name)
        blocks = self.path(hashes)
        if known is not None:
            same = (known.rank, known.blocks, known.tokens) == (rank, blocks, tokens)
            return REPEATED if key and key == known.key and same else EXISTS
        self.requests[name] = ModelRequest(rank, blocks, tokens, now, key)
        of_rank = self.ranks[rank]
        for block in blocks:
            if block not in of_rank.blocks:
                of_rank.blocks[block] = Block()
                of_rank.prompt += 1
            of_rank.blocks[block].requests += 1
        return ADDED

    def prefill_complete(self, name: str) -> bool:
        if name not in self.requests:
            return False
        self.requests[name].prefilling = False
        return True

    def free(self, name: str) -> bool:
        request = self.requests.pop(name, None)
        if request is None:
            return False
        rank = self.ranks[request.rank]
        lost = []
        for block in reversed(request.blocks):
            rank.blocks[block].requests -= 1
            if rank.blocks[block].requests == 0:
                lost.append(rank.blocks.pop(block).weight)
        for weight, stretch in groupby(lost):
            rank.prompt -= len(list(stretch)) * weight
        for weight in request.outputs:
            rank.output -= weight
        if not rank.blocks:
            rank.prompt = 0.0
        if not any(other.outputs for other in self.loads.requests_of(request.rank)):
            rank.output = 0.0
        return True

    def output_block(self, name: str, fraction: float | None) -> bool:
        request = self.requests.get(name)
        if request is None:
            return False
        rank = self.ranks[request.rank]
        request.outputs.append(1.0)
        rank.output += 1
        if fraction is not None:
            self.decay(request, rank, fraction)
        return True

    def decay(self, request: ModelRequest, rank: ModelRank, fraction: float) -> None:
        for weight in request.outputs:
            rank.output += fraction - weight
        request.outputs = [fraction] * len(request.outputs)
        old = []
        for block in reversed(request.blocks):
            if rank.blocks[block].requests > 1:
                break
            old.append(rank.blocks[block].weight)
            rank.blocks[block].weight = fraction
        for weight, stretch in groupby(old):
            rank.prompt += len(list(stretch)) * (fraction - weight)

    def expire(self, before: float, limit: int) -> list[str]:
        gone = [name for name, request in self.requests.items() if request.admitted < before][
            :limit
        ]
        for name in gone:
            self.free(name)
        return gone

    def load(self, rank: tuple[int, int]) -> tuple[int, int, int]:
        """Returns prefill tokens, decode blocks (halves away from zero), requests."""
        running = self.loads.requests_of(rank)
        sums = self.ranks[rank]
        load = max(sums.prompt + sums.output, 0.0)
        decode = int(load) + (load - int(load) >= 0.5)
        return sum(r.tokens for r in running if r.prefilling), decode, len(running)

    def decoding(self, rank: tuple[int, int]) -> int:
        """Returns the number of requests with nothing left to prefill."""
        return sum(not (r.prefilling and r.tokens) for r in self.loads.requests_of(rank))

    def depth(self, rank: tuple[int, int], hashes: list[int]) -> int:
        held = self.ranks[rank].blocks
        blocks = self.path(hashes)
        return next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
