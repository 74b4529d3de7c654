"""The slot tracker's API, as Dynamo's standalone one serves it (docs/faces/slot_tracker.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from kvd.errors import Invalid, NotFound
from kvd.faces.common import bodies
from kvd.faces.common.monitoring import HEALTH
from kvd.faces.indexer.dumps import sliced
from kvd.faces.slot_tracker.plain import (
    PlainAdd,
    PlainFree,
    PlainLoads,
    PlainPrefillComplete,
    PlainProjection,
)
from kvd.http.fast_path import Answerer
from kvd.http.types import Handler, Request, Response, Route, Scope
from kvd.model import DEFAULT_TENANT, PartitionKey
from kvd.slots.trackers import SlotTrackers, Tracker, WorkerRow
from kvd_core.json.scan import BodyScanner
from kvd_core.ledger.ledger import MAX_REQUEST_ID_BYTES, MAX_TOKENS

OK = b'{"status":"ok"}'

# Workers of the list written between two checkpoints: at most about 1 ms.
SLICE_ROWS = 128

PLACE = bodies.PLACE
REGISTERED = (*PLACE, "worker_id", "block_size", "dp_start", "dp_size")
REGISTER = BodyScanner({}, REGISTERED)
UNREGISTER = BodyScanner({}, (*PLACE, "worker_id"))
# Those of bookings are signed, as the original has them; a question may have them either way.
ADD = BodyScanner({"sequence_hashes": "i64"}, PlainAdd.FIELDS)
STEP = BodyScanner({}, PlainFree.FIELDS)
ALL = BodyScanner({}, PlainLoads.FIELDS)
PROJECT = BodyScanner({"sequence_hashes": "hash64"}, PlainProjection.FIELDS)

Clock = Callable[[], float]  # seconds, never going back


def routes(slots: SlotTrackers, clock: Clock) -> tuple[Route, ...]:
    """Returns the face's routes over the daemon's slot trackers; ages are by `clock`."""
    known = slots, DEFAULT_TENANT
    return (
        HEALTH,
        Route("POST", "/register", partial(register, slots), scope=Scope.ADMIN),
        Route("POST", "/unregister", partial(unregister, slots), scope=Scope.ADMIN),
        Route("GET", "/workers", partial(workers, slots)),
        _step("/add", partial(add, slots, clock), PlainAdd(ADD, *known, clock)),
        _step(
            "/prefill_complete",
            partial(prefill_complete, slots),
            PlainPrefillComplete(STEP, *known),
        ),
        _step("/free", partial(free, slots), PlainFree(STEP, *known)),
        Route("GET", "/loads", partial(loads, slots), True, PlainLoads(ALL, *known)),
        Route(
            "POST",
            "/potential_loads",
            partial(potential_loads, slots),
            True,
            PlainProjection(PROJECT, *known),
            scope=Scope.READ,
        ),
        Route("GET", "/requests/{request_id}", partial(show_request, slots, clock)),
    )


def _step(path: str, handler: Handler, answerer: Answerer) -> Route:
    """Returns the route of a step in a request's life."""
    return Route("POST", path, handler, True, answerer, scope=Scope.LIFECYCLE)


class Worker(NamedTuple):
    """A worker as it is registered."""

    key: PartitionKey
    worker_id: int
    block_size: int  # tokens
    dp_start: int
    dp_size: int


def register(slots: SlotTrackers, request: Request) -> Response:
    slots.register(*read_worker(request.body))
    return Response(201, OK)


def read_worker(body: bytes) -> Worker:
    """Returns the worker that a registration describes."""
    members = bodies.scan(REGISTER, body)
    return Worker(
        bodies.kept_place(members),
        bodies.uint(members, "worker_id", bodies.U64_MAX),
        bodies.uint(members, "block_size", bodies.U32_MAX),
        bodies.uint(members, "dp_start", bodies.U32_MAX),
        bodies.uint(members, "dp_size", bodies.U32_MAX),
    )


