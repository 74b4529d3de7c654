"""The selection service's API, as Dynamo's standalone one serves it (docs/faces/selection.md)."""

from __future__ import annotations

from functools import partial

from kvd.catalog import DEFAULT_MODEL
from kvd.faces.selection import choosing, inspection, reservations, tuning, workers
from kvd.faces.selection.prompts import ASK
from kvd.http.types import Handler, Route
from kvd.model import DEFAULT_TENANT
from kvd.selection.service import Selections
from kvd_core.lane import Answerer
from kvd_core.plain_selection import (
    PlainAllLoads,
    PlainFree,
    PlainLoads,
    PlainPrefillComplete,
    PlainSelect,
)

BODY_LIMIT = 8 * 1024 * 1024  # bytes, the limit itself included, as on the original


def selection_routes(selections: Selections) -> tuple[Route, ...]:
    """Returns the face's routes over the daemon's selections."""
    bound = partial(partial, selections=selections)
    known = selections, DEFAULT_MODEL, DEFAULT_TENANT
    return (
        Route("GET", "/health", inspection.health, hot=True),
        Route("GET", "/ready", bound(workers.ready)),
        Route("GET", "/workers", bound(workers.list_workers)),
        Route("POST", "/workers", bound(workers.post_worker), body_limit=BODY_LIMIT),
        Route("PUT", "/workers", bound(workers.put_workers), body_limit=BODY_LIMIT),
        Route("PATCH", "/workers/{worker_id}", bound(workers.patch_worker), body_limit=BODY_LIMIT),
        Route("DELETE", "/workers/{worker_id}", bound(workers.delete_worker)),
        _hot("/select", bound(choosing.select), PlainSelect(choosing.SELECT, *known, books=False)),
        _hot(
            "/select_and_reserve",
            bound(choosing.select_and_reserve),
            PlainSelect(choosing.SELECT, *known, books=True),
        ),
        _hot("/reservations", bound(reservations.reserve)),
        _hot(
            "/reservations/{reservation_id}/prefill_complete",
            bound(reservations.prefill_complete),
            PlainPrefillComplete(selections),
        ),
        _hot("/reservations/{reservation_id}/output_block", bound(reservations.output_block)),
        Route("GET", "/reservations/{reservation_id}", bound(reservations.show_reservation)),
        Route(
            "DELETE",
            "/reservations/{reservation_id}",
            bound(reservations.free),
            True,
            PlainFree(selections),
        ),
        Route("GET", "/loads", bound(inspection.loads), True, PlainAllLoads(selections)),
        _hot("/potential_loads", bound(inspection.potential_loads), PlainLoads(ASK, *known)),
        _hot("/overlap_scores", bound(inspection.overlap_scores)),
        Route("GET", "/busy_threshold", bound(tuning.list_thresholds)),
        Route("POST", "/busy_threshold", bound(tuning.post_thresholds)),
        Route("DELETE", "/busy_threshold", bound(tuning.delete_thresholds)),
        Route("GET", "/router_mode", bound(tuning.list_modes)),
        Route("POST", "/router_mode", bound(tuning.post_mode)),
        Route("DELETE", "/router_mode", bound(tuning.delete_mode)),
    )


def _hot(path: str, handler: Handler, answerer: Answerer | None = None) -> Route:
    return Route("POST", path, handler, True, answerer, BODY_LIMIT)
