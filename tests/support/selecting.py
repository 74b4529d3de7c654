"""Selections without a daemon: with listeners that read nothing, and a clock set by hand."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from kvd.index.capacity import ListenerCapacity
from kvd.index.listening import ListeningRules
from kvd.index.partitions import State
from kvd.index.registry import Registry
from kvd.model import PartitionKey, RankKey
from kvd.platform.descriptors import MAX_WAITING
from kvd.selection.admission import OWNER
from kvd.selection.candidates import Candidates
from kvd.selection.options import RouterOptions
from kvd.selection.requests import PromptLookup, QueuedRequest, SelectRequest
from kvd.selection.service import Selections
from kvd.selection.worker_record import WorkerRecord
from kvd.slots.shared_loads import Ledgers
from kvd.wire.lifecycle import Lifecycle as Event
from kvd_core.base.hashing import sequence_hashes
from kvd_core.ledger.journal import Journal
from kvd_core.selector.settings import Settings
from tests.support.hashes import packed
from tests.support.idle_listeners import IdleListeners

M = PartitionKey("m", "t")
N = PartitionKey("n", "t")
BLOCK_SIZE = 4
EXPIRY_S = 100.0


class Service:
    """A selection service, and the events that it sends to its replicas."""

    def __init__(
        self,
        options: RouterOptions | None = None,
        max_ranks: int = 1000,
        seed: int = 1,
        expiry_s: float = EXPIRY_S,
        max_waiting: int = MAX_WAITING,
        ledgers: Ledgers | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.now = 1000.0
        self.state = State()
        self.listeners = IdleListeners()
        rules = ListeningRules(ListenerCapacity(max_ranks))
        self.registry = Registry(self.state, self.listeners, rules)
        self.options = options or RouterOptions()
        self.selections = Selections(
            self.state,
            self.registry,
            self.options,
            expiry_s,
            Random(seed),
            lambda: self.now,
            lambda: int(self.now * 1e9),
            ledgers=ledgers,
            max_waiting=max_waiting,
            journal=journal,
        )
        self.events: list[Event] = []
        self.selections.reservations.steps.subscribe(self.events.append)

    def candidates(self, key: PartitionKey = M) -> Candidates:
        return self.selections.candidates[key]

    def ask(self, key: PartitionKey = M, **members: Any) -> SelectRequest:
        settings: Settings = members.pop("settings", self.options.settings)
        return SelectRequest(key, settings, **members)

    def select(self, blocks: list[int], tokens: int | None = None, **members: Any) -> Any:
        """Selects for a prompt of these blocks; returns the answer, or the request if held."""
        answer = self.selections.scheduler.select(self.ask(**members), lookup(blocks, tokens))
        return answer if isinstance(answer, QueuedRequest) else json.loads(answer.answer)

    def reserve(
        self,
        reservation_id: str,
        rank: tuple[int, int],
        blocks: list[int],
        tokens: int = 0,
        key: PartitionKey = M,
    ) -> None:
        self.selections.reservations.reserve_on_rank(
            key, reservation_id, rank, lookup(blocks), tokens, predicts=True
        )

    def expire(self) -> None:
        for _ in self.selections.run_due(self.now):
            pass

    def check(self) -> None:
        """Fails unless everything that is kept twice is the same in both places."""
        selections = self.selections
        wanted: dict[RankKey, tuple[str | None, str | None]] = {}
        pools: dict[PartitionKey, list[tuple[int, int]]] = {
            key: [] for key in selections.candidates
        }
        for entry in selections.workers.entries.values():
            record = entry.record
            for dp_rank in () if entry.reasons else record.ranks:
                pools[record.key].append((record.worker_id, dp_rank))
                key = RankKey(record.key, record.worker_id, dp_rank)
                wanted[key] = record.events_endpoint(dp_rank), record.replay_endpoint
        owned = list(self.registry.owned_by(OWNER))
        heard = {
            each.key: (each.listener.endpoint, each.listener.replay_endpoint) for each in owned
        }
        assert heard == (wanted if self.options.uses_kv_events else {})
        assert self.listeners.running.keys() >= heard.keys()
        live: dict[str, Candidates] = {}
        held = 0
        for fleet_key, candidates in selections.candidates.items():
            ranks = [(each.worker_id, each.dp_rank) for each in candidates.pool.candidates]
            assert ranks == sorted(pools[fleet_key])
            assert candidates.ledger.stats()["ranks"] == len(ranks)
            records = [
                entry.record
                for _, entry in sorted(selections.workers.entries.items())
                if entry.record.key == fleet_key and not entry.reasons
            ]
            assert sorted(candidates.workers) == [record.worker_id for record in records]
            assert list(map(candidates.workers.get, sorted(candidates.workers))) == records
            self.check_pool(candidates)
            candidates.ledger.verify()
            mine = {
                name: one
                for name, one in selections.reservations.owner_of.items()
                if one is candidates
            }
            assert all(candidates.ledger.request(name) is not None for name in mine)
            assert len(mine) == candidates.ledger.stats()["requests"]
            live |= mine
            held += len(candidates.queue)
            assert candidates.ledger.loads.eased is not None or not len(candidates.queue)
        assert live.keys() == selections.reservations.owner_of.keys()
        assert held == selections.scheduler.held
        if not held:
            assert all(f.ledger.loads.eased is None for f in selections.candidates.values())
        for partition in self.state.partitions.values():
            partition.index.verify()

    def check_pool(self, candidates: Candidates) -> None:
        """Fails unless a pool's candidates agree with the catalog and with the state."""
        partition = self.state.partitions.get(candidates.key)
        for each in candidates.pool.candidates:
            record = candidates.workers[each.worker_id]
            assert each.max_num_batched_tokens == (record.max_num_batched_tokens or 0)
            assert each.total_kv_blocks == record.total_kv_blocks
            if not self.options.uses_kv_events:
                assert each.worker is None
                continue
            assert partition is not None and each.worker is partition.workers[each.worker_id]
            assert partition.has_rank(each.worker_id, each.dp_rank)
        if candidates.workers:
            assert candidates.pool.block_size == candidates.block_size


def worker(worker_id: int = 1, key: PartitionKey = M, **members: Any) -> WorkerRecord:
    """A schedulable worker with one rank, unless said otherwise."""
    valid: dict[str, Any] = {
        "worker_id": worker_id,
        "model_name": key.model_name,
        "tenant_id": key.tenant_id,
        "endpoint": f"http://worker-{worker_id}:8000",
        "block_size": BLOCK_SIZE,
    }
    valid |= members
    size = valid.get("data_parallel_size") or 1
    start = valid.get("data_parallel_start_rank") or 0
    valid.setdefault(
        "kv_events_endpoints",
        {
            rank: f"tcp://10.0.0.{worker_id}:{5000 + rank % 60000}"
            for rank in range(start, start + size)
        },
    )
    return WorkerRecord(**valid)


def lookup(blocks: list[int], tokens: int | None = None) -> PromptLookup:
    """Returns a function that looks up a prompt of these local hashes in a pool."""
    rolling = packed(sequence_hashes(blocks))
    length = len(blocks) * BLOCK_SIZE if tokens is None else tokens
    return lambda pool: pool.match(packed(blocks), rolling, length)
