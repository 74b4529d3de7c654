"""kvd's selector in this process: the index, the ledger and the pool of kvd_core."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random

from bench.replay.trace import BLOCK_SIZE, Prompts, Request
from kvd_core.index.prefix_index import IngestCounters, PrefixIndex
from kvd_core.ledger.ledger import ADDED, Ledger
from kvd_core.selector.selector import Candidate, Pool
from kvd_core.selector.settings import Settings


class CoreRouter:
    """Routes as kvd does with these settings, in any of its modes; nothing is held in a queue."""

    def __init__(self, engines: int, settings: Settings, prompts: Prompts, seed: int) -> None:
        self.settings = settings
        self.index = PrefixIndex(BLOCK_SIZE, IngestCounters())
        self.ledger = Ledger()
        self._prompts = prompts
        self._random = Random(seed)
        workers = [self.index.add_worker(number) for number in range(engines)]
        for worker in workers:
            worker.register(0)
        self._streams = [worker.stream(0) for worker in workers]
        ranks = [
            Candidate(number, 0, worker, self.ledger.add_rank(number, 0))
            for number, worker in enumerate(workers)
        ]
        self.pool = Pool(self.index, self.ledger, BLOCK_SIZE, ranks)

    def hear(self, engine: int, batch: bytes) -> None:
        self._streams[engine].apply(batch)

    def route(self, request: Request, held: Sequence[int], now: float) -> int:
        self._look(request)
        chosen = self.pool.choose(self.settings, None, self._random.getrandbits(64))
        self._book(request, chosen, now)
        return chosen

    def follow(self, request: Request, chosen: int, now: float) -> bool:
        """Books what somebody else has chosen; says whether nothing costs less."""
        self._look(request)
        costs = [row.cost for row in self.pool.explain(self.settings)]
        self._book(request, chosen, now)
        return costs[chosen] == min(costs)

    def prefill_complete(self, request: Request) -> None:
        self.ledger.prefill_complete(request.name)

    def finished(self, request: Request) -> None:
        self.ledger.free(request.name)

    def _look(self, request: Request) -> None:
        local, rolling = self._prompts.both(request.blocks)
        self.pool.look(_packed(local), _packed(rolling), request.input_tokens)

    def _book(self, request: Request, chosen: int, now: float) -> None:
        tokens = self.pool.effective_prefill_tokens(chosen, self.settings)
        if self.pool.book(request.name, chosen, tokens, now) != ADDED:
            raise ValueError(f"{request.name} cannot be booked")


def _packed(hashes: list[int]) -> bytes:
    return array("Q", hashes).tobytes()
