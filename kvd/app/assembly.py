"""The parts of the daemon, made from its configuration; the daemon starts them in order.

In place of a part that the settings leave out there is one that does nothing.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import trio

from kvd.app.apis import Components, Gateway
from kvd.app.ports import Ports
from kvd.config.errors import StartError
from kvd.config.load import Config
from kvd.config.reload import ConfigReader
from kvd.diagnosis.gathering import DiagnosedParts
from kvd.faces.ui.picture import PicturedParts
from kvd.fleet_file.follower import FleetFileFollower, RegistrationTarget
from kvd.fleet_file.none import FleetFile, NoFleetFile
from kvd.gateway.siblings import ProcessIdentity
from kvd.index.capacity import ListenerCapacity
from kvd.index.listening import ListeningRules
from kvd.index.partitions import State
from kvd.index.peers import Peers
from kvd.index.publishers import Publishers
from kvd.index.registry import Registry
from kvd.net.listeners import ListenerTasks
from kvd.net.recovery import RecoveryStats
from kvd.persistence.directory import StateDirectory
from kvd.persistence.none import NoKeeper
from kvd.persistence.registrations import Faces, Registrations
from kvd.persistence.store import Keeper, StateStore
from kvd.platform.activation import PassedSockets
from kvd.replica_sync.deduplication import Deduplicator
from kvd.selection.decisions import DecisionLog
from kvd.selection.readiness import Readiness
from kvd.selection.service import Selections
from kvd.shared_state.outbox import MAX_WAITING_BYTES
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd.telemetry.rotating import RotatingWriter
from kvd_core.index.chronicle import Chronicle
from kvd_core.ledger.journal import Journal

if TYPE_CHECKING:
    from kvd.net.zsocket import Context

DECISION_LOG_CLOSE_S = 2.0  # time at the end for the disk to write the lines that wait


@dataclass(frozen=True, slots=True)
class DescriptorBounds:
    """The numbers of listeners and waiting selections that the limit of descriptors allows."""

    listeners: int
    waiting: int  # selections that wait


@dataclass(frozen=True, slots=True)
class Start:
    """What a process begins with."""

    config: Config
    reader: ConfigReader  # reads the configuration again
    bounds: DescriptorBounds
    passed: PassedSockets
    identity: ProcessIdentity | None = None  # among several gateway processes


@dataclass(frozen=True, slots=True)
class Opened:
    """What is opened before the parts are made, and closed after they have ended."""

    ports: Ports
    context: Context
    decisions: RotatingWriter | None  # the decision log
    store: StateStore | None


@dataclass(frozen=True, slots=True)
class Accounts:
    """The ledgers of all faces, and what records their bookings."""

    ledgers: Ledgers
    journal: Journal | None  # of the state directory
    shared_journal: Journal | None  # of the state that replicas share
    deduplicator: Deduplicator | None  # of bookings that come by shared state and replica sync


def accounts_of(config: Config, store: StateStore | None) -> Accounts:
    journal = None if store is None else store.journal
    shared_journal = deduplicator = None
    if config.state_server is not None:
        shared_journal = Journal(MAX_WAITING_BYTES)
        deduplicator = Deduplicator(shared_journal, trio.current_time)
        deduplicator.pause()  # restored bookings were reported by the process before
    journals = [each for each in (journal, shared_journal) if each is not None]
    ledgers = Ledgers(config.max_requests, config.max_request_blocks, journals)
    return Accounts(ledgers, journal, shared_journal, deduplicator)


def components(
    start: Start,
    opened: Opened,
    listeners: ListenerTasks,
    listening: trio.Nursery,
    accounts: Accounts,
) -> Components:
    """Returns the parts that the faces serve, all empty; tasks for replicas run in `listening`."""
    config, bounds, ports = start.config, start.bounds, opened.ports
    clock = trio.lowlevel.current_clock().current_time  # two calls less than trio.current_time
    chronicle = None
    if config.index_chronicle:
        chronicle = Chronicle(config.index_chronicle, clock())
    state = State(
        config.hash_seed, config.index_max_blocks, config.max_partitions, ports.served, chronicle
    )
    rules = ListeningRules(
        ListenerCapacity(bounds.listeners), ports.outgoing, config.engine_stale_s
    )
    registry = Registry(state, listeners, rules)
    publishers = Publishers(state, listeners, rules)
    slots = SlotTrackers(
        config.request_expiry_s, accounts.ledgers, config.max_partitions, clock, ports.served
    )
    selections = Selections(
        state,
        registry,
        config.router,
        config.request_expiry_s,
        Random(),
        clock,
        time.time_ns,
        ledgers=accounts.ledgers,
        readiness=Readiness(config.min_initial_workers, len(config.peers)),
        max_waiting=bounds.waiting,
        journal=accounts.journal,
    )
    return Components(
        state,
        registry,
        Peers(config.peers, ports.outgoing),
        RecoveryStats(),
        publishers,
        slots,
        selections,
        ports.sync.start(listening, opened.context, slots, selections, accounts.deduplicator),
        Gateway(config, selections, registry, ports.dialer, start.identity),
    )


def diagnosed(
    parts: Components,
    ports: Ports,
    keeper: Keeper | NoKeeper,
    decisions: RotatingWriter | None,
    fleet: FleetFile,
) -> DiagnosedParts:
    failures = {"state directory": lambda: keeper.failures}
    if decisions is not None:
        failures["decision log"] = lambda: decisions.failed
    return DiagnosedParts(
        parts.state,
        parts.registry,
        parts.publishers,
        parts.slots,
        parts.selections,
        parts.replicas,
        parts.gateway.upstreams,
        parts.gateway.choices,
        {face.name: face.authorizer for face in ports.apis.served},
        failures,
        fleet.faults,
    )


def pictured(parts: Components, ports: Ports) -> PicturedParts:
    return PicturedParts(
        parts.state,
        parts.registry,
        parts.publishers,
        parts.slots,
        parts.selections,
        ports.apis.served,
    )


def open_store(config: Config, stack: ExitStack) -> StateStore | None:
    """Opens the state directory if one is set; raises StartError."""
    path = config.state_dir
    if path is None:
        return None
    try:
        directory = StateDirectory(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartError(f"state_dir: cannot use {path}: {reason}") from None
    store = StateStore(directory, config.snapshot_s)
    stack.callback(store.close)
    return store


def fleet_file_of(
    config: Config, ports: Ports, targets: dict[str, RegistrationTarget]
) -> FleetFile:
    if config.fleet_file is None:
        return NoFleetFile()
    return FleetFileFollower(config.fleet_file, ports.outgoing, targets)


def registrations_of(parts: Components, config: Config, fleet: FleetFile) -> Registrations:
    faces = Faces(
        parts.registry,
        parts.slots,
        parts.selections,
        parts.publishers,
        parts.replicas,
        parts.gateway.upstreams,
        parts.peers,
    )
    return Registrations(faces, config, fleet)


def keeper_of(
    store: StateStore | None, parts: Components, ledgers: Ledgers, registrations: Registrations
) -> Keeper | NoKeeper:
    if store is None:
        return NoKeeper()
    return Keeper(store, parts.state, ledgers, registrations, trio.current_time)


def open_decision_log(config: Config, stack: ExitStack) -> RotatingWriter | None:
    """Opens the decision log if one is set and this process decides; raises StartError."""
    path = config.decision_log
    chooses = config.gateway_bind is not None and config.gateway_kvd is None
    if path is None or (config.selection_bind is None and not chooses):
        return None
    try:
        writer = RotatingWriter(path, config.decision_log_bytes, config.decision_log_files)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartError(f"decision_log: cannot write {path}: {reason}") from None
    stack.callback(writer.close, DECISION_LOG_CLOSE_S)
    return writer


def log_decisions(writer: RotatingWriter, selections: Selections, config: Config) -> DecisionLog:
    """Returns a log of the decisions that are booked from now on."""
    shares_blocks = config.router.assumes_kv_reuse
    decisions = DecisionLog(
        selections.candidates, writer, time.time_ns, shares_blocks=shares_blocks
    )
    selections.reservations.moments.subscribe(decisions.note)
    selections.reservations.sample.take_all()
    return decisions
