"""Reads members of the structs that replicas send each other, strictly.

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
    """The reason why a message was refused."""

    FRAMES = "frames"  # the message does not have two frames
    TOPIC = "topic"
    MSGPACK = "msgpack"  # it cannot be read, or is larger or more complex than any event
    ENVELOPE = "envelope"  # a member of the envelope is missing, nil or of the wrong type
    TENANTS = "tenants"  # the two names of the tenant name different tenants
    EVENT = "event"  # a member of the event is missing, nil or of the wrong type
    STEP = "step"  # the step is none of the three
    HASHES = "hashes"  # some hashes are not numbers
    RANGE = "range"  # any other number is too large or negative


class FieldFault(Exception):
    """The first fault that a reader met; ends the reading."""

    def __init__(self, reason: Refused) -> None:
        self.reason = reason


def payload_of(frames: list[bytes], topic: bytes, bounds: Bounds) -> object:
    """Returns the unpacked payload of a message of a topic; raises FieldFault."""
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
    """Returns a struct's members by name; a struct may be an array, without names."""
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
    if type(value) is not int:  # a bool is an int in Python, but not in msgpack
        raise FieldFault(fault)
    if not 0 <= value <= maximum:
        raise FieldFault(Refused.RANGE)
    return value
