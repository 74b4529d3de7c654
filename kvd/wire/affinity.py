"""Messages among replicas about sessions: the rank that each session is bound to.

    frame 1   the topic, dynamo.session-affinity.v1
    frame 2   msgpack, a map, integers in their shortest form:

      {model_name, routing_group, tenant_id, session_id, worker_id, dp_rank, sequence, writer_id}

These are the frames of Dynamo 1.6.1, seen on a live one, but for `tenant_id` (see `fields`). A
message is sent when a booking binds a session or uses its binding, and when such a booking ends.
`sequence` and `writer_id` are those of the replica that bound the session, also in messages of
other replicas. The larger pair wins; an equal pair says that the session goes on. A nil `dp_rank`
stands for any rank of the worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgpack

from kvd.model import PartitionKey
from kvd.wire.fields import (
    U32_MAX,
    U64_MAX,
    FieldFault,
    Refused,
    payload_of,
    tenant_of,
    to_members,
    to_number,
    to_text,
)
from kvd.wire.unpack import Bounds

TOPIC = b"dynamo.session-affinity.v1"

BOUNDS = Bounds(payload_bytes=16 * 1024, array_elements=0, text_bytes=4096)

# Highest sequence of a binding, in nanoseconds since 1970: the year 2262. After a higher one no
# replica could bind the session any more.
MAX_SEQUENCE = 2**63


class Version(NamedTuple):
    """Orders the bindings of one session."""

    sequence: int  # nanoseconds of a wall clock, or later
    writer_id: int


@dataclass(frozen=True, slots=True)
class Bound:
    """The binding of a session to a rank, with the version that orders it among others."""

    partition: PartitionKey
    session_id: str
    worker_id: int
    dp_rank: int | None  # None: any rank of the worker
    version: Version


def encode(bound: Bound) -> bytes:
    """Returns the payload of a message; its other frame is the TOPIC."""
    model_name, tenant_id = bound.partition
    payload: bytes = msgpack.packb(
        {
            "model_name": model_name,
            "routing_group": tenant_id,
            "tenant_id": tenant_id,
            "session_id": bound.session_id,
            "worker_id": bound.worker_id,
            "dp_rank": bound.dp_rank,
            "sequence": bound.version.sequence,
            "writer_id": bound.version.writer_id,
        }
    )
    return payload


def decode(frames: list[bytes]) -> Bound | Refused:
    """Returns the binding that a message states, or why it was refused."""
    try:
        return _read(payload_of(frames, TOPIC, BOUNDS))
    except FieldFault as refusal:
        return refusal.reason


def _read(value: object) -> Bound:
    fault = Refused.ENVELOPE
    members = to_members(value, (), fault)
    dp_rank = members.get("dp_rank")
    return Bound(
        PartitionKey(to_text(members.get("model_name"), fault), tenant_of(members)),
        to_text(members.get("session_id"), fault),
        to_number(members.get("worker_id"), U64_MAX, fault),
        None if dp_rank is None else to_number(dp_rank, U32_MAX, fault),
        Version(
            to_number(members.get("sequence"), MAX_SEQUENCE, fault),
            to_number(members.get("writer_id"), U64_MAX, fault),
        ),
    )
