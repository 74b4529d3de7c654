"""The selection service's API, as Dynamo's standalone one serves it (docs/faces/selection.md)."""

from __future__ import annotations

from functools import partial

from kvd.faces.common import bodies
from kvd.faces.common.monitoring import health_route
from kvd.faces.selection import regret, reservations, tuning, workers
from kvd.faces.selection.handlers import (
    FreeHandler,
    LoadsHandler,
    OverlapScoresHandler,
    PotentialLoadsHandler,
    PrefillCompleteHandler,
    SelectHandler,
)
from kvd.http.limits import DEFAULT_BODY_LIMIT, LONG_BODY_LIMIT
from kvd.http.routes import Handler, Route, Scope
from kvd.selection.service import Selections


def selection_routes(
    selections: Selections, shared: workers.SharedStatus = lambda: None
) -> tuple[Route, ...]:
    """Returns the face's routes over the daemon's selections; `shared` is a part of /ready."""
    bound = partial(partial, selections=selections)
    return (
        health_route(bodies.OK),
        Route("GET", "/ready", bound(workers.ready, shared=shared), True, scope=Scope.OPEN),
        Route("GET", "/workers", bound(workers.list_workers), hot=True),
        _admin("POST", "/workers", bound(workers.post_worker), LONG_BODY_LIMIT),
        _admin("PUT", "/workers", bound(workers.put_workers), LONG_BODY_LIMIT),
        _admin("PATCH", "/workers/{worker_id}", bound(workers.patch_worker), LONG_BODY_LIMIT),
        _admin("DELETE", "/workers/{worker_id}", bound(workers.delete_worker)),
        _question("/select", SelectHandler(selections, reserves=False)),
        _step("/select_and_reserve", SelectHandler(selections, reserves=True)),
        _step("/reservations", bound(reservations.reserve)),
        _step(
            "/reservations/{reservation_id}/prefill_complete",
            PrefillCompleteHandler(selections),
            body_limit=0,
        ),
        _step("/reservations/{reservation_id}/output_block", bound(reservations.output_block)),
        _step("/reservations/{reservation_id}/report", bound(regret.report), DEFAULT_BODY_LIMIT),
        Route("GET", "/regret", bound(regret.list_regret), hot=True),
        Route(
            "GET",
            "/reservations/{reservation_id}",
            bound(reservations.show_reservation),
            hot=True,
        ),
        Route(
            "DELETE",
            "/reservations/{reservation_id}",
            FreeHandler(selections),
            hot=True,
            scope=Scope.LIFECYCLE,
        ),
        Route(
            "DELETE",
            "/reservations",
            bound(reservations.free_by_prefix),
            scope=Scope.LIFECYCLE,
        ),
        Route("GET", "/loads", LoadsHandler(selections), hot=True),
        _question("/potential_loads", PotentialLoadsHandler(selections)),
        _question("/overlap_scores", OverlapScoresHandler(selections)),
        Route("GET", "/busy_threshold", bound(tuning.list_thresholds), hot=True),
        _admin("POST", "/busy_threshold", bound(tuning.post_thresholds)),
        _admin("DELETE", "/busy_threshold", bound(tuning.delete_thresholds)),
        Route("GET", "/router_mode", bound(tuning.list_modes), hot=True),
        _admin("POST", "/router_mode", bound(tuning.post_mode)),
        _admin("DELETE", "/router_mode", bound(tuning.delete_mode)),
        Route("GET", "/policy", bound(tuning.list_policies), hot=True),
        _admin("POST", "/policy", bound(tuning.post_policy)),
        _admin("DELETE", "/policy", bound(tuning.delete_policy)),
    )


def _question(path: str, handler: Handler) -> Route:
    """Returns the route of a question that books nothing."""
    return Route("POST", path, handler, True, LONG_BODY_LIMIT, scope=Scope.READ)


def _step(path: str, handler: Handler, body_limit: int = LONG_BODY_LIMIT) -> Route:
    """Returns the route of a booking, or a step in its life."""
    return Route("POST", path, handler, True, body_limit, scope=Scope.LIFECYCLE)


def _admin(method: str, path: str, handler: Handler, body_limit: int = DEFAULT_BODY_LIMIT) -> Route:
    """Returns the route of a change to workers or to routing."""
    return Route(method, path, handler, True, body_limit, scope=Scope.ADMIN)
