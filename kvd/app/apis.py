"""The faces of a daemon: their routes, their families of /metrics, and their fleet-file tables.

Components ──> routes of the indexer, the slot tracker, the selection service, the conductor
           └─> targets, one for each table of the fleet file that a served face has
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

import trio

from kvd.app.api_server import ApiServer
from kvd.config.binds import Binds
from kvd.config.load import Config
from kvd.faces.common import replica_sync
from kvd.faces.common.monitoring import metrics_route
from kvd.faces.conductor import listings as conductor_listings
from kvd.faces.conductor import routes as conductor
from kvd.faces.conductor import schemas as conductor_schemas
from kvd.faces.conductor.msgpack import FORMS
from kvd.faces.gateway import processes
from kvd.faces.gateway import schemas as gateway_schemas
from kvd.faces.gateway.engines import upstream_routes
from kvd.faces.gateway.metrics import gateway_families
from kvd.faces.gateway.routes import ClientFailures, gateway_routes
from kvd.faces.indexer import routes as indexer
from kvd.faces.indexer import schemas as indexer_schemas
from kvd.faces.selection import schemas as selection_schemas
from kvd.faces.selection.booking_metrics import booking_families
from kvd.faces.selection.choice_metrics import choice_families
from kvd.faces.selection.routes import selection_routes
from kvd.faces.selection.speed_metrics import speed_families
from kvd.faces.selection.workers import SharedStatus
from kvd.faces.slot_tracker import routes as slot_tracker
from kvd.faces.slot_tracker import schemas as slot_tracker_schemas
from kvd.faces.slot_tracker.metrics import slot_families
from kvd.fleet_file.follower import RegistrationTarget
from kvd.fleet_file.targets import (
    ConductorTarget,
    IndexerTarget,
    PolicyTarget,
    ReplicaTarget,
    SelectionTarget,
    SlotTrackerTarget,
    UpstreamTarget,
)
from kvd.gateway.chains import Chains
from kvd.gateway.choices import Choices, LocalChoices
from kvd.gateway.dns_names import Wanted
from kvd.gateway.exchanges import Exchanges
from kvd.gateway.forwarding import Forwarder
from kvd.gateway.remote import RemoteChoices
from kvd.gateway.siblings import ProcessIdentity, Siblings
from kvd.gateway.stats import GatewayStats
from kvd.gateway.tokens import Tokens
from kvd.gateway.upstreams import Upstreams
from kvd.http.errors import Failures
from kvd.http.routes import ConcurrencyLimit, Route, WrongPath
from kvd.http.table import RouteTable
from kvd.index.partitions import State
from kvd.index.peers import Peers
from kvd.index.publishers import Publishers
from kvd.index.registry import Registry
from kvd.index.served_models import ServedModels
from kvd.net.dialing import Dialer
from kvd.net.recovery import RecoveryStats
from kvd.replica_sync.replicas import Replicas
from kvd.selection.service import Selections
from kvd.slots.trackers import SlotTrackers
from kvd.telemetry.metrics import Family, Source, by_label, counter, gauge


class Gateway:
    """The gateway's parts; without upstreams it serves nothing."""

    def __init__(
        self,
        config: Config,
        selections: Selections,
        registry: Registry,
        dialer: Dialer,
        identity: ProcessIdentity | None,
    ) -> None:
        """`identity` is that of this process among several gateway processes; None: it is alone."""
        self._body_limit = config.gateway_body_bytes
        self.stats = GatewayStats()
        self.exchanges = Exchanges(config.relay)
        self.choices = _choices(config, selections, registry, self.exchanges, dialer, identity)
        self._siblings = None if identity is None else Siblings(identity, self.exchanges)
        wanted = [Wanted(url) for url in config.upstreams or ()]
        wanted += [Wanted(url, prefills=True) for url in config.prefills or ()]
        self.upstreams = Upstreams(
            uuid4().hex if identity is None else identity.gateway_id,
            wanted,
            self.exchanges,
            self.choices,
            dialer,
            config.upstream_key,
            config.upstream_tls,
            proves=config.gateway_canary,
        )
        self.tokens = Tokens(
            self.exchanges, self.stats, config.gateway_memory_bytes, config.gateway_tokenize_s
        )
        self.chains = Chains(self.stats, trio.current_time)
        self._forwarder = Forwarder(
            self.upstreams,
            self.choices,
            self.exchanges,
            self.stats,
            self.tokens,
            self.chains,
            config.gateway_remote_prefill_tokens,
            f"gateway-{uuid4().hex[:12]}-" if identity is None else identity.prefix,
            decision_headers=config.gateway_decision_headers,
        )

    async def run(self) -> None:
        """Relays bytes and watches the engines until it is cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.exchanges.run)
            nursery.start_soon(self.choices.run)
            nursery.start_soon(self.upstreams.run)
            nursery.start_soon(self.tokens.run)

    async def met(self) -> None:
        """Waits until all engines and remote kvds have been asked once, whatever came of it.

        A process of several waits for that: meanwhile its clients wait, or other processes serve
        them. A single process does not wait.
        """
        if self._siblings is None:
            return
        await self.choices.met()
        await self.upstreams.all_met()

    def routes(self) -> tuple[Route, ...]:
        """Returns the face's routes, but for /metrics."""
        process = None if self._siblings is None else self._siblings.identity.name
        routes = gateway_routes(
            self.upstreams, self.choices, self._forwarder, self._body_limit, process
        )
        return routes if process is not None else (*routes, *upstream_routes(self.upstreams))

    def metrics_route(self, sources: Sequence[Source]) -> Route:
        """Returns the route of /metrics; each of several processes shows the figures of all."""
        if self._siblings is None:
            return metrics_route(sources)
        return processes.metrics_route(self._siblings, sources)

    def families(self) -> Iterator[Family]:
        yield from gateway_families(
            self.upstreams, self.exchanges, self.tokens, self.chains, self.stats
        )
        yield from self.choices.families()


