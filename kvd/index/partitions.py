"""The daemon's state: one prefix index for each partition, and everything that changes it.

    State
      ├ sized: (model, tenant, block size) ──> Partition
      │                                          ├ index      kvd_core: the ranks of each block
      │                                          ├ workers    instance id ──> kvd_core worker
      │                                          └ conductor  kvd_core: publishers of KV events
      └ partitions: (model, tenant) ──> the one partition of these that faces with workers see

A partition lives as long as it has a worker or a publisher. The conductor answers over all
partitions and counts blocks of workers and of publishers. Faces with workers see one partition of
each model and tenant; the first registered worker fixes its block size. Publishers with other block
sizes have partitions of their own beside it. If the instance id of a publisher is a number, the
instance is linked to the worker with that id in the partition that these faces see: the publisher's
blocks count as the worker's there.

Workers come by registration or with a peer's dump. Workers from a dump have blocks and count in
answers, but no list shows them; they stay until they are unregistered.

Only one thread touches this state and no method awaits, so each call is one atomic change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal
from uuid import uuid4

from kvd.errors import Conflict, NotFound, too_many_partitions
from kvd.index.served_models import EVERYTHING, ServedModels
from kvd.model import MAX_PARTITIONS, InstanceId, PartitionKey, RankKey
from kvd_core.conductor.conductor import DEFAULT_SEED, Conductor, Source
from kvd_core.index.chronicle import Chronicle
from kvd_core.index.prefix_index import Budget, Dump, IngestStats, PrefixIndex, Stream, Worker

# Partitions examined in one call of State.sweep, about 0.1 ms; later calls examine the others.
SWEPT_PARTITIONS = 256

# Instances and ranks unregistered during a recovery that are kept out of it, ~150 bytes each.
# Recovery takes seconds. Beyond the bound they come back with the dump and can be unregistered
# again.
MAX_DEPARTED = 65_536

# Counters of PrefixIndex.stats(), which only grow; they outlive their partition.
TOTALS: tuple[
    Literal[
        "questions", "matched", "parked_dropped", "parked_unsalted", "removed_unknown", "rebound"
    ],
    ...,
] = (
    "questions",
    "matched",
    "parked_dropped",
    "parked_unsalted",
    "removed_unknown",
    "rebound",
)

# Questions without a single match after which a partition is reported, if none of their prompts has
# been stored since: more likely than that no engine has served them yet, they are hashed by another
# rule than the engines' blocks, or cut into blocks of another size.
UNMATCHED_QUESTIONS = 100

U64_MAX = 2**64 - 1

# Model, tenant, block size.
SizedKey = tuple[str, str, int]

# Model, tenant (None: all), instance, data-parallel rank (None: all).
_Departure = tuple[str, str | None, InstanceId, int | None]


@dataclass(slots=True)
class Partition:
    """The index of one model, tenant and block size, with its workers and publishers."""

    key: PartitionKey
    index: PrefixIndex
    conductor: Conductor
    workers: dict[InstanceId, Worker] = field(default_factory=dict)
    ranks: dict[InstanceId, set[int]] = field(default_factory=dict)  # the registered dp ranks
    sources: int = 0  # registered publishers
    linked: set[InstanceId] = field(default_factory=set)  # workers that publishers also count for
    unmatched_logged: bool = False  # the log has a line about `is_unmatched`

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.index.block_size

    @property
    def sized_key(self) -> SizedKey:
        return (*self.key, self.block_size)

    @property
    def is_unmatched(self) -> bool:
        """Returns whether questions seem to be hashed by another rule than the engines' blocks.

        Many were asked while it had blocks, none matched any, and none's prompt was stored later.
        """
        index = self.index
        many = index.matched == 0 and index.questions >= UNMATCHED_QUESTIONS
        return many and not index.stores_asked()

    def is_registered(self, instance_id: InstanceId) -> bool:
        """Returns whether any rank of the instance is registered."""
        return instance_id in self.ranks

    def rank_keys(self) -> Iterator[tuple[InstanceId, int]]:
        """Yields the instance and the data-parallel rank of every registered rank."""
        for instance_id, dp_ranks in self.ranks.items():
            for dp_rank in dp_ranks:
                yield instance_id, dp_rank

    def ranks_of(self, instance_id: InstanceId, dp_rank: int | None) -> set[int]:
        """Returns the registered ranks of an instance, narrowed to `dp_rank` if it is given."""
        registered = self.ranks.get(instance_id, set())
        return set(registered) if dp_rank is None else registered & {dp_rank}

    def has_rank(self, instance_id: InstanceId, dp_rank: int) -> bool:
        """Returns whether this rank of the instance is registered."""
        return dp_rank in self.ranks.get(instance_id, ())


class State:
    """All partitions, and the totals over them."""

    def __init__(
        self,
        hash_seed: int = DEFAULT_SEED,
        max_blocks: int = 0,
        max_partitions: int = MAX_PARTITIONS,
        served: ServedModels = EVERYTHING,
        chronicle: Chronicle | None = None,
    ) -> None:
        """All partitions together have at most `max_blocks` blocks; 0 means no bound but memory.

        Only models and tenants that are `served` here have partitions. The `chronicle`, if there is
        one, records the changes of blocks.
        """
        self.served = served
        self.chronicle = chronicle
        self.budget = Budget(max_blocks)
        self.max_partitions = max_partitions
        self.partitions: dict[PartitionKey, Partition] = {}
        self.sized: dict[SizedKey, Partition] = {}
        self._sizes: dict[PartitionKey, list[Partition]] = {}  # those of all sizes, oldest first
        self._hash_seed = hash_seed  # of sequence hashes
        self.ingest = IngestStats()
        self.refused_partitions = 0
        self.instance_id = uuid4().hex  # distinguishes this process from its peers
        self.replaced_partitions = 0  # recovered partitions that gave way to another size
        self.ended_totals = dict.fromkeys(TOTALS, 0)  # sums over ended partitions
        self.unconfirmed: set[tuple[PartitionKey, InstanceId]] = set()  # see confirm()
        self._departed: set[_Departure] | None = None
        self._to_sweep: dict[SizedKey, Partition] = {}  # left to examine in the current round
        self._ended: list[Partition] = []  # without workers and publishers, until all is freed
        self.unnoted_departures = 0  # beyond MAX_DEPARTED

    def partition(self, model_name: str, tenant_id: str) -> Partition:
        """Returns the partition or raises NotFound."""
        # A plain tuple finds the equal key, and costs a third of making a PartitionKey.
        found: Partition | None = self.partitions.get((model_name, tenant_id))  # type: ignore[call-overload]
        if found is None:
            failure = NotFound(f"no indexer for model={model_name} tenant_id={tenant_id}")
            raise failure.about((model_name, tenant_id))
        return found

    def add_rank(self, key: RankKey, block_size: int) -> Stream:
        """Registers a rank and returns the stream that applies its event batches.

        Makes the partition if it is new. Raises Conflict on another block size.
        """
        partition = self.open_partition(key.partition, block_size)
        worker = _worker(partition, key.instance_id)
        worker.register(key.dp_rank)
        partition.ranks.setdefault(key.instance_id, set()).add(key.dp_rank)
        if key.instance_id in partition.linked:
            self._link(partition, key.instance_id)
        return worker.stream(key.dp_rank)

    def remove_rank(self, key: RankKey) -> None:
        """Removes a registered rank with its blocks; an instance goes with its last rank."""
        partition = self.partitions[key.partition]
        staying = partition.ranks[key.instance_id]
        staying.discard(key.dp_rank)
        if staying:
            partition.workers[key.instance_id].unregister(key.dp_rank)
            if key.instance_id in partition.linked:
                self._link(partition, key.instance_id)
        else:
            del partition.ranks[key.instance_id]
            # Ranks known from batches alone have no registration that could outlive the instance.
            self.note_departure(*key.partition, key.instance_id, None)
            self._remove_worker(partition, key.instance_id)

    # ---- publishers

    def add_source(
        self,
        key: PartitionKey,
        block_size: int,
        instance_id: str,
        lora_name: str,
        cache_salt: str,
        dp_rank: int,
        *,
        store: bool,
    ) -> Source:
        """Registers a publisher and returns the source that applies its events.

        Raises Unavailable when there are too many partitions.
        """
        partition = self.sized.get((*key, block_size)) or self._make(key, block_size)
        source = partition.conductor.add_source(instance_id, lora_name, cache_salt, dp_rank, store)
        partition.sources += 1
        number = number_of(instance_id)
        if number is not None:
            shown = self.partitions.get(key)
            if shown is None:
                self._show(partition)
            elif shown is partition:
                self._link(partition, number)
        return source

    def remove_source(self, key: PartitionKey, block_size: int, source: Source) -> None:
        """Removes a publisher with all its blocks."""
        partition = self.sized[(*key, block_size)]
        hidden = self.partitions.get(key) is not partition
        source.remove_all()
        partition.sources -= 1
        number = number_of(source.instance_id)
        if number in partition.linked and not partition.conductor.has(source.instance_id):
            partition.linked.discard(number)
            if not partition.is_registered(number) and not self._is_restored(partition, number):
                self._remove_worker(partition, number)
        if hidden and not partition.sources:
            self._drop(partition)
        else:
            self.drop_if_empty(partition)

    def _link(self, partition: Partition, number: InstanceId) -> None:
        """Lets the blocks of an instance's publishers count as the worker's."""
        partition.conductor.link(str(number), _worker(partition, number))
        partition.linked.add(number)

    def _unlink(self, partition: Partition, number: InstanceId) -> None:
        partition.conductor.link(str(number), None)
        partition.linked.discard(number)

    def _hide(self, partition: Partition) -> None:
        """Hides a partition from the faces with workers; its publishers keep it."""
        del self.partitions[partition.key]
        for number in list(partition.linked):
            self._unlink(partition, number)
        for worker in partition.workers.values():
            worker.remove()
        partition.workers.clear()

    def _show(self, partition: Partition) -> None:
        """Makes a partition of publishers the one that faces with workers see."""
        self.partitions[partition.key] = partition
        for name in partition.conductor.instances():
            number = number_of(name)
            if number is not None:
                self._link(partition, number)

    def _show_next(self, key: PartitionKey) -> None:
        """Shows the oldest partition of publishers with an instance whose id is a number."""
        for partition in self._sizes.get(key, ()):
            if any(number_of(name) is not None for name in partition.conductor.instances()):
                self._show(partition)
                return

    # ---- workers that came with a dump

    @property
    def recovering(self) -> bool:
        """True while a dump is being restored: the state may have only a part of it."""
        return self._departed is not None

    def begin_recovery(self) -> None:
        self._departed = set()

    def end_recovery(self) -> None:
        self._departed = None

    def note_departure(
        self, model: str, tenant: str | None, instance_id: InstanceId, dp_rank: int | None
    ) -> None:
        """Keeps an unregistered instance, or one rank of it, out of the recovery under way.

        Tenant None means all tenants.
        """
        if self._departed is None:
            return
        if len(self._departed) < MAX_DEPARTED:
            self._departed.add((model, tenant, instance_id, dp_rank))
        else:
            self.unnoted_departures += 1

    def has_departed(self, key: RankKey) -> bool:
        """Returns whether a rank was unregistered during the recovery under way."""
        (model, tenant), instance_id, dp_rank = key
        return any(
            (model, of_tenant, instance_id, of_rank) in (self._departed or ())
            for of_tenant in (tenant, None)
            for of_rank in (dp_rank, None)
        )

    def drop_departed_ranks(self, partition: Partition) -> None:
        """Removes the blocks that a dump has brought for single ranks that have departed since."""
        model, tenant = partition.key
        for left, of_tenant, instance_id, dp_rank in self._departed or ():
            worker = partition.workers.get(instance_id)
            if (
                dp_rank is None
                or worker is None
                or left != model
                or of_tenant not in (None, tenant)
            ):
                continue
            if dp_rank in worker.ranks() and not partition.has_rank(instance_id, dp_rank):
                self.remove_stray(partition, instance_id, dp_rank)

    def restored_worker(self, partition: Partition, instance_id: InstanceId) -> Worker | None:
        """Returns the worker that owns a dump's blocks, None if it has departed since."""
        model, tenant = partition.key
        for of_tenant in (tenant, None):
            if (model, of_tenant, instance_id, None) in (self._departed or ()):
                return None
        self.unconfirmed.add((partition.key, instance_id))
        return _worker(partition, instance_id)

    def confirm(self, key: PartitionKey, instance_id: InstanceId) -> None:
        """Notes that the instance's stream has passed the position of its restored blocks.

        Until then an event that announces a restored block again does not count as a second copy.
        """
        self.unconfirmed.discard((key, instance_id))
        partition = self.partitions.get(key)
        if partition is not None and instance_id in partition.workers:
            partition.workers[instance_id].settled()

    def strays(
        self, instance_id: InstanceId, model_name: str, tenant_id: str | None
    ) -> list[Partition]:
        """Returns the partitions that know the instance from a dump alone."""
        return [
            partition
            for partition in self.partitions_of(model_name, tenant_id)
            if instance_id in partition.workers
            and (instance_id not in partition.linked or self._is_restored(partition, instance_id))
            and not partition.is_registered(instance_id)
        ]

    def _is_restored(self, partition: Partition, instance_id: InstanceId) -> bool:
        """Returns whether the instance is known from a dump alone."""
        return (partition.key, instance_id) in self.unconfirmed

    def remove_stray(
        self, partition: Partition, instance_id: InstanceId, dp_rank: int | None
    ) -> bool:
        """Removes an instance known from a dump, or one rank of it; False without that rank."""
        worker = partition.workers[instance_id]
        if dp_rank is not None and dp_rank not in worker.ranks():
            return False
        if dp_rank is None or worker.ranks() == [dp_rank]:
            self._remove_worker(partition, instance_id)
        else:
            worker.unregister(dp_rank)
            if instance_id in partition.linked:
                self._link(partition, instance_id)
        return True

    def drop_if_empty(self, partition: Partition) -> None:
        """Ends a partition that has no workers left; its publishers, if any, keep it."""
        if not partition.workers and self.partitions.get(partition.key) is partition:
            self._end(partition)
            self._show_next(partition.key)

    def _end(self, partition: Partition) -> None:
        if partition.sources:
            self._hide(partition)
            return
        del self.partitions[partition.key]
        self._drop(partition)

    def _make(self, key: PartitionKey, block_size: int) -> Partition:
        """Adds an empty partition, which no face with workers sees yet."""
        self.served.check(key)
        if len(self.sized) >= self.max_partitions:
            self.refused_partitions += 1
            raise too_many_partitions(self.max_partitions)
        index = PrefixIndex(block_size, self.ingest, budget=self.budget, chronicle=self.chronicle)
        partition = Partition(key, index, Conductor(index, self._hash_seed))
        if self._hash_seed != DEFAULT_SEED:
            # Only with the default seed can sequence hashes be computed later, from local hashes.
            partition.conductor.sequence(0)
        self.sized[partition.sized_key] = partition
        self._sizes.setdefault(key, []).append(partition)
        return partition

    def _drop(self, partition: Partition) -> None:
        """Forgets a partition without workers and publishers, whose blocks `sweep` frees."""
        del self.sized[partition.sized_key]
        self._to_sweep.pop(partition.sized_key, None)
        sizes = self._sizes[partition.key]
        sizes.remove(partition)
        if not sizes:
            del self._sizes[partition.key]
        for name in TOTALS:
            self.ended_totals[name] += partition.index.stats()[name]
        self._ended.append(partition)

    def _remove_worker(self, partition: Partition, instance_id: InstanceId) -> None:
        linked = instance_id in partition.linked
        if linked:
            self._unlink(partition, instance_id)
        partition.workers.pop(instance_id).remove()
        self.unconfirmed.discard((partition.key, instance_id))
        if linked:
            self._link(partition, instance_id)
        self.drop_if_empty(partition)

    # ---- walks

    def partitions_of(self, model_name: str, tenant_id: str | None) -> list[Partition]:
        """Returns the partitions of a model, or of one tenant of it; O(partitions) for all."""
        if tenant_id is not None:
            found = self.partitions.get(PartitionKey(model_name, tenant_id))
            return [] if found is None else [found]
        return [one for key, one in self.partitions.items() if key.model_name == model_name]

    def sweep(self, max_steps: int) -> bool:
        """Frees the memory of removed and cleared ranks, in small steps; True while there is more.

        Partitions that have ended come first. Also makes missing sequence hashes. Returns False,
        too, after SWEPT_PARTITIONS partitions with nothing to do; the next call goes on with the
        others.
        """
        if self._ended:
            if not self._ended[-1].index.sweep(max_steps):
                self._ended.pop()
            return True
        for _ in range(min(SWEPT_PARTITIONS, len(self.sized))):
            if not self._to_sweep:
                self._to_sweep = dict(self.sized)
            key, partition = self._to_sweep.popitem()
            if partition.index.sweep(max_steps):
                self._to_sweep[key] = partition
                return True
        return False

    def dump(self, binary: bool = False) -> Iterator[tuple[Partition, Dump]]:
        """Yields every partition with its dump; leaves out partitions that end meanwhile."""
        for key in list(self.partitions):
            partition = self.partitions.get(key)
            if partition is not None:
                yield partition, partition.index.dump(binary)

    def open_partition(self, key: PartitionKey, block_size: int) -> Partition:
        """Returns the partition, made if it is new; raises Conflict on another block size.

        A partition without registered ranks gives way to the new block size: nobody who is
        registered could read it.
        """
        partition = self.partitions.get(key)
        if partition is not None and partition.block_size != block_size:
            if partition.ranks:
                raise Conflict(
                    f"block_size mismatch for model={key.model_name} tenant_id={key.tenant_id}: "
                    f"existing={partition.block_size}, requested={block_size}"
                )
            self.replaced_partitions += not partition.sources
            self.unconfirmed.difference_update((key, id_) for id_ in partition.workers)
            self._end(partition)
            partition = None
        if partition is None:
            partition = self.sized.get((*key, block_size)) or self._make(key, block_size)
            self._show(partition)
        return partition


def number_of(instance_id: str) -> int | None:
    """Returns the 64-bit number that an id writes in plain decimal digits, else None."""
    if not (instance_id.isascii() and instance_id.isdigit() and len(instance_id) <= 20):
        return None
    number = int(instance_id)
    return number if number <= U64_MAX and str(number) == instance_id else None


def _worker(partition: Partition, instance_id: InstanceId) -> Worker:
    """Returns the instance's worker, made if it is new."""
    worker = partition.workers.get(instance_id)
    if worker is None:
        worker = partition.workers[instance_id] = partition.index.add_worker(instance_id)
    return worker
