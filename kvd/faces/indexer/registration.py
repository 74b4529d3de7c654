"""Reads the body of POST /register, which is also an entry of a fleet file."""

from __future__ import annotations

from kvd.errors import Invalid
from kvd.faces.common import bodies
from kvd.index.registry import RegisteredRank
from kvd.model import RankKey
from kvd_core.json.scan import BodyScanner

SALT = ("additional_salt", "additionalsalt")

KEPT = ("endpoint", "replay_endpoint")
REGISTERED = (
    "instance_id",
    "endpoint",
    "model_name",
    "block_size",
    *bodies.TENANT,
    "dp_rank",
    "replay_endpoint",
    "curve_server_key",
    *SALT,
)
REGISTER = BodyScanner({}, REGISTERED)


def read_rank(body: bytes) -> RegisteredRank:
    """Returns the rank that a registration describes."""
    members = bodies.scan(REGISTER, body)
    # Salts are only checked for their type: today's engines put salts in their events.
    if all(name in members for name in SALT):
        raise Invalid("`additional_salt` and `additionalsalt` are the same member")
    for name in SALT:
        bodies.optional_text(members, name)
    for name in KEPT:
        if (value := bodies.optional_text(members, name)) is not None:
            bodies.bounded(value, name)
    block_size = bodies.uint(members, "block_size", bodies.U32_MAX)
    if block_size == 0:  # nothing would ever match
        raise Invalid("block_size: expected a number greater than 0")
    key = RankKey(
        bodies.registered_partition(members),
        bodies.uint(members, "instance_id", bodies.U64_MAX),
        bodies.optional_uint(members, "dp_rank", bodies.U32_MAX) or 0,
    )
    return RegisteredRank(
        key,
        bodies.text(members, "endpoint"),
        block_size,
        bodies.optional_text(members, "replay_endpoint"),
        bodies.optional_text(members, "curve_server_key"),
    )
