"""The ranks that any face knows, each once: its stream, its part in choices, its load, its blocks.

    selection catalog ─┐
    registrations      ├──> RankKey ──> row    registrations are those of indexer and selections
    slot trackers     ─┘

At most MAX_RANKS ranks are shown. The picture's list of streams that are not exact is of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvd.faces.ui.history import MAX_RANKS, RankCurves
from kvd.index.partitions import State
from kvd.index.registry import Registry
from kvd.model import RankKey
from kvd.selection.service import Selections
from kvd.selection.worker_record import WorkerLifecycle
from kvd.slots.trackers import SlotTrackers
from kvd.wire.event_stream import EventStream, StreamHealth
from kvd_core.index.branches import holdings
from kvd_core.index.prefix_index import TIERS
from kvd_core.ledger.ledger import Load


@dataclass(frozen=True, slots=True)
class RankRows:
    """Reads the parts that know ranks."""

    state: State
    registry: Registry
    slots: SlotTrackers
    selections: Selections

    def first(self) -> list[RankKey]:
        """Returns the first MAX_RANKS ranks, and one more if there are more."""
        found: dict[RankKey, None] = {}
        for key in self._every():
            found[key] = None
            if len(found) > MAX_RANKS:
                break
        return list(found)

    def _every(self) -> Iterator[RankKey]:
        chosen = (
            RankKey(entry.record.key, entry.record.worker_id, dp_rank)
            for entry in self.selections.workers.entries.values()
            for dp_rank in entry.record.ranks[: MAX_RANKS + 1]
        )
        registered = (registration.key for registration in self.registry.registrations())
        tracked = (
            RankKey(tracker.key, worker_id, dp_rank)
            for tracker in self.slots.trackers.values()
            for worker_id, ranks in tracker.workers.items()
            for dp_rank in ranks
        )
        return chain(chosen, registered, tracked)

    def load(self, key: RankKey) -> Load | None:
        """Returns the load of a rank; None if no face books on it."""
        instance_id = key.instance_id
        if not isinstance(instance_id, int):
            return None
        owners = self.selections.candidates, self.slots.trackers
        for owner in (each.get(key.partition) for each in owners):
            rank = None if owner is None else owner.ledger.rank_of(instance_id, key.dp_rank)
            if owner is not None and rank is not None:
                return owner.ledger.load(rank)
        return None

    def requests(self, key: RankKey) -> int | None:
        """Returns how many requests run on a rank."""
        load = self.load(key)
        return None if load is None else load.requests


@dataclass(slots=True)
class Rows:
    """Writes rows of ranks; what a worker's ranks hold is looked up once."""

    ranks: RankRows
    now: float  # monotonic seconds
    _held: dict[object, dict[int, tuple[int, ...]]] = field(default_factory=dict)

    def row(self, key: RankKey, curves: RankCurves | None) -> dict[str, Any]:
        row: dict[str, Any] = named(key)
        listener = self.ranks.registry.find_listener(key)
        if listener is not None:
            row |= self.stream(listener)
        row |= self._rank_state(key)
        if (load := self.ranks.load(key)) is not None:
            row["load"] = load._asdict()
        if (held := self._blocks(key)) is not None:
            row["blocks"] = dict(zip(TIERS, held, strict=True))
        if curves is not None:
            row["requests"] = list(curves.requests)
            row["cached_share"] = list(curves.cached_share)
        return row

    def stream(self, listener: EventStream) -> dict[str, Any]:
        """Returns the health and status of a stream, and why it is not exact."""
        shown: dict[str, Any] = {"stream": listener.health(self.now), "status": listener.status}
        notes = [listener.link.quiet, listener.link.last_error, listener.loss]
        if shown["stream"] != StreamHealth.EXACT and (why := ", ".join(str(x) for x in notes if x)):
            shown["why"] = why
        return shown

    def _rank_state(self, key: RankKey) -> dict[str, Any]:
        """Returns whether the selection service can choose the rank; {} if it lacks the rank."""
        workers, instance_id = self.ranks.selections.workers, key.instance_id
        entry = workers.entries.get(instance_id) if isinstance(instance_id, int) else None
        if entry is None or entry.record.key != key.partition:
            return {}
        lifecycle = workers.lifecycle(entry)
        shown: dict[str, Any] = {"lifecycle": lifecycle}
        if entry.record.total_kv_blocks is not None:
            shown["total_blocks"] = entry.record.total_kv_blocks
        absent = workers.absent(entry)
        if lifecycle is not WorkerLifecycle.SCHEDULABLE:
            shown["reasons"] = entry.reasons + list(absent.values())
        return shown

    def _blocks(self, key: RankKey) -> tuple[int, ...] | None:
        worker_key = key.partition, key.instance_id
        if worker_key not in self._held:
            partition = self.ranks.state.partitions.get(key.partition)
            worker = None if partition is None else partition.workers.get(key.instance_id)
            self._held[worker_key] = {} if worker is None else holdings(worker)
        return self._held[worker_key].get(key.dp_rank)


def named(key: RankKey) -> dict[str, Any]:
    """Returns the members that name a rank; ids are texts, as browsers would round large ones."""
    return {
        "model_name": key.partition.model_name,
        "tenant_id": key.partition.tenant_id,
        "worker_id": str(key.instance_id),
        "dp_rank": key.dp_rank,
    }
