"""Reads the body of POST /replica_sync/register_peer, which is also an entry of a fleet file."""

from __future__ import annotations

from kvd.faces.common import bodies
from kvd.replica_sync.replicas import RegisteredReplica
from kvd_core.json.scan import BodyScanner

REGISTERED = ("endpoint", "curve_server_key")
REPLICA = BodyScanner({}, REGISTERED)


def read_replica(body: bytes) -> RegisteredReplica:
    """Returns the replica that a registration describes."""
    members = bodies.scan(REPLICA, body)
    endpoint = bodies.bounded(bodies.text(members, "endpoint"), "endpoint")
    return RegisteredReplica(endpoint, bodies.optional_text(members, "curve_server_key"))
