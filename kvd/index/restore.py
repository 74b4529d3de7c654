"""Brings a dump of a peer or of an earlier process into the state: all of it, or none.

    entries ── plan ──> every entry has its partition, nothing contradicts ── restore ──> blocks
                 │
                 └─ Conflict, Invalid: nothing has changed

Both steps work in slices, between which queries are served and see the index grow as it does with
live events. A registration between two slices wins: if it fixes another block size for a partition,
the dump's blocks for that partition are left out, just as they would give way to a later
registration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import trio

from kvd.errors import Conflict, Invalid, Unavailable
from kvd.index.partitions import Partition, State
from kvd.model import InstanceId, PartitionKey, is_name
from kvd_core.dump.recovery import StagedEntry
from kvd_core.index.prefix_index import Worker

# Blocks stored between two checkpoints: 0.1 to 0.7 ms.
SLICE_BLOCKS = 2048

# Entries and workers examined or made between two checkpoints: about 1 ms, at 8 us each.
SLICE_WORKERS = 128


@dataclass(frozen=True, slots=True)
class Planned:
    """One entry of a dump, and the partition to which it belongs."""

    key: PartitionKey
    entry: StagedEntry
    workers: list[InstanceId]  # as the entry lists them


def plan(state: State, entries: Sequence[StagedEntry]) -> Iterator[Planned | None]:
    """Yields the plan of every entry that has blocks, and None after every slice of the work.

    Nothing may be restored before the end. Raises Conflict if an entry's block size differs from
    that of the registered partition or of another entry of the same partition; Invalid on entries
    that fit no valid partition and on workers that nobody could unregister; ValueError on names
    that are no texts.
    """
    named: dict[str, PartitionKey] = {}
    for key in state.partitions:
        named.setdefault(str(key), key)
    sizes: dict[PartitionKey, int] = {}
    for number, entry in enumerate(entries, 1):
        if number % SLICE_WORKERS == 0:
            yield None
        if not entry.blocks:
            continue
        key = _key(named, entry)
        if not state.served.serves(key):
            continue
        if not all(map(is_name, key)):
            raise Invalid(f"the dump's entry {str(key)!r} has control characters in its name")
        if not entry.block_size:
            raise Invalid(f"the dump's entry {key} has a block size of 0")
        known = state.partitions.get(key)
        size = sizes.setdefault(key, known.block_size if known else entry.block_size)
        if size != entry.block_size:
            raise Conflict(
                f"block_size mismatch for model={key.model_name} "
                f"tenant_id={key.tenant_id}: existing={size}, dumped={entry.block_size}"
            )
        workers: list[InstanceId] = []
        for start in range(0, entry.worker_count, SLICE_WORKERS):
            workers += map(_instance_id, entry.workers(start, start + SLICE_WORKERS))
            yield None
        yield Planned(key, entry, workers)
    if len(state.partitions.keys() | sizes.keys()) > state.max_partitions:
        raise Invalid(f"the dump has more than {state.max_partitions} models and tenants")


async def planned_of(state: State, entries: Sequence[StagedEntry]) -> list[Planned]:
    """Returns all that `plan` yields, and lets other tasks run; raises as `plan` does."""
    planned: list[Planned] = []
    for item in plan(state, entries):
        planned += [item] if item else []
        await trio.lowlevel.checkpoint()
    return planned


async def bring_in(state: State, planned: Iterable[Planned], note: Callable[[int], None]) -> None:
    """Restores a plan, and lets other tasks run; calls `note` with the blocks stored so far."""
    for blocks in restore(state, planned):
        note(blocks)
        await trio.lowlevel.checkpoint()


def restore(state: State, planned: Iterable[Planned]) -> Iterator[int]:
    """Restores a plan; yields the number of blocks stored so far after every slice.

    Leaves out workers that were unregistered since the recovery began, and partitions that a
    registration has replaced.
    """
    stored = 0
    for item in planned:
        workers: list[Worker | None] = []
        partition = None
        for start in range(0, len(item.workers), SLICE_WORKERS):
            partition = _open(state, item, start, workers)
            yield stored
        step = item.entry.restore()
        more = partition is not None
        while more and partition is not None and state.partitions.get(item.key) is partition:
            more = step.apply(partition.index, workers, SLICE_BLOCKS)
            state.drop_departed_ranks(partition)
            yield stored + step.blocks
        stored += step.blocks


def _instance_id(worker_id: int | str) -> InstanceId:
    if isinstance(worker_id, str):
        raise Invalid(f"the dump's worker {worker_id!r} is a text, but instances have numbers here")
    return worker_id


def _key(named: Mapping[str, PartitionKey], entry: StagedEntry) -> PartitionKey:
    """Returns an entry's partition; dumps by other programs only name it `model:tenant`.

    A colon in a name makes that ambiguous. If a partition here has that text as its name, it is
    meant. Otherwise the tenant follows the last colon, because models have colons in their names
    (`llama3:8b`) and tenants hardly do.
    """
    model_name, tenant_id = entry.model_name, entry.tenant_id
    if model_name is not None and tenant_id is not None:
        return PartitionKey(model_name, tenant_id)
    if entry.key in named:
        return named[entry.key]
    model_name, colon, tenant_id = entry.key.rpartition(":")
    if not colon:
        raise Invalid(f"the dump's entry {entry.key!r} is not of the form model:tenant")
    return PartitionKey(model_name, tenant_id)


def _open(
    state: State, item: Planned, start: int, workers: list[Worker | None]
) -> Partition | None:
    """Makes the partition and a slice of its workers; None stands for those to be left out.

    If the partition has ended between two slices, all its workers have been unregistered.
    """
    wanted = item.workers[start : start + SLICE_WORKERS]
    try:
        partition = state.open_partition(item.key, item.entry.block_size)
    except (Conflict, Unavailable):  # with a registration made since the plan
        workers += [None] * len(wanted)
        return None
    workers += [state.restored_worker(partition, id_) for id_ in wanted]
    state.drop_if_empty(partition)
    return partition
