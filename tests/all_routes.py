"""The routes of every face, made without a daemon."""

from __future__ import annotations

import time
from random import Random
from typing import Any

from kvd.faces import conductor, indexer, replica_sync, slot_tracker
from kvd.faces.monitoring import metrics_route
from kvd.faces.selection.routes import selection_routes
from kvd.http.types import Route
from kvd.peers import Peers
from kvd.publishers import Publishers
from kvd.registry import Registry
from kvd.replicas import Replicas
from kvd.scheduling.options import RouterOptions
from kvd.selection.service import Selections
from kvd.slots import SlotTrackers
from kvd.state import State
from kvd.wire.replica import ReplicaCounts


def all_routes() -> dict[str, tuple[Route, ...]]:
    """Returns every route that a daemon can have, by the name of its face."""
    nobody: Any = None  # nothing is registered here
    state, dumps = State(), indexer.dumps_bound()
    registry, replicas = Registry(state, nobody), Replicas(None, ReplicaCounts())
    clocks = time.monotonic, time.time_ns
    selections = Selections(state, registry, RouterOptions(), 1.0, Random(0), *clocks)
    of_replicas = replica_sync.routes(replicas)
    faces = {
        "indexer": indexer.routes(state, registry, Peers(), dumps, test_endpoints=True),
        "slot-tracker": slot_tracker.routes(SlotTrackers(1.0), time.monotonic) + of_replicas,
        "selection": (
            *selection_routes(selections),
            indexer.dump_route(state, dumps),
            *of_replicas,
        ),
        "conductor": conductor.routes(state, Publishers(state, nobody)),
    }
    return {face: (*routes, metrics_route([])) for face, routes in faces.items()}
