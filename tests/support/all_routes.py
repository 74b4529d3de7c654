"""The routes of every face, made without a daemon."""

from __future__ import annotations

import time
from random import Random
from typing import Any

from kvd.faces.common import replica_sync
from kvd.faces.common.diagnosis import diagnose_route
from kvd.faces.common.monitoring import metrics_route
from kvd.faces.common.openapi import with_document
from kvd.faces.conductor import routes as conductor
from kvd.faces.conductor import schemas as conductor_schemas
from kvd.faces.explain.routes import Explainer, explain_routes
from kvd.faces.gateway import schemas as gateway_schemas
from kvd.faces.gateway.engines import upstream_routes
from kvd.faces.gateway.routes import gateway_routes
from kvd.faces.indexer import routes as indexer
from kvd.faces.indexer import schemas as indexer_schemas
from kvd.faces.selection import schemas as selection_schemas
from kvd.faces.selection.routes import selection_routes
from kvd.faces.slot_tracker import routes as slot_tracker
from kvd.faces.slot_tracker import schemas as slot_tracker_schemas
from kvd.faces.ui import ui_routes
from kvd.faces.ui.picture import Picture, PicturedParts
from kvd.gateway.forwarding import Forwarder
from kvd.gateway.stats import GatewayStats
from kvd.http.limits import DEFAULT_BODY_LIMIT
from kvd.http.routes import Route
from kvd.index.partitions import State
from kvd.index.peers import Peers
from kvd.index.publishers import Publishers
from kvd.index.registry import Registry
from kvd.replica_sync.replicas import Replicas
from kvd.selection.options import RouterOptions
from kvd.selection.service import Selections
from kvd.slots.trackers import SlotTrackers
from kvd.wire.replica import ReplicaStats

DESCRIPTIONS = {
    "gateway": gateway_schemas.DESCRIPTION,
    "indexer": indexer_schemas.DESCRIPTION,
    "slot-tracker": slot_tracker_schemas.DESCRIPTION,
    "selection": selection_schemas.DESCRIPTION,
    "conductor": conductor_schemas.DESCRIPTION,
}


def all_routes() -> dict[str, tuple[Route, ...]]:
    """Returns every route that a daemon can have, by the name of its face."""
    unused: Any = None  # stands for parts that only the handlers use
    state, dumps = State(), indexer.dumps_bound(8)
    registry, replicas = Registry(state, unused), Replicas(None, ReplicaStats())
    clocks = time.monotonic, time.time_ns
    selections = Selections(state, registry, RouterOptions(), 1.0, Random(0), *clocks)
    of_replicas = replica_sync.routes(replicas)
    forwarder = Forwarder(unused, unused, unused, GatewayStats(), unused, unused, 0, "")
    publishers, slots = Publishers(state, unused), SlotTrackers(1.0)
    picture = Picture(PicturedParts(state, registry, publishers, slots, selections, []))
    explain = explain_routes(Explainer(state, selections), unused)
    of_all = *ui_routes(picture, state), metrics_route([]), diagnose_route(unused, unused), *explain
    faces = {
        "gateway": (
            *gateway_routes(unused, unused, forwarder, DEFAULT_BODY_LIMIT),
            *upstream_routes(unused),
        ),
        "indexer": indexer.routes(state, registry, Peers(), dumps, test_endpoints=True),
        "slot-tracker": slot_tracker.routes(slots) + of_replicas,
        "selection": (
            *selection_routes(selections),
            indexer.dump_route(state, dumps),
            *of_replicas,
        ),
        "conductor": conductor.routes(state, publishers),
    }
    return {
        face: with_document(face, (*routes, *of_all), DESCRIPTIONS[face])
        for face, routes in faces.items()
    }
