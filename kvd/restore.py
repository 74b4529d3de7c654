"""Brings a peer's dump into the state: all of it, or none.

    entries ── plan ──> every entry has its partition, nothing contradicts ── restore ──> blocks
                 │
                 └─ Conflict, Invalid: nothing has changed

Restoring goes in slices, between which queries are served; what they see grows as it does with
live events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvd.errors import Conflict, Invalid
from kvd.model import PartitionKey
from kvd.state import MAX_PARTITIONS, Partition, State
from kvd_core.index import Worker
from kvd_core.recovery import StagedEntry

# Blocks stored between two checkpoints: about 1 ms.
SLICE_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Planned:
    """One entry of a dump and where it belongs."""

    key: PartitionKey
    entry: StagedEntry


def plan(state: State, entries: Sequence[StagedEntry]) -> list[Planned]:
    """Returns where every entry with blocks goes.

    Raises Conflict on another block size than the one registered, or than that of another entry
    of the same partition; Invalid on what no partition can be found for. ValueError on names that
    are no texts.
    """
    planned = [Planned(_key(state, entry), entry) for entry in entries if entry.blocks]
    sizes: dict[PartitionKey, int] = {}
    for item in planned:
        known = state.partitions.get(item.key)
        size = sizes.setdefault(item.key, known.block_size if known else item.entry.block_size)
        if size != item.entry.block_size:
            raise Conflict(
                f"block_size mismatch for model={item.key.model_name} "
                f"tenant_id={item.key.tenant_id}: existing={size}, dumped={item.entry.block_size}"
            )
        item.entry.workers()  # the ids are checked here, where refusing is free
    if len(state.partitions.keys() | sizes.keys()) > MAX_PARTITIONS:
        raise Invalid(f"the dump has more than {MAX_PARTITIONS} models and tenants")
    return planned


def restore(state: State, planned: Sequence[Planned]) -> Iterator[int]:
    """Stores what was planned; yields the blocks stored so far after every slice.

    Workers that were unregistered since the recovery began stay away.
    """
    opened = [(_open(state, item), item.entry) for item in planned]
    stored = 0
    for (partition, workers), entry in opened:
        step = entry.restore()
        more = True
        while more:
            more = step.apply(partition.index, workers, SLICE_BLOCKS)
            yield stored + step.blocks
        stored += step.blocks


def _key(state: State, entry: StagedEntry) -> PartitionKey:
    """Returns an entry's partition; a dump from elsewhere has it as `model:tenant` only.

    A colon in a name makes that ambiguous. What is registered here decides; else the tenant is
    behind the last colon, because models have them (`llama3:8b`) and tenants hardly do.
    """
    model_name, tenant_id = entry.model_name, entry.tenant_id
    if model_name is not None and tenant_id is not None:
        return PartitionKey(model_name, tenant_id)
    named = entry.key
    for key in state.partitions:
        if str(key) == named:
            return key
    model_name, colon, tenant_id = named.rpartition(":")
    if not colon:
        raise Invalid(f"the dump's entry {named!r} is not of the form model:tenant")
    return PartitionKey(model_name, tenant_id)


def _open(state: State, item: Planned) -> tuple[Partition, list[Worker | None]]:
    """Makes the partition and its workers; None stands for those not wanted any more."""
    partition = state.open_partition(item.key, item.entry.block_size)
    workers = [state.restored_worker(partition, id_) for id_ in item.entry.workers()]
    state.drop_if_empty(partition)
    return partition, workers
