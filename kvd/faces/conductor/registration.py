"""Reads the bodies of /register, which are also entries of a fleet file, and of /unregister.

Both are in JSON here; `msgpack` reads them in the other dialect.
"""

from __future__ import annotations

from kvd.faces.conductor.members import (
    MODEL,
    SALT,
    alias,
    checked,
    echoed,
    kept_model_name,
    optional_name,
    optional_uint,
    required,
    required_name,
    scan,
    text,
    uint,
)
from kvd.index.publishers import EVERY_INSTANCE, Described, Narrowing
from kvd.model import DEFAULT_TENANT
from kvd_core.json.scan import BodyScanner

ECHOED = ("hash_profile", "cache_group")  # for newer conductors: only shown again, without effect

REGISTERED = (
    *MODEL,
    "endpoint",
    "replay_endpoint",
    "type",
    "lora_name",
    "tenant_id",
    "instance_id",
    "block_size",
    "dp_rank",
    "curve_server_key",
    *SALT[1:],
    *ECHOED,
)
REGISTER = BodyScanner({}, REGISTERED)


def read_publisher(body: bytes) -> Described:
    """Returns the publisher that a registration describes; its addresses are not checked yet."""
    members = scan(REGISTER, body)
    described = Described(
        endpoint=required(members, "endpoint"),
        replay_endpoint=text(members, "replay_endpoint") or None,
        type=required_name(members, "type"),
        model_name=kept_model_name(members, "modelname"),
        lora_name=optional_name(members, "lora_name") or "",
        tenant_id=optional_name(members, "tenant_id") or DEFAULT_TENANT,
        instance_id=required_name(members, "instance_id"),
        block_size=uint(members, "block_size", 1),
        dp_rank=uint(members, "dp_rank", 0),
        salt=alias(members, SALT[1:]) or "",
        server_key=text(members, "curve_server_key") or None,
        echoed=tuple(
            (name, echoed(members[name], name)) for name in ECHOED if members.get(name) is not None
        ),
    )
    return checked(described.shared() if described.instance_id == EVERY_INSTANCE else described)


def read_narrowing(body: bytes) -> Narrowing:
    """Returns the criteria of the publishers that are to be unregistered."""
    members = scan(REGISTER, body)
    return Narrowing(
        tenant_id=text(members, "tenant_id") or DEFAULT_TENANT,
        instance_id=required(members, "instance_id"),
        dp_rank=optional_uint(members, "dp_rank", 0),
        type=text(members, "type") or None,
        model_name=alias(members, MODEL) or None,
        lora_name=text(members, "lora_name") or None,
        block_size=optional_uint(members, "block_size", 1),
        salt=alias(members, SALT[1:]) or None,
        endpoint=text(members, "endpoint") or None,
    )
