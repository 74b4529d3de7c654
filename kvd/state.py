"""The daemon's state: one prefix index per partition. Everything that changes it is here.

    State
      └ partitions: (model, tenant) ──> Partition
                                          ├ index     kvd_core: who holds which blocks
                                          └ workers   instance id ──> kvd_core worker

A partition lives as long as it has a registered rank; its block size is fixed by the first one.
All of it is touched by one thread only, and no method awaits: each call is one atomic change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvd.errors import Conflict, NotFound, Unavailable
from kvd.model import InstanceId, PartitionKey, RankKey
from kvd_core.index import IngestCounters, PrefixIndex, Stream, Worker

# An empty partition costs about 31 KB; 16,384 of them 640 MB. Real fleets have some hundred.
MAX_PARTITIONS = 16_384


@dataclass(slots=True)
class Partition:
    """The index of one model and tenant, and the workers registered for it."""

    key: PartitionKey
    index: PrefixIndex
    workers: dict[InstanceId, Worker] = field(default_factory=dict)
    ranks: set[tuple[InstanceId, int]] = field(default_factory=set)  # the registered ones

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.index.block_size


class State:
    """All partitions, and the totals over them."""

    def __init__(self) -> None:
        self.partitions: dict[PartitionKey, Partition] = {}
        self.ingest = IngestCounters()
        self.refused_partitions = 0

    def partition(self, model_name: str, tenant_id: str) -> Partition:
        """Returns the partition or raises NotFound."""
        # A plain tuple finds the key that equals it, for a third of what making a key costs.
        found: Partition | None = self.partitions.get((model_name, tenant_id))  # type: ignore[call-overload]
        if found is None:
            raise NotFound(f"no indexer for model={model_name} tenant_id={tenant_id}")
        return found

    def add_rank(self, key: RankKey, block_size: int) -> Stream:
        """Registers a rank and returns what its event batches are to be given to.

        Makes the partition when it is the first. Raises Conflict on another block size.
        """
        partition = self._open_partition(key.partition, block_size)
        worker = partition.workers.get(key.instance_id)
        if worker is None:
            worker = partition.workers[key.instance_id] = partition.index.add_worker(
                key.instance_id
            )
        worker.register(key.dp_rank)
        partition.ranks.add((key.instance_id, key.dp_rank))
        return worker.stream(key.dp_rank)

    def remove_rank(self, key: RankKey) -> None:
        """Removes one registered rank with its blocks; the last one takes the instance along."""
        partition = self.partitions[key.partition]
        partition.ranks.discard((key.instance_id, key.dp_rank))
        if any(instance_id == key.instance_id for instance_id, _ in partition.ranks):
            partition.workers[key.instance_id].unregister(key.dp_rank)
        else:
            # Ranks that only batches named have no registration of their own to outlive this.
            partition.workers.pop(key.instance_id).remove()
        if not partition.ranks:
            del self.partitions[key.partition]

    def sweep(self, max_blocks: int) -> bool:
        """Frees about `max_blocks` blocks of removed ranks; True while there are more."""
        return any(partition.index.sweep(max_blocks) for partition in self.partitions.values())

    def dump(self) -> Iterator[tuple[Partition, Iterator[bytes]]]:
        """Yields every partition with its dump; partitions that vanish meanwhile are left out."""
        for key in list(self.partitions):
            partition = self.partitions.get(key)
            if partition is not None:
                yield partition, _events(partition.index)

    def _open_partition(self, key: PartitionKey, block_size: int) -> Partition:
        partition = self.partitions.get(key)
        if partition is None:
            if len(self.partitions) >= MAX_PARTITIONS:
                self.refused_partitions += 1
                raise Unavailable(f"there are {MAX_PARTITIONS} models and tenants already")
            index = PrefixIndex(block_size, self.ingest)
            partition = self.partitions[key] = Partition(key, index)
        elif partition.block_size != block_size:
            raise Conflict(
                f"block_size mismatch for model={key.model_name} tenant_id={key.tenant_id}: "
                f"existing={partition.block_size}, requested={block_size}"
            )
        return partition


# Bytes of a dump written between two checkpoints: about 0.2 ms of work.
DUMP_SLICE_BYTES = 64 * 1024


def _events(index: PrefixIndex) -> Iterator[bytes]:
    dump = index.dump()
    while piece := dump.read(DUMP_SLICE_BYTES):
        yield piece
