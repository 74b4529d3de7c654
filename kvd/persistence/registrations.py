"""Keeps registrations and router settings that calls have made on all faces, and repeats them.

    registry, slot trackers, catalog, publishers, replicas, upstreams ──> rows of a fleet file
    tuning ──> settings of models and tenants; peers                           │
                                                                               v
    faces  <── the targets of the fleet file <── parse <────── registrations, replaced whole

Registrations of the settings and the fleet file are not kept: both make them again themselves.
Those of faces that are off stay in the file, for a start with these faces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import trio

from kvd.config.load import Config
from kvd.errors import KvdError
from kvd.fleet_file.follower import RegistrationTarget
from kvd.fleet_file.none import FleetFile
from kvd.fleet_file.parse import TABLES
from kvd.fleet_file.write import MEMBERS_OF
from kvd.gateway.dns_names import Wanted
from kvd.gateway.upstreams import CALLS, Upstreams
from kvd.index.peers import Peers
from kvd.index.publishers import EVERY_INSTANCE, Described, Publishers
from kvd.index.registry import INDEXER, RegisteredRank, Registry
from kvd.persistence.frames import Damaged, Frame, frame, packed, unpacked
from kvd.replica_sync.replicas import RegisteredReplica, Replicas
from kvd.selection.service import Selections
from kvd.selection.tuning import TuningKey
from kvd.slots.trackers import RegisteredWorker, SlotTrackers
from kvd.telemetry.logs import get_logger

# Kinds of frames.
ROWS = ord("T")  # at most SLICE registrations
ROUTER_SETTINGS = ord("U")  # router settings of a model, or of one tenant of it
PEERS = ord("V")  # peers

SLICE = 32  # registrations examined or made again between two checkpoints: about 1 ms
ENDPOINTS_OF_ROW = 32  # endpoints that take as long as one registration

# Marks a store that serves every instance by a client's word alone: no fleet file can say that.
SHARED = "shared"

# A kept registration: its table, its members and a mark.
Row = tuple[str, dict[str, Any], str]
KeptSettings = tuple[TuningKey, dict[str, Any]]

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Faces:
    """The parts of the daemon at which clients register."""

    registry: Registry
    slots: SlotTrackers
    selections: Selections
    publishers: Publishers
    replicas: Replicas
    upstreams: Upstreams
    peers: Peers

    @property
    def changes(self) -> int:
        """The number of changes so far: if it has grown, registrations may have changed."""
        parts = self.registry, self.slots, self.selections.workers, self.selections.tuning
        others = self.publishers, self.replicas, self.upstreams, self.peers
        return sum(part.changes for part in parts) + sum(part.changes for part in others)


@dataclass(slots=True)
class Again:
    """Counts of the registrations made again, by outcome."""

    registered: int = 0
    failed: int = 0

    @contextmanager
    def counted(self, table: str, kept: object) -> Iterator[None]:
        """Counts a registration made in the block; logs and passes over one that cannot be."""
        try:
            yield
            self.registered += 1
        except (KvdError, ValueError, TypeError) as error:
            self.failed += 1
            label = f"{table} {kept if isinstance(kept, str) else json.dumps(kept)}"
            log.warning("registration_not_restored", registration=label, reason=str(error))


class ClientRegistration(NamedTuple):
    """A registration that a client has made by a call."""

    table: str
    wanted: Any  # the value that the table's RegistrationTarget takes
    known: object  # stands for the registration there
    members: dict[str, Any]  # of its row
    mark: str  # SHARED, or empty


class Registrations:
    """The registrations of clients, without those of the settings and the fleet file."""

    def __init__(self, faces: Faces, config: Config, fleet: FleetFile) -> None:
        self.faces = faces
        self._fleet = fleet
        self._ranks = {worker.key for worker in config.workers}
        self._workers = {record.worker_id for record in config.catalog}
        self._replicas = set(config.replica_sync.peers if config.replica_sync else ())
        self.unserved: list[Row] = []  # of faces that are off: no call can change them

    @property
    def changes(self) -> int:
        return self.faces.changes

    async def frames(self) -> list[bytes]:
        """Returns all registrations as frames; other tasks run meanwhile."""
        made: list[bytes] = []
        rows: list[Row] = []
        served = (each and (each.table, each.members, each.mark) for each in self.rows())
        for number, row in enumerate(chain(self.unserved, served), 1):
            if row is not None:
                rows.append(row)
            if number % SLICE == 0:
                if rows:
                    made.append(frame(ROWS, packed(rows)))
                    rows = []
                await trio.lowlevel.checkpoint()
        if rows:
            made.append(frame(ROWS, packed(rows)))
        for number, settings in enumerate(self.router_settings(), 1):
            made.append(frame(ROUTER_SETTINGS, packed(settings)))
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
        if peers := self.faces.peers.named():
            made.append(frame(PEERS, packed(peers)))
        return made

    def rows(self) -> Iterator[ClientRegistration | None]:
        """Yields each registration that a client has made.

        Yields None, too, for each that the fleet file has made, and for each ENDPOINTS_OF_ROW of a
        worker: so each item takes about as long as any other.
        """
        for table, wanted, known in self._all():
            if self.is_set(table, wanted):
                yield None
                continue
            mark = SHARED if table == "conductor" and _is_shared(wanted) else ""
            yield ClientRegistration(table, wanted, known, MEMBERS_OF[table](wanted), mark)
            if table == "selection":
                yield from repeat(None, len(wanted.kv_events_endpoints) // ENDPOINTS_OF_ROW)

    def is_set(self, table: str, wanted: Any) -> bool:
        """Returns whether the fleet file has registered something under the same key."""
        key = TABLES[table].key(wanted)
        return self._fleet.held(table, key) is not None

    def _all(self) -> Iterator[tuple[str, Any, object]]:
        faces = self.faces
        for each in faces.registry.owned_by(INDEXER):
            # The registration may have been removed since the list was made.
            if each.key not in self._ranks and faces.registry.find(each.key) is each:
                at = each.listener.addresses
                size = faces.registry.block_size(each)
                yield (
                    "indexer",
                    RegisteredRank(each.key, at.endpoint, size, at.replay_endpoint, at.server_key),
                    each,
                )
        for row in faces.slots.workers(None, None):
            yield (
                "slot_tracker",
                RegisteredWorker(
                    row.key, row.worker_id, row.block_size, row.ranks.start, len(row.ranks)
                ),
                row.ranks,
            )
        for worker_id, entry in list(faces.selections.workers.entries.items()):
            if worker_id not in self._workers and worker_id not in faces.upstreams.each:
                yield "selection", entry.record, entry.record
        for publisher in list(faces.publishers):
            if faces.publishers.find(publisher.described.key) is publisher:  # it is not leaving
                yield "conductor", publisher.described, publisher
        for upstream in list(faces.upstreams):
            if CALLS in upstream.owners:
                yield "upstream", Wanted(upstream.url, upstream.prefills), upstream
        for replica in list(faces.replicas.all()):
            if replica.endpoint not in self._replicas:
                wanted = RegisteredReplica(replica.endpoint, replica.server_key)
                yield "replica", wanted, replica

    def router_settings(self) -> Iterator[KeptSettings]:
        """Yields the router settings that clients have made, by model and by tenant."""
        for tuning_key, changes in self.faces.selections.tuning.all_changes():
            settings = self.without_file(tuning_key, changes)
            if settings:
                yield tuning_key, settings

    def replace_settings(
        self, tuning_key: TuningKey, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> None:
        """Replaces clients' settings of a model or tenant; raises ValueError and TypeError."""
        names = self.without_file(tuning_key, before)
        self.faces.selections.tuning.replace(
            tuning_key, names, self.without_file(tuning_key, after)
        )

    def without_file(self, tuning_key: TuningKey, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those settings of a model or tenant that the fleet file does not set."""
        of_file = self._fleet.held("policy", tuning_key)
        names = () if of_file is None else of_file.policy.row
        return {name: value for name, value in changes.items() if name not in names}


async def register_again(
    frames: list[Frame],
    targets: Mapping[str, RegistrationTarget],
    registrations: Registrations,
) -> Again:
    """Makes the kept registrations again; logs and passes over those that cannot be made.

    Where clients and the fleet file have set the same of a model, the file's setting stays.

    Raises Damaged, before anything is registered, if a frame does not belong in this file.
    """
    rows, settings, named = _kept(frames)
    again = Again()
    for number, (table, members, mark) in enumerate(rows, 1):
        if table not in targets:
            registrations.unserved.append((table, members, mark))
        with again.counted(table, members):
            await _register(table, members, mark, targets)
        if number % SLICE == 0:
            await trio.lowlevel.checkpoint()
    for tuning_key, changes in settings:
        with again.counted("policy", tuning_key):
            registrations.replace_settings(tuning_key, {}, changes)
    for url in named:
        with again.counted("peer", url):
            registrations.faces.peers.add(url)
    return again


def _kept(frames: list[Frame]) -> tuple[list[Row], list[KeptSettings], list[str]]:
    """Returns the rows, router settings and URLs of peers in frames; raises Damaged."""
    rows: list[Row] = []
    settings: list[KeptSettings] = []
    named: list[str] = []
    try:
        for each in frames:
            if each.kind == ROWS:
                rows += [(table, members, mark) for table, members, mark in unpacked(each.content)]
            elif each.kind == ROUTER_SETTINGS:
                (model_name, tenant_id), changes = unpacked(each.content)
                settings.append(((model_name, tenant_id), changes))
            elif each.kind == PEERS:
                named += map(str, unpacked(each.content))
            else:
                raise Damaged(f"it has a part of the unknown kind {each.kind}")
    except (TypeError, ValueError) as error:
        raise Damaged(f"its registrations are not understood: {error}") from None
    return rows, settings, named


async def _register(
    table: str, members: dict[str, Any], mark: str, targets: Mapping[str, RegistrationTarget]
) -> None:
    if table not in targets:
        raise ValueError("the face that it belongs to is off")
    await targets[table].add(wanted_of(table, json.dumps(members), mark))


def wanted_of(table: str, members: str, mark: str) -> Any:
    """Returns the wanted value of a row with JSON members; raises KvdError and ValueError."""
    if table not in TABLES:
        raise ValueError(f"there is no table {table!r}")
    wanted = TABLES[table].read(members.encode())
    return wanted.shared() if mark == SHARED else wanted


def _is_shared(described: Described) -> bool:
    """Returns whether a store serves every instance although its instance id does not say so."""
    return described.serves_all and described.instance_id != EVERY_INSTANCE
