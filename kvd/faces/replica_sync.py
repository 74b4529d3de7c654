"""The routes that say which replicas to listen to; the same on every face that has replicas."""

from __future__ import annotations

from functools import partial

from kvd.faces import bodies
from kvd.http.types import Request, Response, Route
from kvd.replicas import Replicas
from kvd_core.scan import BodyScanner

OK = b'{"status":"ok"}'

REGISTERED = ("endpoint",)
PEER = BodyScanner({}, REGISTERED)


def routes(replicas: Replicas) -> tuple[Route, ...]:
    return (
        Route("POST", "/replica_sync/register_peer", partial(register_peer, replicas)),
        Route("POST", "/replica_sync/deregister_peer", partial(deregister_peer, replicas)),
        Route("GET", "/replica_sync/peers", partial(list_peers, replicas)),
    )


def register_peer(replicas: Replicas, request: Request) -> Response:
    """Answers 201 for a new replica, 200 for a known one."""
    new = replicas.register(read_peer(request.body))
    return Response(201 if new else 200, OK)


def read_peer(body: bytes) -> str:
    """Returns the endpoint of the replica that a registration describes."""
    return bodies.bounded(_endpoint(body), "endpoint")


async def deregister_peer(replicas: Replicas, request: Request) -> Response:
    await replicas.deregister(_endpoint(request.body))
    return Response(200, OK)


def list_peers(replicas: Replicas, request: Request) -> Response:
    return bodies.json_response(replicas.endpoints())


def _endpoint(body: bytes) -> str:
    return bodies.text(bodies.scan(PEER, body), "endpoint")
