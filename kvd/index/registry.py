"""Registrations of ranks by the faces with workers and by files, each with its listener.

    register ──> State.add_rank ──> EventStream ──> Listeners.start     (net: a supervised task)
    unregister ──> Listeners.stop, awaited ──> State.remove_rank

A rank's position in its engine's event stream outlives the registration. If the worker is
registered again at the same endpoint, its stream goes on there, and missed messages show as a gap.
"""

from __future__ import annotations

import math
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from functools import partial

import trio

from kvd.errors import Conflict, NotFound
from kvd.index.listening import ListenedRegistrations, Listeners, ListeningRules
from kvd.index.partitions import Partition, State
from kvd.model import InstanceId, Observers, PartitionKey, RankKey
from kvd.telemetry.stretches import UNREGISTRATION
from kvd.wire.endpoints import Addresses
from kvd.wire.event_stream import EventStream
from kvd.wire.position import StreamPosition
from kvd.wire.stream_link import ListenerStatus

# Stream positions kept for ranks that have left, ~300 bytes each; the rank that left longest ago is
# forgotten first. A fleet replaces its pods many times over before that many ranks have left.
MAX_LEFT_POSITIONS = 65_536

# Time for which a model and tenant without workers keep their block size: a worker may leave before
# its replacement is there.
LEFT_PAIR_S = 60.0
# Models and tenants that are remembered after their last worker has left, about 200 bytes each; the
# pair left longest ago is forgotten first.
MAX_LEFT_PAIRS = 16_384

CHECKED_AT_ONCE = 512  # ranks that are to be registered or taken over between two checkpoints: 1 ms
GROUPED_AT_ONCE = 1024  # registrations grouped by instance before other tasks run: 1 ms

# The endpoint of a stream, and the position that another process had reached there.
KeptPosition = tuple[str, StreamPosition]

INDEXER = "indexer"  # the face that registers if no other is named


@dataclass(frozen=True, slots=True)
class RegisteredRank:
    """A rank as it is registered."""

    key: RankKey
    endpoint: str
    block_size: int  # tokens
    replay_endpoint: str | None
    server_key: str | None  # its public CURVE key; None without CURVE

    def register(self, registry: Registry) -> None:
        registry.register(
            self.key,
            self.endpoint,
            self.block_size,
            self.replay_endpoint,
            server_key=self.server_key,
        )


@dataclass(frozen=True, slots=True)
class Registration:
    """One rank as it was registered, and its listener."""

    key: RankKey
    listener: EventStream
    owners: set[str]  # the faces that have registered it; if empty, it is being removed


