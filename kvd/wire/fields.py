"""Members of the structs that replicas write to each other, read strictly.

The tenant has two names: Dynamo 1.6.1 calls it `routing_group`, its predecessor `tenant_id`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from kvd.wire.unpack import Bounds, unpack

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1

TENANT_NAMES = ("routing_group", "tenant_id")


class Refused(StrEnum):
    """The message is no event; the text names the reason."""

    FRAMES = "frames"  # not two
    TOPIC = "topic"
    MSGPACK = "msgpack"  # cannot be read, or is larger or more complex than any event
    ENVELOPE = "envelope"  # a member is missing, nil or of the wrong type
    TENANTS = "tenants"  # both names of the tenant, and two tenants
    EVENT = "event"  # like ENVELOPE, in what that holds
    STEP = "step"  # none of the three
    HASHES = "hashes"  # not numbers
    RANGE = "range"  # any other number is too large or negative


class FieldFault(Exception):
    """Leaves a reader at the first fault."""

    def __init__(self, reason: Refused) -> None:
        self.reason = reason


def payload_of(frames: list[bytes], topic: bytes, bounds: Bounds) -> object:
    """Returns what a message of a topic carries, unpacked; raises Refusal."""
    if len(frames) != 2:
        raise FieldFault(Refused.FRAMES)
    if frames[0] != topic:
        raise FieldFault(Refused.TOPIC)
    try:
        return unpack(frames[1], bounds)
    except ValueError:
        raise FieldFault(Refused.MSGPACK) from None


def tenant_of(envelope: dict[Any, Any]) -> str:
    given = [envelope[name] for name in TENANT_NAMES if name in envelope]
    texts = {to_text(value, Refused.ENVELOPE) for value in given or [None]}
    if len(texts) > 1:
        raise FieldFault(Refused.TENANTS)
    return texts.pop()


def to_members(value: object, names: tuple[str, ...], fault: Refused) -> dict[Any, Any]:
    """Returns a struct's members by name; it may have come without the names."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, list) or len(value) != len(names):
        raise FieldFault(fault)
    return dict(zip(names, value, strict=True))


def to_text(value: object, fault: Refused) -> str:
    if not isinstance(value, str):
        raise FieldFault(fault)
    return value


def to_number(value: object, maximum: int, fault: Refused = Refused.EVENT) -> int:
    if type(value) is not int:  # bool is an int to Python, and not to msgpack
        raise FieldFault(fault)
    if not 0 <= value <= maximum:
        raise FieldFault(Refused.RANGE)
    return value
