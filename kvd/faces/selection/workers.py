"""Routes of the selection service's catalog."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import trio

from kvd.errors import BadRequest, Invalid
from kvd.faces.common import bodies
from kvd.faces.common.slices import written
from kvd.faces.indexer.workers import SLICE_RANKS
from kvd.faces.selection.members import partition_key
from kvd.faces.selection.records import WORKER, read_changes, read_worker, record, row
from kvd.http.messages import Request, Response
from kvd.http.scanning import scanned_ahead
from kvd.model import PartitionKey
from kvd.selection.admission import CatalogEntry
from kvd.selection.service import Selections
from kvd.selection.worker_record import WorkerLifecycle, WorkerRecord
from kvd.selection.workers import LISTED_AT_ONCE
from kvd.telemetry.stretches import REQUESTS
from kvd_core.json.scan import BodyScanner

SharedStatus = Callable[[], dict[str, Any] | None]  # the status of shared state, if it is on

WORKERS = BodyScanner({}, bodies.PARTITION_MEMBERS, ("workers",))

# Bytes of a set of workers that are read between two checkpoints, and one worker more: 1 ms.
READ_BYTES = 8192


async def ready(request: Request, *, selections: Selections, shared: SharedStatus) -> Response:
    """Answers 200 once a worker can be selected; lists the workers if the client may read them."""
    entries = await selections.workers.listed(None, None)
    lifecycles: Counter[WorkerLifecycle] = Counter()
    for at in range(0, len(entries), LISTED_AT_ONCE):
        lifecycles.update(map(selections.workers.lifecycle, entries[at : at + LISTED_AT_ONCE]))
        await trio.lowlevel.checkpoint()
    count = lifecycles[WorkerLifecycle.SCHEDULABLE]
    reasons = selections.readiness.reasons(count, lifecycles[WorkerLifecycle.UNSCHEDULABLE])
    answer = {
        "ready": not reasons,
        "schedulable_workers": count,
        "not_ready_reasons": reasons,
        "lifecycles": {
            each: lifecycles[each]
            for each in (
                WorkerLifecycle.SCHEDULABLE,
                WorkerLifecycle.UNSCHEDULABLE,
                WorkerLifecycle.INCOMPLETE,
            )
        },
        **selections.readiness.shown(),
    }
    if (shared_state := shared()) is not None:
        answer["shared_state"] = shared_state
    text, status = bodies.render(answer), 503 if reasons else 200
    if not request.known:
        return Response(status, text)
    pieces = chain([text[:-1] + b',"workers":'], listed(selections, entries), [b"}"])
    return Response(status, await written(pieces))


async def list_workers(request: Request, *, selections: Selections) -> Response:
    entries = await selections.workers.listed(*bodies.filters(request))
    return Response(200, await written(listed(selections, entries)))


def listed(selections: Selections, entries: Iterable[CatalogEntry]) -> Iterator[bytes]:
    """Yields a JSON array of workers, and nothing (b"") where others may run.

    Each is shown as it is when its turn comes; one that goes meanwhile is still listed.
    """
    separator = b"["
    ranks = 0
    for entry in entries:
        yield separator
        yield from row(selections.workers, entry)
        separator = b","
        ranks += len(entry.record.ranks)
        if ranks >= SLICE_RANKS:
            ranks = 0
            yield b""
    yield b"[]" if separator == b"[" else b"]"


async def post_worker(request: Request, *, selections: Selections) -> Response:
    entry = await selections.workers.put(read_worker(request.body))
    return await _row(201, selections, entry)


async def _row(status: int, selections: Selections, entry: CatalogEntry) -> Response:
    """Answers with a worker's row, in steps: hundreds of ranks take milliseconds."""
    await trio.lowlevel.checkpoint()
    return Response(status, await written(row(selections.workers, entry)))


async def put_workers(request: Request, *, selections: Selections) -> Response:
    """Replaces all workers of a model and tenant by the given ones."""
    ahead = await scanned_ahead(WORKERS, request.body)
    members = bodies.scan(WORKERS, request.body, ahead)
    key = partition_key(members)
    records: dict[int, WorkerRecord] = {}
    for _ in REQUESTS.each(_read(members, key, records)):
        await trio.lowlevel.checkpoint()
    entries = await selections.workers.put_all(key, list(records.values()))
    return Response(200, await written(listed(selections, entries)))


def _read(
    members: bodies.Members, key: PartitionKey, records: dict[int, WorkerRecord]
) -> Iterator[None]:
    """Reads the workers of a model and tenant from a body; rests at every yield."""
    yield  # the array has just been copied
    where = {"model_name": key.model_name, "tenant_id": key.tenant_id}
    size = 0
    for each in bodies.objects(members, "workers"):
        found = record({**where, **bodies.scan(WORKER, each)})
        if found.key != key:
            raise Invalid("workers: an entry belongs to another model or tenant")
        if found.worker_id in records:
            raise Invalid("workers: the array contains a worker_id twice")
        records[found.worker_id] = found
        size += len(each)
        if size >= READ_BYTES:
            yield
            size = 0


async def patch_worker(request: Request, *, selections: Selections) -> Response:
    """Changes the members that are given and not null."""
    worker_id = _path_id(request)
    changed = read_changes(request.body)
    for fixed in ("worker_id", "model_name", "tenant_id"):
        changed.pop(fixed, None)
    entry = await selections.workers.patch(worker_id, lambda known: replace(known, **changed))
    return await _row(200, selections, entry)


async def delete_worker(request: Request, *, selections: Selections) -> Response:
    entry = await selections.workers.delete(_path_id(request))
    await trio.lowlevel.checkpoint()
    return bodies.json_response(entry.record.shown(WorkerLifecycle.UNSCHEDULABLE, []))


def _path_id(request: Request) -> int:
    text = bodies.segment(request)
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 2**64):
        raise BadRequest(f"not a worker id: {text[:40]}")
    return int(text)
