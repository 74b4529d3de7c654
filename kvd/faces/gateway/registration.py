"""Reads the body of POST /upstreams, which is also an entry of a fleet file."""

from __future__ import annotations

from kvd.errors import BadRequest
from kvd.faces.common import bodies
from kvd.gateway.dns_names import Wanted
from kvd.selection.worker_record import Role
from kvd.wire.urls import parse_dns, parse_upstream
from kvd_core.json.scan import BodyScanner

REGISTERED = ("url", "role")
UPSTREAM = BodyScanner({}, REGISTERED)


def read_upstream(body: bytes) -> Wanted:
    """Returns the engine that a body describes, or the DNS name of engines."""
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