def _choices(
    config: Config,
    selections: Selections,
    registry: Registry,
    exchanges: Exchanges,
    dialer: Dialer,
    identity: ProcessIdentity | None,
) -> Choices:
    if config.gateway_kvd is None:
        return LocalChoices(selections, registry)
    asked = exchanges, dialer, config.gateway_kvd_s, config.gateway_kvd_token
    return RemoteChoices(config.gateway_kvd, *asked, identity)


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of the daemon that the faces serve."""

    state: State
    registry: Registry
    peers: Peers
    recovery: RecoveryStats
    publishers: Publishers
    slots: SlotTrackers
    selections: Selections
    replicas: Replicas
    gateway: Gateway


class RouteDirectory:
    """Finds the face that has a path, for clients that ask the wrong one."""

    def __init__(self, routes: Mapping[ApiServer, tuple[Route, ...]]) -> None:
        self._tables = {face: RouteTable(each) for face, each in routes.items()}

    def not_found(self, here: ApiServer, path: bytes) -> str:
        """Returns the error text for a path that the face `here` does not have."""
        found = [(face, table.label(path)) for face, table in self._tables.items()]
        others = [(face, label) for face, label in found if label is not None]
        if not others:
            return "not found"
        # The client most likely means a face that is served, as the one it has reached is.
        others = [each for each in others if each[0].addresses()] or others
        faces = " and the ".join(_described(face) for face, _ in others)
        return f"not found: this is the {here.name} face; {others[0][1]} is on the {faces}"


def _described(face: ApiServer) -> str:
    addresses = face.addresses()
    where = f"at {', '.join(addresses)}" if addresses else "which this process does not serve"
    return f"{face.name} face, {where}"


class Apis:
    """All faces; those with an address are served."""

    def __init__(self, config: Config, served: ServedModels) -> None:
        """Requests for models outside `served` are answered with 421."""
        plain = Failures(served=served)
        self.indexer = ApiServer(
            "indexer", "dynamo_kvindexer", config, indexer_schemas.DESCRIPTION, plain
        )
        self.slot_tracker = ApiServer(
            "slot-tracker", "kvd_slot_tracker", config, slot_tracker_schemas.DESCRIPTION, plain
        )
        self.selection = ApiServer(
            "selection", "kvd_selection", config, selection_schemas.DESCRIPTION, plain
        )
        self.conductor = ApiServer(
            "conductor",
            "kvd_conductor",
            config,
            conductor_schemas.DESCRIPTION,
            Failures(conductor.REASONS, FORMS, served),
        )
        self.gateway = ApiServer(
            "gateway",
            "kvd_gateway",
            config,
            gateway_schemas.DESCRIPTION,
            ClientFailures(),
            for_pages=True,
        )
        self.binds: dict[ApiServer, Binds | None] = {
            self.indexer: config.indexer_bind,
            self.slot_tracker: config.slot_tracker_bind,
            self.selection: config.selection_bind,
            self.conductor: config.conductor_bind,
            self.gateway: config.gateway_bind,
        }

    @property
    def served(self) -> list[ApiServer]:
        return [face for face, binds in self.binds.items() if binds is not None]

    def routes(
        self,
        parts: Components,
        config: Callable[[], Config],
        shared: SharedStatus,
        sources: Sequence[Source],
    ) -> Iterator[tuple[ApiServer, tuple[Route, ...], WrongPath]]:
        """Yields each served face with its routes, and what words the error for any other path.

        `config` returns the settings in force now, as live ones may change; `shared` returns the
        status of the shared state. /metrics of each face also shows `sources`, the process's own.
        """
        dumps = indexer.dumps_bound(config().max_dumps)
        tests = config().test_endpoints
        routes = self._all_routes(parts, dumps, shared, test_endpoints=tests)
        own = self._sources(parts, config, dumps)
        directory = RouteDirectory(routes)
        for face in self.served:
            shown = face.families, *own[face], *sources
            show = parts.gateway.metrics_route if face is self.gateway else metrics_route
            yield face, (*routes[face], show(shown)), partial(directory.not_found, face)

    def _all_routes(
        self,
        parts: Components,
        dumps: ConcurrencyLimit,
        shared: SharedStatus,
        *,
        test_endpoints: bool,
    ) -> dict[ApiServer, tuple[Route, ...]]:
        state, registry = parts.state, parts.registry
        of_replicas = replica_sync.routes(parts.replicas)
        return {
            self.indexer: indexer.routes(
                state, registry, parts.peers, dumps, test_endpoints=test_endpoints
            ),
            self.slot_tracker: (
                *slot_tracker.routes(parts.slots),
                *of_replicas,
            ),
            self.selection: (
                *selection_routes(parts.selections, shared),
                indexer.dump_route(state, dumps),
                *of_replicas,
            ),
            self.conductor: conductor.routes(state, parts.publishers),
            self.gateway: parts.gateway.routes(),
        }

    def _sources(
        self, parts: Components, config: Callable[[], Config], dumps: ConcurrencyLimit
    ) -> dict[ApiServer, list[Source]]:
        """Returns the sources of each face's own metrics."""
        blocks = partial(indexer.families, parts.state, parts.registry, dumps)
        slots, selections = parts.slots, parts.selections
        answered = self.selection.requests
        return {
            self.indexer: [blocks, partial(_recovery_families, parts)],
            self.slot_tracker: [
                lambda: slot_families(slots, config().metrics_ranks),
                parts.replicas.families,
            ],
            self.selection: [
                blocks,
                parts.replicas.families,
                partial(booking_families, selections),
                lambda: choice_families(selections, answered, config().metrics_ranks),
                lambda: speed_families(selections, config().metrics_ranks),
            ],
            self.gateway: [blocks, parts.gateway.families],
            self.conductor: [partial(conductor_listings.families, parts.state, parts.publishers)],
        }

    def targets(self, parts: Components) -> dict[str, RegistrationTarget]:
        """Returns the targets that register entries of the fleet file, by table."""
        targets: dict[ApiServer, tuple[str, RegistrationTarget]] = {
            self.indexer: ("indexer", IndexerTarget(parts.registry)),
            self.slot_tracker: ("slot_tracker", SlotTrackerTarget(parts.slots)),
            self.selection: ("selection", SelectionTarget(parts.selections.workers)),
            self.conductor: ("conductor", ConductorTarget(parts.publishers)),
            self.gateway: ("upstream", UpstreamTarget(parts.gateway.upstreams)),
        }
        found = dict(targets[face] for face in self.served)
        if "selection" in found:
            found["policy"] = PolicyTarget(parts.selections.tuning)
        if parts.replicas.are_on:
            found["replica"] = ReplicaTarget(parts.replicas)
        return found


def _recovery_families(parts: Components) -> Iterator[Family]:
    stats = parts.recovery
    help = "Number of attempts to recover from a peer, by outcome"
    name = "kvd_recovery_attempts_total"
    yield by_label(name, "counter", help, "outcome", stats.attempts)
    yield gauge("kvd_recovery_blocks", "Number of blocks recovered from a peer", stats.blocks)
    yield gauge("kvd_recovery_seconds", "Seconds taken to recover from a peer", stats.seconds)
    help = "Number of peers refused at the limit"
    yield counter("kvd_peers_refused_total", help, parts.peers.refused)
