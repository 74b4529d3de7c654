"""Routes for the engines behind a gateway: who is there, who comes, who goes."""

from __future__ import annotations

from functools import partial

from kvd.errors import BadRequest, NotFound
from kvd.faces.common import bodies
from kvd.gateway.dns_names import Wanted
from kvd.gateway.upstreams import Upstream, Upstreams
from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope
from kvd.selection.worker_record import Role
from kvd.wire.urls import parse_dns, parse_upstream
from kvd_core.json.scan import BodyScanner

UPSTREAM_MEMBERS = ("url", "role")
UPSTREAM = BodyScanner({}, UPSTREAM_MEMBERS)
CALLS = "calls"  # who wants the engines that came by POST /upstreams


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


def read_upstream(body: bytes) -> Wanted:
    """Returns the engine, or the name that leads to some, that a body describes."""
    members = bodies.scan(UPSTREAM, body)
    url = bodies.bounded(bodies.text(members, "url"), "url")
    role = bodies.optional_text(members, "role")
    if role not in (None, Role.PREFILL):
        raise BadRequest(f"role: expected {Role.PREFILL}, or no role for an engine that decodes")
    try:
        if parse_dns(url) is None:
            parse_upstream(url)
    except ValueError as error:
        raise BadRequest(f"url: {error}") from None
    return Wanted(url, prefills=role is not None)


def add(upstreams: Upstreams, request: Request) -> Response:
    """Has an engine be asked what it is, and served with from then on."""
    wanted = read_upstream(request.body)
    if wanted.name is not None:
        raise BadRequest("url: dns: names belong in the settings or the fleet file")
    found = upstreams.want(wanted, CALLS)
    assert isinstance(found, Upstream)
    answer = bodies.json_response({"url": found.url, "worker_id": found.worker_id})
    answer.status = 201
    return answer


def remove(upstreams: Upstreams, request: Request) -> Response:
    """Has an engine that came by a call get nothing new; what it is answering goes on."""
    text = request.captured.decode("latin-1")
    found = upstreams.each.get(int(text)) if text.isdecimal() and len(text) < 20 else None
    if found is None:
        raise NotFound(f"there is no upstream with the worker_id {text}")
    upstreams.unwant(Wanted(found.url, found.prefills), CALLS)
    return bodies.json_response({"url": found.url, "worker_id": found.worker_id})
