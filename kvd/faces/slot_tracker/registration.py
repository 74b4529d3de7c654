"""Reads the body of POST /register, which is also an entry of a fleet file."""

from __future__ import annotations

from kvd.faces.common import bodies
from kvd.slots.trackers import RegisteredWorker
from kvd_core.json.scan import BodyScanner

REGISTERED = (*bodies.PARTITION_MEMBERS, "worker_id", "block_size", "dp_start", "dp_size")
REGISTER = BodyScanner({}, REGISTERED)


def read_worker(body: bytes) -> RegisteredWorker:
    """Returns the worker that a registration describes."""
    members = bodies.scan(REGISTER, body)
    return RegisteredWorker(
        bodies.registered_partition(members),
        bodies.uint(members, "worker_id", bodies.U64_MAX),
        bodies.uint(members, "block_size", bodies.U32_MAX),
        bodies.uint(members, "dp_start", bodies.U32_MAX),
        bodies.uint(members, "dp_size", bodies.U32_MAX),
    )
