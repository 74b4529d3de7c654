"""The slot tracker's API, as Dynamo's standalone one serves it (docs/faces/slot_tracker.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from kvd.errors import NotFound
from kvd.faces.common import bodies
from kvd.faces.common.monitoring import health_route
from kvd.faces.common.slices import written
from kvd.faces.slot_tracker.handlers import (
    AddHandler,
    FreeHandler,
    LoadsHandler,
    PotentialLoadsHandler,
    PrefillCompleteHandler,
)
from kvd.faces.slot_tracker.registration import read_worker
from kvd.http.hot import HotHandler
from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope
from kvd.model import PartitionKey
from kvd.slots.trackers import SlotTrackers, Tracker, WorkerRow
from kvd_core.json.scan import BodyScanner

# Workers in a list that are written between two checkpoints: at most about 1 ms.
SLICE_ROWS = 128

UNREGISTER = BodyScanner({}, (*bodies.PARTITION_MEMBERS, "worker_id"))


def routes(slots: SlotTrackers) -> tuple[Route, ...]:
    """Returns the face's routes over the daemon's slot trackers."""
    return (
        health_route(),
        Route("POST", "/register", partial(register, slots), hot=True, scope=Scope.ADMIN),
        Route("POST", "/unregister", partial(unregister, slots), hot=True, scope=Scope.ADMIN),
        Route("GET", "/workers", partial(workers, slots), hot=True),
        _step("/add", AddHandler(slots)),
        _step("/prefill_complete", PrefillCompleteHandler(slots)),
        _step("/free", FreeHandler(slots)),
        Route("GET", "/loads", LoadsHandler(slots), hot=True),
        Route(
            "POST",
            "/potential_loads",
            PotentialLoadsHandler(slots),
            hot=True,
            scope=Scope.READ,
        ),
        Route("GET", "/requests/{request_id}", partial(show_request, slots), hot=True),
    )


def _step(path: str, handler: HotHandler) -> Route:
    """Returns the route of a step in a request's life."""
    return Route("POST", path, handler, hot=True, scope=Scope.LIFECYCLE)


async def register(slots: SlotTrackers, request: Request) -> Response:
    worker = read_worker(request.body)
    await slots.settled(worker.key)
    slots.register(*worker)
    return Response(201, bodies.OK)


async def unregister(slots: SlotTrackers, request: Request) -> Response:
    members = bodies.scan(UNREGISTER, request.body)
    worker_id = bodies.uint(members, "worker_id", bodies.U64_MAX)
    await slots.unregister(_partition_key(members), worker_id)
    return Response(200, bodies.OK)


async def workers(slots: SlotTrackers, request: Request) -> Response:
    """Lists the workers, of all models and tenants or of those that the query names."""
    return Response(200, await written(_listed(slots.workers(*bodies.filters(request)))))


def _listed(rows: Iterable[WorkerRow]) -> Iterator[bytes]:
    """Yields a JSON array of workers, and b"" where other tasks may run."""
    separator = b"["
    for number, row in enumerate(rows, 1):
        shown = {
            "worker_id": row.worker_id,
            "model_name": row.key.model_name,
            "tenant_id": row.key.tenant_id,
            "block_size": row.block_size,
            "dp_start": row.ranks.start,
            "dp_size": len(row.ranks),
        }
        yield separator + bodies.render(shown)
        separator = b","
        if number % SLICE_ROWS == 0:
            yield b""
    yield b"[]" if separator == b"[" else b"]"


def show_request(slots: SlotTrackers, request: Request) -> Response:
    """Shows the accounting of one live request of `?model_name=` and `?tenant_id=`."""
    partition = bodies.parameters(request)
    tracker = _tracker(slots, partition)
    request_id = bodies.segment(request)
    live = tracker.ledger.request(request_id)
    if live is None:
        raise NotFound(f"request {request_id} not found")
    row = {
        "request_id": request_id,
        "model_name": tracker.key.model_name,
        "tenant_id": tracker.key.tenant_id,
        "worker_id": live.worker_id,
        "dp_rank": live.dp_rank,
        "blocks": live.blocks,
        "new_isl_tokens": live.tokens,
        "active_prefill_tokens": live.prefill_tokens,
        "prefill_complete": live.prefill_complete,
        "output_blocks": live.output_blocks,
        "age_s": round(slots.clock() - live.admitted_at, 3),
    }
    return bodies.json_response(row)


def _partition_key(members: bodies.Members) -> PartitionKey:
    return PartitionKey(bodies.text(members, "model_name"), bodies.tenant(members))


def _tracker(slots: SlotTrackers, members: bodies.Members) -> Tracker:
    return slots.tracker(bodies.text(members, "model_name"), bodies.tenant(members))
