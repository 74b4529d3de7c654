"""Registrations of the conductor face, each with the listener of its publisher.

    register ──> State.add_source ──> StandardEventStream ──> EventStream ──> Listeners.start
    unregister ──> Listeners.stop, awaited ──> State.remove_source

A publisher is an engine's rank or a store. Routers name it `instance|tenant|rank`; several
publishers may share that name if they differ in type, model, adapter, block size or salt, and so
may several stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import trio

from kvd.errors import Conflict, NotFound
from kvd.index.listening import ListenedRegistrations, Listeners, ListeningRules
from kvd.index.partitions import State
from kvd.model import PartitionKey
from kvd.telemetry.logs import get_logger
from kvd.wire.endpoints import Addresses
from kvd.wire.envelope import StreamIdentity
from kvd.wire.event_order import KeptStream
from kvd.wire.event_stream import EventStream
from kvd.wire.position import StreamPosition
from kvd.wire.standard_events import KeptPublication, StandardEventStream
from kvd_core.conductor.conductor import Source

log = get_logger(__name__)

STORES = ("mooncake",)  # types, in lower case; any other is an engine
FIRST_OF_STORES = 1  # the number of mooncake_master's first message
EVERY_INSTANCE = "*"  # the instance id of stores that serve all (kvd_core/conductor/types.hpp)


class PublisherKey(NamedTuple):
    """Identifies a publisher; registering the same key at another address is a conflict."""

    tenant_id: str
    instance_id: str
    dp_rank: int
    type: str  # lower case
    model_name: str
    lora_name: str
    block_size: int
    salt: str
    endpoint: str  # of a store, "" for an engine
    serves_all: bool

    @property
    def partition(self) -> PartitionKey:
        return PartitionKey(self.model_name, self.tenant_id)

    @property
    def triple(self) -> str:
        """The name that routers use."""
        return f"{self.instance_id}|{self.tenant_id}|{self.dp_rank}"

    def __str__(self) -> str:
        return f"{self.partition}/{self.triple}:{self.type}"


@dataclass(frozen=True, slots=True)
class Described:
    """A client's description of a publisher."""

    endpoint: str
    replay_endpoint: str | None
    type: str
    model_name: str
    lora_name: str
    tenant_id: str
    instance_id: str
    block_size: int
    dp_rank: int
    salt: str
    server_key: str | None = None  # of CURVE
    serves_all: bool = False  # a store whose blocks every instance can use
    echoed: tuple[tuple[str, object], ...] = ()  # members without a meaning here, only shown again

    @property
    def addresses(self) -> Addresses:
        return Addresses(self.endpoint, self.replay_endpoint, self.server_key)

    @property
    def is_store(self) -> bool:
        return self.type.lower() in STORES

    @property
    def key(self) -> PublisherKey:
        return PublisherKey(
            self.tenant_id,
            self.instance_id,
            self.dp_rank,
            self.type.lower(),
            self.model_name,
            self.lora_name,
            self.block_size,
            self.salt,
            self.endpoint if self.is_store else "",
            self.serves_all,
        )

    def shared(self) -> Described:
        """Returns the same store as one that serves every instance."""
        return replace(self, serves_all=True)


@dataclass(frozen=True, slots=True)
class Narrowing:
    """Selects publishers of an instance; None stands for any value."""

    tenant_id: str
    instance_id: str
    dp_rank: int | None = None
    type: str | None = None
    model_name: str | None = None
    lora_name: str | None = None
    block_size: int | None = None
    salt: str | None = None
    endpoint: str | None = None

    def means(self, described: Described) -> bool:
        if (described.tenant_id, described.instance_id) != (self.tenant_id, self.instance_id):
            return False
        wanted = (
            (self.dp_rank, described.dp_rank),
            (None if self.type is None else self.type.lower(), described.type.lower()),
            (self.model_name, described.model_name),
            (self.lora_name, described.lora_name),
            (self.block_size, described.block_size),
            (self.salt, described.salt),
            (self.endpoint, described.endpoint),
        )
        return all(value is None or value == known for value, known in wanted)


@dataclass(frozen=True, slots=True)
class Publisher:
    """One registration, its listener, and the state of its events."""

    described: Described
    listener: EventStream
    publication: StandardEventStream
    source: Source


