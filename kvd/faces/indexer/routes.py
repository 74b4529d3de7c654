"""The KV indexer's API, as Dynamo's standalone indexer serves it (docs/faces/indexer.md)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import trio

from kvd.faces.common import bodies
from kvd.faces.common.monitoring import health_route
from kvd.faces.common.slices import sliced, written
from kvd.faces.indexer.handlers import HashQueryHandler, QueryHandler, TieredQueryHandler
from kvd.faces.indexer.registration import read_rank
from kvd.faces.indexer.workers import instances_of, listed
from kvd.http.hot import HotHandler
from kvd.http.limits import LONG_BODY_LIMIT
from kvd.http.messages import Request, Response
from kvd.http.routes import ConcurrencyLimit, Handler, Route, Scope
from kvd.index.dumps import binary_dump, text_dump
from kvd.index.metrics import listener_families, state_families
from kvd.index.partitions import State
from kvd.index.peers import Peers
from kvd.index.registry import INDEXER, Registry
from kvd.telemetry.metrics import Family, counter, gauge
from kvd.telemetry.stretches import DUMP
from kvd.wire.dump import BINARY_DUMP, INSTANCE_HEADER, RECOVERING_HEADER, wants_binary
from kvd_core.json.scan import BodyScanner

UNREGISTER = BodyScanner({}, ("instance_id", "model_name", *bodies.TENANT, "dp_rank"))
RANK = BodyScanner({}, ("instance_id", "dp_rank", *bodies.PARTITION_MEMBERS))
PEER = BodyScanner({}, ("url",))


def dumps_bound(limit: int) -> ConcurrencyLimit:
    """Returns the limit on dumps of one process, which all faces and their metrics share."""
    return ConcurrencyLimit(limit, f"the limit of {limit} concurrent dumps is reached (max_dumps)")


def routes(
    state: State,
    registry: Registry,
    peers: Peers,
    dumps: ConcurrencyLimit,
    *,
    test_endpoints: bool = False,
) -> tuple[Route, ...]:
    """Returns the face's routes over the daemon's state; `test_endpoints` adds those for tests."""
    control = (
        _admin("/test/pause_listener", partial(pause_listener, registry)),
        _admin("/test/resume_listener", partial(resume_listener, registry)),
    )
    return (
        health_route(),
        _hot("/query", QueryHandler(state, registry)),
        _hot("/query_by_hash", HashQueryHandler(state, registry)),
        _hot("/query_tiered_by_hash", TieredQueryHandler(state, registry)),
        _admin("/register", partial(register, registry)),
        _admin("/unregister", partial(unregister, registry)),
        Route("GET", "/workers", partial(workers, state, registry), hot=True),
        dump_route(state, dumps),
        _admin("/register_peer", partial(register_peer, peers)),
        _admin("/deregister_peer", partial(deregister_peer, peers)),
        Route("GET", "/peers", partial(list_peers, peers), hot=True),
        *(control if test_endpoints else ()),
    )


def dump_route(state: State, dumps: ConcurrencyLimit) -> Route:
    """Returns the route of dumps, for every face over an index."""
    return Route("GET", "/dump", partial(dump, state), admission=dumps, scope=Scope.ADMIN)


def _hot(path: str, handler: HotHandler) -> Route:
    # The server replaces LONG_BODY_LIMIT by the setting http_body_bytes (kvd.app.api_server).
    return Route("POST", path, handler, True, LONG_BODY_LIMIT, scope=Scope.READ)


def _admin(path: str, handler: Handler) -> Route:
    return Route("POST", path, handler, hot=True, scope=Scope.ADMIN)


def register(registry: Registry, request: Request) -> Response:
    read_rank(request.body).register(registry)
    return Response(201, bodies.OK)


async def unregister(registry: Registry, request: Request) -> Response:
    members = bodies.scan(UNREGISTER, request.body)
    await registry.unregister(
        bodies.uint(members, "instance_id", bodies.U64_MAX),
        bodies.text(members, "model_name"),
        _optional_tenant(members),
        bodies.optional_uint(members, "dp_rank", bodies.U32_MAX),
    )
    return Response(200, bodies.OK)


async def pause_listener(registry: Registry, request: Request) -> Response:
    """Makes a rank's stream lose all batches that are published until it is resumed."""
    await registry.pause(*_rank(request))
    return Response(200, bodies.OK)


def resume_listener(registry: Registry, request: Request) -> Response:
    registry.resume(*_rank(request))
    return Response(200, bodies.OK)


def _rank(request: Request) -> tuple[int, int, str | None, str | None]:
    """Returns the instance and rank, and the model and tenant if the body names them."""
    members = bodies.scan(RANK, request.body)
    return (
        bodies.uint(members, "instance_id", bodies.U64_MAX),
        bodies.optional_uint(members, "dp_rank", bodies.U32_MAX) or 0,
        bodies.optional_text(members, "model_name"),
        bodies.alias(members, *bodies.TENANT),
    )


async def workers(state: State, registry: Registry, request: Request) -> Response:
    """Lists the instances, of all models and tenants or of those that the query names."""
    model_name, tenant_id = bodies.filters(request)
    registrations = [
        each
        for each in registry.owned_by(INDEXER)
        if model_name in (None, each.key.partition.model_name)
        and tenant_id in (None, each.key.partition.tenant_id)
    ]
    instances = instances_of(state, registrations)
    return Response(200, await written(listed(instances, trio.current_time())))


def dump(state: State, request: Request) -> Response:
    """Streams all blocks of all partitions, and holds one slice of them in memory at a time.

    Clients that name the binary form in `Accept` get that, all others JSON.
    """
    headers = [(INSTANCE_HEADER, state.instance_id.encode())]
    if state.recovering:
        headers.append((RECOVERING_HEADER, b"1"))
    accept = b",".join(value for name, value in request.headers if name == b"accept")
    if wants_binary(accept):
        return Response(200, sliced(binary_dump(state), DUMP), BINARY_DUMP, headers)
    return Response(200, sliced(text_dump(state), DUMP), headers=headers)


def register_peer(peers: Peers, request: Request) -> Response:
    peers.add(bodies.bounded(bodies.text(bodies.scan(PEER, request.body), "url"), "url"))
    return Response(201, bodies.OK)


def deregister_peer(peers: Peers, request: Request) -> Response:
    peers.remove(bodies.text(bodies.scan(PEER, request.body), "url"))
    return Response(200, bodies.OK)


def list_peers(peers: Peers, request: Request) -> Response:
    return bodies.json_response(list(peers))


def families(state: State, registry: Registry, dumps: ConcurrencyLimit) -> Iterator[Family | None]:
    """Yields the metrics of listeners, partitions and recovery."""
    listeners = [registration.listener for registration in registry.registrations()]
    yield from listener_families(listeners, registry.left_stats, trio.current_time())
    help = "Number of stream positions of unregistered ranks forgotten at the limit"
    yield counter("kvd_places_forgotten_total", help, registry.forgotten_positions)
    help = "Number of ranks refused for lack of file descriptors"
    yield counter("kvd_ranks_refused_total", help, registry.refused)
    yield gauge("kvd_dumps_open", "Number of dumps in progress", dumps.inside)
    yield counter("kvd_dumps_refused_total", "Number of dumps refused at the limit", dumps.refused)
    yield from state_families(state, registry.instances())


def _optional_tenant(members: bodies.Members) -> str | None:
    """Returns the tenant to unregister from; None, for every tenant, if it is absent or null."""
    given = {name: members[name] for name in bodies.TENANT if members.get(name) is not None}
    return bodies.alias(given, *bodies.TENANT)
