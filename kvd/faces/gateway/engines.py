"""Routes that add engines to a gateway and remove them."""

from __future__ import annotations

from functools import partial

from kvd.errors import BadRequest, NotFound
from kvd.faces.common import bodies
from kvd.faces.gateway.registration import read_upstream
from kvd.gateway.dns_names import Wanted
from kvd.gateway.upstream import Upstream
from kvd.gateway.upstreams import CALLS, Upstreams
from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope


def upstream_routes(upstreams: Upstreams) -> tuple[Route, ...]:
    return (
        Route("POST", "/upstreams", partial(add, upstreams), hot=True, scope=Scope.ADMIN),
        Route(
            "DELETE",
            "/upstreams/{worker_id}",
            partial(remove, upstreams),
            hot=True,
            scope=Scope.ADMIN,
        ),
    )


def add(upstreams: Upstreams, request: Request) -> Response:
    """Adds an engine: it gets requests once the gateway has asked it what it is."""
    wanted = read_upstream(request.body)
    if wanted.name is not None:
        raise BadRequest("url: dns: names belong in the settings or the fleet file")
    found = upstreams.want(wanted, CALLS)
    assert isinstance(found, Upstream)
    answer = bodies.json_response({"url": found.url, "worker_id": found.worker_id})
    answer.status = 201
    return answer


def remove(upstreams: Upstreams, request: Request) -> Response:
    """Removes an engine that a call has added: it gets no new requests, but finishes its own."""
    text = request.captured.decode("latin-1")
    found = upstreams.each.get(int(text)) if text.isdecimal() and len(text) < 20 else None
    if found is None:
        raise NotFound(f"there is no upstream with the worker_id {text}")
    upstreams.unwant(Wanted(found.url, found.prefills), CALLS)
    return bodies.json_response({"url": found.url, "worker_id": found.worker_id})