def unregister(slots: SlotTrackers, request: Request) -> Response:
    members = bodies.scan(UNREGISTER, request.body)
    slots.unregister(_place(members), bodies.uint(members, "worker_id", bodies.U64_MAX))
    return Response(200, OK)


def workers(slots: SlotTrackers, request: Request) -> Response:
    """Streams a list of workers; `?model_name=`, `?tenant_id=` and its newer name narrow it."""
    return Response(200, sliced(_listed(slots.workers(*bodies.filters(request)))))


def _listed(rows: Iterable[WorkerRow]) -> Iterator[bytes]:
    """Yields a JSON array of workers, and nothing (b"") where others may run."""
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
        yield separator + json.dumps(shown, separators=(",", ":")).encode()
        separator = b","
        if number % SLICE_ROWS == 0:
            yield b""
    yield b"[]" if separator == b"[" else b"]"


def add(slots: SlotTrackers, clock: Clock, request: Request) -> Response:
    """Books a request: 201, or 200 for a retry under the same Idempotency-Key."""
    members = bodies.scan(ADD, request.body)
    bodies.require(members, "sequence_hashes")
    request_id, tokens = _new_request_id(members), _new_tokens(members)
    worker_id = bodies.uint(members, "worker_id", bodies.U64_MAX)
    dp_rank = bodies.uint(members, "dp_rank", bodies.U32_MAX)
    key = bodies.retry_key(request)
    # A body that is wrong is wrong whether there is a tracker or not.
    tracker, now = _tracker(slots, members), clock()
    added = slots.add(tracker, request_id, worker_id, dp_rank, ADD, tokens, now, key)
    if not added:
        return Response(200, OK)
    return Response(201, OK, undo=slots.undoing(tracker, request_id, now))


def prefill_complete(slots: SlotTrackers, request: Request) -> Response:
    members = bodies.scan(STEP, request.body)
    slots.prefill_complete(_tracker(slots, members), bodies.text(members, "request_id"))
    return Response(200, OK)


def free(slots: SlotTrackers, request: Request) -> Response:
    members = bodies.scan(STEP, request.body)
    slots.free(_tracker(slots, members), bodies.text(members, "request_id"))
    return Response(200, OK)


def loads(slots: SlotTrackers, request: Request) -> Response:
    """Says what every rank is working on; filters as for /workers."""
    return Response(200, slots.render_loads(*bodies.filters(request)))


def potential_loads(slots: SlotTrackers, request: Request) -> Response:
    """Says what every rank of a tracker would be working on with one more prompt."""
    members = bodies.scan(PROJECT, request.body)
    bodies.require(members, "sequence_hashes")
    tracker = _tracker(slots, members)
    return Response(200, tracker.ledger.project(PROJECT, _new_tokens(members)))


def show_request(slots: SlotTrackers, clock: Clock, request: Request) -> Response:
    """Shows the accounting of one live request of `?model_name=` and `?tenant_id=`."""
    place = bodies.parameters(request)
    tracker = _tracker(slots, place)
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
        "age_s": round(clock() - live.admitted_at, 3),
    }
    return bodies.json_response(row)


def _place(members: bodies.Members) -> PartitionKey:
    return PartitionKey(bodies.text(members, "model_name"), bodies.tenant(members))


def _tracker(slots: SlotTrackers, members: bodies.Members) -> Tracker:
    return slots.tracker(bodies.text(members, "model_name"), bodies.tenant(members))


def _new_request_id(members: bodies.Members) -> str:
    request_id = bodies.text(members, "request_id")
    if len(request_id) > MAX_REQUEST_ID_BYTES // 4 and (
        len(request_id.encode()) > MAX_REQUEST_ID_BYTES
    ):
        raise Invalid(f"request_id: longer than {MAX_REQUEST_ID_BYTES} bytes")
    return request_id


def _new_tokens(members: bodies.Members) -> int:
    if "new_isl_tokens" not in members:
        return 0
    return bodies.uint(members, "new_isl_tokens", MAX_TOKENS)
