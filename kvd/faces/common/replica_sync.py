"""The routes that register, remove and list replicas, on every face that has replica sync."""

from __future__ import annotations

from functools import partial

from kvd.faces.common import bodies
from kvd.faces.common.registration import read_replica
from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope
from kvd.replica_sync.replicas import Replicas
from kvd_core.json.scan import BodyScanner

PEER = BodyScanner({}, ("endpoint",))


def routes(replicas: Replicas) -> tuple[Route, ...]:
    return (
        Route(
            "POST",
            "/replica_sync/register_peer",
            partial(register_peer, replicas),
            hot=True,
            scope=Scope.ADMIN,
        ),
        Route(
            "POST",
            "/replica_sync/deregister_peer",
            partial(deregister_peer, replicas),
            hot=True,
            scope=Scope.ADMIN,
        ),
        Route("GET", "/replica_sync/peers", partial(list_peers, replicas), hot=True),
    )


def register_peer(replicas: Replicas, request: Request) -> Response:
    """Answers 201 for a new replica, 200 for a known one."""
    new = replicas.register(*read_replica(request.body))
    return Response(201 if new else 200, bodies.OK)


async def deregister_peer(replicas: Replicas, request: Request) -> Response:
    await replicas.deregister(bodies.text(bodies.scan(PEER, request.body), "endpoint"))
    return Response(200, bodies.OK)


def list_peers(replicas: Replicas, request: Request) -> Response:
    return bodies.json_response(replicas.endpoints())