class Registry(ListenedRegistrations):
    """The registered ranks of all faces; a rank that two faces register has one listener."""

    def __init__(
        self, state: State, listeners: Listeners, rules: ListeningRules | None = None
    ) -> None:
        super().__init__(state, listeners, rules)
        self._ranks: dict[RankKey, Registration] = {}
        self._left: dict[tuple[RankKey, str], int] = {}  # by rank and endpoint: next number
        self._kept: dict[RankKey, KeptPosition] = {}  # see `take_over`
        # Models and tenants whose last worker has left: when it did (monotonic), and its block
        # size, in tokens.
        self._left_pairs: dict[PartitionKey, tuple[float, int]] = {}
        self.forgotten_positions = 0
        # Awaited after every unregistration.
        self.departures: list[Callable[[], Awaitable[object]]] = []
        # Called when the connection to a rank's engine has been made or lost.
        self.links: Observers[[RankKey]] = Observers()
        self._growth = trio.lowlevel.ParkingLot()  # where tasks wait for registrations

    def __len__(self) -> int:
        return len(self._ranks)

    def find(self, key: RankKey) -> Registration | None:
        return self._ranks.get(key)

    def find_listener(self, key: RankKey) -> EventStream | None:
        found = self._ranks.get(key)
        return None if found is None else found.listener

    def registrations(self) -> Iterable[Registration]:
        return self._ranks.values()

    def owned_by(self, owner: str) -> Iterable[Registration]:
        """Returns the registrations of one face."""
        return [each for each in self._ranks.values() if owner in each.owners]

    def registrations_of(
        self, key: PartitionKey, instance_id: InstanceId, ranks: range
    ) -> Iterator[tuple[int, Registration]]:
        """Yields those ranks of an instance that are registered, ascending, with their dp rank.

        Others may run meanwhile: a rank that they remove is left out.
        """
        partition = self._state.partitions.get(key)
        there = () if partition is None else partition.ranks.get(instance_id, ())
        for dp_rank in sorted(there):
            found = self._ranks.get(RankKey(key, instance_id, dp_rank))
            if found is not None and dp_rank in ranks:
                yield dp_rank, found

    def block_size(self, registration: Registration) -> int:
        """Returns the tokens per block of a registration's partition."""
        return self._state.partitions[registration.key.partition].block_size

    def instances(self) -> int:
        """Counts distinct instances."""
        return len({(key.partition, key.instance_id) for key in self._ranks})

    async def wait_for_instances(self, count: int) -> None:
        """Waits until at least `count` instances are registered."""
        while self.instances() < count:
            await self._growth.park()

    def register(
        self,
        key: RankKey,
        endpoint: str,
        block_size: int,
        replay_endpoint: str | None,
        owner: str = INDEXER,
        server_key: str | None = None,
    ) -> None:
        """Registers a rank and starts to listen to it, whether its worker is up or not.

        If another face has registered the rank at the same address, both share its listener. Raises
        BadRequest on a faulty endpoint, Conflict with an existing registration or block size,
        Unavailable at a bound; nothing has changed then.
        """
        addresses = Addresses(endpoint, replay_endpoint, server_key)
        self._check_addresses(addresses)
        known = self._ranks.get(key)
        if known is not None:
            if (
                not known.owners
                or owner in known.owners
                or not self._is_same(known, addresses, block_size)
            ):
                raise Conflict(
                    f"instance {key.instance_id} dp_rank {key.dp_rank} already registered"
                )
            known.owners.add(owner)
            self.changes += 1
            return
        self._check_capacity()
        stream = self._state.add_rank(key, block_size)
        expected = self._left.pop((key, endpoint), 0)
        listener = EventStream(
            str(key),
            endpoint,
            stream,
            replay_endpoint,
            expected,
            server_key,
            self._stale_after_s,
            on_link=lambda: self.links.notify(key),
        )
        # Without restored blocks, they were removed meanwhile. To ask for them takes O(ranks).
        if key in self._kept and stream.restored():
            self._take_over(key, listener)
        self._ranks[key] = Registration(key, listener, {owner})
        self._start(key, listener)
        self._growth.unpark_all()

    async def take_over(self, positions: Mapping[RankKey, KeptPosition]) -> None:
        """Lets streams go on at another process's positions; their blocks are restored.

        Others run meanwhile: what they register finds its position if that is kept already.

        Positions of ranks that are not registered yet are kept until they are unregistered or
        registered, or until `give_up`. A rank that was unregistered during the recovery lacks
        blocks, even if it is registered again, so its position is dropped. A rank that is now
        registered at another endpoint is another engine: its blocks are dropped.
        """
        for number, (key, kept) in enumerate(positions.items(), 1):
            if not self._state.has_departed(key):
                self._kept[key] = kept
            if number % CHECKED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        for number, key in enumerate(list(self._ranks), 1):
            if (registration := self._ranks.get(key)) is not None:
                self._take_over(key, registration.listener)
            if number % CHECKED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    def _take_over(self, key: RankKey, listener: EventStream) -> None:
        endpoint, position = self._kept.pop(key, (None, None))
        if position is not None and endpoint == listener.endpoint:
            listener.take_over(position)
        elif position is not None:
            listener.batches.drop_restored()

    def _drop_kept(
        self, instance_id: InstanceId, model_name: str, tenant_id: str | None, dp_rank: int | None
    ) -> None:
        """Drops the kept positions of ranks whose restored blocks go; None means all."""
        for key in list(self._kept):
            if (
                (key.instance_id, key.partition.model_name) == (instance_id, model_name)
                and tenant_id in (None, key.partition.tenant_id)
                and dp_rank in (None, key.dp_rank)
            ):
                del self._kept[key]

    def give_up(self, restored: Iterable[tuple[PartitionKey, InstanceId]]) -> int:
        """Drops restored instances that nobody has registered; returns how many."""
        self._kept.clear()
        dropped = 0
        for key, instance_id in restored:
            for partition in self._state.strays(instance_id, *key):
                dropped += self._state.remove_stray(partition, instance_id, None)
        return dropped

    def check(
        self,
        key: PartitionKey,
        addresses: Iterable[tuple[RankKey, Addresses]],
        block_size: int,
        owner: str,
        leaving: Container[InstanceId],
    ) -> Iterator[None]:
        """Raises the error that registering these ranks would raise; rests at every yield.

        The owner's `leaving` instances count as gone. O(ranks in `addresses`). With another block
        size O(ranks of the partition): that is a conflict unless all of them leave.
        """
        partition = self._state.partitions.get(key)
        if partition is not None and partition.block_size != block_size:
            for number, each in enumerate(list(partition.rank_keys()), 1):
                known = self._ranks.get(RankKey(key, *each))
                if known is not None and not _leaves(known, owner, leaving):
                    raise Conflict(
                        f"block_size mismatch for model={key.model_name} tenant_id={key.tenant_id}:"
                        f" existing={partition.block_size}, requested={block_size}"
                    )
                if number % CHECKED_AT_ONCE == 0:
                    yield
        new = 0
        for number, (rank, wanted) in enumerate(addresses, 1):
            known = self._ranks.get(rank)
            if known is None:
                new += 1
            elif not _leaves(known, owner, leaving) and known.listener.addresses != wanted:
                raise Conflict(
                    f"instance {rank.instance_id} dp_rank {rank.dp_rank} already registered"
                )
            if number % CHECKED_AT_ONCE == 0:
                yield
        self._check_capacity(new)

    def _is_same(self, known: Registration, addresses: Addresses, block_size: int) -> bool:
        known_size = self.block_size(known)
        return known.listener.addresses == addresses and known_size == block_size

    async def unregister(
        self,
        instance_id: InstanceId,
        model_name: str,
        tenant_id: str | None,
        dp_rank: int | None,
        owner: str = INDEXER,
    ) -> None:
        """Removes an instance, or one rank of it, from one tenant or from all of the model.

        Ranks that are known from a dump alone are removed, too. Ranks that another face has also
        registered go on. Raises NotFound if this face has none of them. Returns when the listeners
        have ended and the blocks no longer count.
        """
        self._state.note_departure(model_name, tenant_id, instance_id, dp_rank)
        self._drop_kept(instance_id, model_name, tenant_id, dp_rank)
        partitions = self._state.partitions_of(model_name, tenant_id)
        strays = [
            self._state.remove_stray(partition, instance_id, dp_rank)
            for partition in self._state.strays(instance_id, model_name, tenant_id)
        ]
        leaving = [
            self._ranks[RankKey(partition.key, instance_id, rank)]
            for partition in partitions
            for rank in partition.ranks_of(instance_id, dp_rank)
        ]
        leaving = [each for each in leaving if owner in each.owners or not each.owners]
        if not leaving and not any(strays):
            raise NotFound(_not_found(instance_id, model_name, tenant_id, dp_rank))
        await self._leave_all(leaving, owner, partitions)

    async def unregister_ranks(
        self, key: PartitionKey, instance_id: InstanceId, dp_ranks: Collection[int], owner: str
    ) -> None:
        """Removes ranks of an instance that a face has registered; returns as `unregister` does."""
        for dp_rank in dp_ranks:
            self._state.note_departure(*key, instance_id, dp_rank)
            self._kept.pop(RankKey(key, instance_id, dp_rank), None)
        leaving = [self._ranks[RankKey(key, instance_id, dp_rank)] for dp_rank in dp_ranks]
        await self._leave_all(leaving, owner, [self._state.partitions[key]])

    async def _leave_all(
        self, leaving: Iterable[Registration], owner: str, partitions: Iterable[Partition]
    ) -> None:
        """Removes registrations, of these partitions, for one face."""
        # Shielded: a client that goes away must not leave a rank registered without its listener.
        with trio.CancelScope(shield=True):
            self.changes += 1
            for registration in leaving:
                registration.owners.discard(owner)
            await self._end_all(partial(self._leave, each) for each in leaving if not each.owners)
            self._note_left(partitions)
            for departed in self.departures:
                await departed()

    async def _leave(self, registration: Registration) -> None:
        await self._stop(registration)
        if self._is_current(registration):
            self._remove(registration)

    async def pause(
        self,
        instance_id: InstanceId,
        dp_rank: int,
        model_name: str | None = None,
        tenant_id: str | None = None,
    ) -> None:
        """Stops listening to a rank, which keeps its blocks; returns when its listener has ended.

        None stands for any model or tenant. Raises NotFound if the rank is not registered, Conflict
        if it is paused already.
        """
        found = self._in_state(instance_id, dp_rank, model_name, tenant_id, paused=False)
        for registration in found:
            with trio.CancelScope(shield=True):
                await self._stop(registration)
            registration.listener.paused(trio.current_time())

    def resume(
        self,
        instance_id: InstanceId,
        dp_rank: int,
        model_name: str | None = None,
        tenant_id: str | None = None,
    ) -> None:
        """Listens to a paused rank again; missed messages show as a gap.

        None as in `pause`. Raises NotFound if the rank is not registered, Conflict if it is not
        paused.
        """
        found = self._in_state(instance_id, dp_rank, model_name, tenant_id, paused=True)
        for registration in found:
            registration.listener.connecting()
            self._listeners.start(registration.key, registration.listener)

    def _in_state(
        self,
        instance_id: InstanceId,
        dp_rank: int,
        model_name: str | None,
        tenant_id: str | None,
        *,
        paused: bool,
    ) -> list[Registration]:
        """Returns the rank's registrations, one per partition, that are or are not paused."""
        named = [
            registration
            for key, registration in self._ranks.items()
            if key.instance_id == instance_id
            and key.dp_rank == dp_rank
            and model_name in (None, key.partition.model_name)
            and tenant_id in (None, key.partition.tenant_id)
        ]
        if not named:
            raise NotFound(f"instance {instance_id} dp_rank {dp_rank} not found")
        found = [
            registration
            for registration in named
            if (registration.listener.status is ListenerStatus.PAUSED) is paused
        ]
        if not found:
            state = "not paused" if paused else "paused already"
            raise Conflict(f"instance {instance_id} dp_rank {dp_rank} is {state}")
        return found

    def _is_current(self, registration: Registration) -> bool:
        """Returns whether no other call has meanwhile removed or replaced the registration."""
        return self._ranks.get(registration.key) is registration

    async def _stop(self, registration: Registration) -> None:
        """Ends the listener of a registration, never that of a later registration of the rank.

        It repeats, since another call may have resumed the listener as soon as it had ended.
        """
        while self._is_current(registration) and await self._listeners.stop(registration.key):
            pass

    def block_size_left(self, key: PartitionKey) -> int | None:
        """Returns the block size of a model and tenant whose last worker left recently, or None."""
        left_at, block_size = self._left_pairs.get(key, (-math.inf, 0))
        return block_size if trio.current_time() - left_at < LEFT_PAIR_S else None

    def _note_left(self, partitions: Iterable[Partition]) -> None:
        """Remembers the block sizes of those partitions that have just ended."""
        for partition in partitions:
            if partition.key in self._state.partitions:
                continue
            self._left_pairs.pop(partition.key, None)  # the youngest is last
            self._left_pairs[partition.key] = trio.current_time(), partition.block_size
            if len(self._left_pairs) > MAX_LEFT_PAIRS:
                del self._left_pairs[next(iter(self._left_pairs))]

    def _remove(self, registration: Registration) -> None:
        key, listener = registration.key, registration.listener
        del self._ranks[key]
        with UNREGISTRATION:
            self._state.remove_rank(key)
        self._end(listener)
        self._left[key, listener.endpoint] = listener.cursor.expected
        if len(self._left) > MAX_LEFT_POSITIONS:
            del self._left[next(iter(self._left))]
            self.forgotten_positions += 1


def _leaves(known: Registration, owner: str, leaving: Container[InstanceId]) -> bool:
    """Returns whether a rank counts as gone once the owner's `leaving` instances are."""
    owners = known.owners
    return not owners or (known.key.instance_id in leaving and owners == {owner})


def _not_found(
    instance_id: InstanceId, model_name: str, tenant_id: str | None, dp_rank: int | None
) -> str:
    rank = "" if dp_rank is None else f" dp_rank {dp_rank}"
    tenant = "" if tenant_id is None else f" tenant_id={tenant_id}"
    return f"instance {instance_id}{rank} not found for model={model_name}{tenant}"


def by_instance(registrations: Iterable[Registration]) -> Iterator[list[Registration] | None]:
    """Yields the registrations of each instance, ranks ascending; None where others may run."""
    groups: dict[tuple[PartitionKey, InstanceId], list[Registration]] = {}
    for number, registration in enumerate(list(registrations), 1):
        key = registration.key
        groups.setdefault((key.partition, key.instance_id), []).append(registration)
        if number % GROUPED_AT_ONCE == 0:
            yield None
    for group in groups.values():
        group.sort(key=lambda registration: registration.key.dp_rank)
        yield group