class Publishers(ListenedRegistrations):
    """The registrations of the conductor face."""

    def __init__(
        self, state: State, listeners: Listeners, rules: ListeningRules | None = None
    ) -> None:
        super().__init__(state, listeners, rules)
        self._publishers: dict[PublisherKey, Publisher] = {}
        self._leaving: set[PublisherKey] = set()
        self._doubtful: dict[PublisherKey, Publisher] = {}  # no block of theirs has been seen yet
        self.unsettled: dict[PublisherKey, Publisher] = {}  # see `settle`

    def __len__(self) -> int:
        return len(self._publishers)

    def __iter__(self) -> Iterator[Publisher]:
        return iter(self._publishers.values())

    def find(self, key: PublisherKey) -> Publisher | None:
        return None if key in self._leaving else self._publishers.get(key)

    def register(self, described: Described) -> None:
        """Registers a publisher and starts to listen to it, whether it is up or not.

        Repeating a registration changes nothing. Raises BadRequest on a faulty endpoint, Conflict
        on a known publisher at another address, Unavailable at a bound.
        """
        self._check_addresses(described.addresses)
        key = described.key
        known = self._publishers.get(key)
        if known is not None:
            addresses = known.described.addresses
            if addresses != described.addresses:
                other = addresses.unlike(described.addresses)
                raise Conflict(f"{key.triple} is already registered with {other}")
            if key in self._leaving:
                raise Conflict(f"{key.triple} is being unregistered")
            return
        self._check_capacity()
        source = self._state.add_source(
            key.partition,
            key.block_size,
            EVERY_INSTANCE if key.serves_all else key.instance_id,
            key.lora_name,
            key.salt,
            key.dp_rank,
            store=described.is_store,
        )
        terms = StreamIdentity(
            key.model_name,
            key.tenant_id,
            key.block_size,
            key.lora_name,
            key.salt,
            key.dp_rank,
            described.is_store,
        )
        publication = StandardEventStream(source, terms)
        endpoint, replay_endpoint, server_key = described.addresses
        listener = EventStream(
            str(key),
            endpoint,
            publication,
            replay_endpoint,
            server_key=server_key,
            stale_after_s=self._stale_after_s,
            first=FIRST_OF_STORES if described.is_store else 0,
        )
        self._publishers[key] = Publisher(described, listener, publication, source)
        self._doubtful[key] = self._publishers[key]
        self._start(key, listener)

    # ---- going on where another process has stopped (docs/state.md)

    def find_to_resume(
        self, key: PublisherKey, endpoint: str, position: StreamPosition
    ) -> Publisher | None:
        """Returns the publisher that may go on from a kept position: same key, same address.

        None if there is no such publisher, or it has sent messages already.
        """
        found = self.find(key)
        if found is None or found.listener.endpoint != endpoint or not position.expected:
            return None
        return None if found.listener.stats.messages else found

    def take_over(
        self,
        publisher: Publisher,
        position: StreamPosition,
        publication: KeptPublication,
        streams: Iterable[KeptStream],
    ) -> None:
        """Lets a publisher go on at the position of another process; its blocks are restored.

        No message of it may have arrived yet. If it has left meanwhile, nothing happens.
        """
        key = publisher.described.key
        if self._publishers.get(key) is not publisher:
            return
        publisher.listener.take_over(position)
        publisher.publication.take_over(publication, streams)
        self.unsettled[key] = publisher

    def settle(self, key: PublisherKey) -> None:
        """Notes that a publisher has passed its restored position."""
        self.unsettled.pop(key).publication.settled()

    def check_unused(self) -> Iterator[None]:
        """Logs, once each, the publishers without blocks whose events are foreign or ignored.

        Yields after each publisher.
        """
        for key, publisher in list(self._doubtful.items()):
            if not publisher.listener.stats.messages or self._doubtful.get(key) is not publisher:
                continue  # no message has arrived, or the publisher has left meanwhile
            held = publisher.source.stats()
            why = publisher.publication.unused()
            if why:
                log.warning("publisher_without_effect", publisher=str(key), why=why)
            if why or held["blocks"] + held["waiting"]:
                del self._doubtful[key]
            yield

    async def unregister(self, wanted: Narrowing) -> list[str]:
        """Removes publishers with all their blocks; returns the names that routers use, sorted.

        Raises NotFound if there are none. Returns when their listeners have ended.
        """
        leaving = [
            (key, each) for key, each in self._publishers.items() if wanted.means(each.described)
        ]
        if not leaving:
            raise NotFound(f"{wanted.instance_id}|{wanted.tenant_id} has no such publisher")
        # Shielded: a client that goes away must not leave a publisher without its listener.
        with trio.CancelScope(shield=True):
            self._leaving.update(key for key, _ in leaving)
            await self._end_all(partial(self._leave, *each) for each in leaving)
        return sorted({key.triple for key, _ in leaving})

    async def _leave(self, key: PublisherKey, publisher: Publisher) -> None:
        # Another request may have removed it meanwhile, and a client may have registered it anew.
        if self._publishers.get(key) is publisher:
            await self._listeners.stop(key)
        if self._publishers.get(key) is publisher:
            self._remove(key, publisher)

    def _remove(self, key: PublisherKey, publisher: Publisher) -> None:
        del self._publishers[key]
        self.changes += 1
        self._doubtful.pop(key, None)
        self.unsettled.pop(key, None)
        self._leaving.discard(key)
        self._state.remove_source(key.partition, key.block_size, publisher.source)
        self._end(publisher.listener)
