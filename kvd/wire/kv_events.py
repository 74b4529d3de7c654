"""Reads KV events of publishers: splits payloads into events, and reads their members.

A payload is a batch, in one of the forms that publishers have been seen to use:

    [ts, [event, ...], rank?]      mooncake_master, vLLM, SGLang
    {"events": [...], "dp_rank"?}  newer engines
    [event, ...]  or  event        bare
    the same as JSON text

The event itself shows whether it is a standard one or an engine's own (`read_event`), and a batch
may contain both. A value of a wrong type or range raises ValueError. Nothing here has state.

A payload is only split into the bytes of its events. The caller reads standard events one by one,
and passes engines' own events on unread. JSON is converted to msgpack first, in parts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from kvd.model import is_name
from kvd_core.conductor.repack import Repack
from kvd_core.events.split import split

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
I64_MIN = -(2**63)

# Longest payload with standard events: it is split without a pause, which takes up to 20 ms, and
# reading one event takes as long at most. Batches of engines' own events may be longer, as no
# Python objects are made for them.
MAX_BYTES = 4 * 1024 * 1024
MAX_JSON_BYTES = 2 * 1024 * 1024  # longest payload of JSON, which is converted in slices
MAX_EVENT_BYTES = 1024 * 1024  # longest standard event: 100,000 hashes, or 300,000 token ids
# Most maps and arrays of a standard event, 0.3 µs each; an empty one is a single byte.
MAX_CONTAINERS = 16_384
MAX_EVENTS = 16_384  # most events of a payload, some 40 µs each; an empty one is a single byte
MAX_TEXT_BYTES = 4096  # longest name that is kept to distinguish streams, as in registrations

# No msgpack batch begins with one of these bytes: as msgpack they are the numbers 9 to 123.
_JSON_STARTS = b"{[ \t\r\n"

MARK = b"event_type"  # name of a member that every standard event has, and no other event
_ONE_EVENT = b"\x93\x00\x91"  # [0, [event], rank], up to the event

Event = dict[str, Any]

# SGLang's keys, `[tag_][model_]HEX_suffix`, of which the last HEX counts. The suffix of a block's
# keys and values names their ranks, `_0_k` or `_0_1_v`, or `__k` where ranks share them. Objects
# with other suffixes are stored beside blocks: of a draft model (`_0_draft_k`), a window
# (`_0_swa_k`), an indexer, a state.
_SGLANG_KEY = re.compile(r"(?:.*_)?([0-9a-fA-F]{16})[0-9a-fA-F]{48}_(?:\d+(?:_\d+)?)?_[kv]")
# The hash that vLLM's connectors have in `prefix@model@...@HEX`.
_CONNECTOR_HASH = re.compile(r"[0-9a-fA-F]{16,128}")
_DECIMAL = re.compile(r"-?[0-9]{1,20}")
_HEX = re.compile(r"0[xX][0-9a-fA-F]{1,16}")


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of a payload, for `read_event`, and the rank that the payload names for them."""

    events: list[RawEvent]
    rank: int | None
    beyond: int = 0  # number of events above MAX_EVENTS, which are left out


class RawEvent(NamedTuple):
    """An unread event of a payload: its msgpack, and the number of maps and arrays in it."""

    packed: bytes
    containers: int


def read_batch(payload: bytes) -> Batch:
    """Returns the events of a msgpack payload; raises ValueError, with the reason, for none."""
    if len(payload) > MAX_BYTES:
        raise ValueError("too_large")
    events, beyond, rank = split(payload, MAX_EVENTS)
    return Batch(list(map(RawEvent._make, events)), rank, beyond)


def json_text(payload: bytes) -> Repack:
    """Returns a converter of a JSON payload to msgpack, which works in parts."""
    if len(payload) > MAX_JSON_BYTES:
        raise ValueError("too_large")
    return Repack(payload)


def read_event(event: RawEvent) -> RawEvent | Event:
    """Returns a standard event's members, and an engine's own event unread.

    Raises ValueError for a standard event that cannot be read or exceeds the bounds.
    """
    if MARK not in event.packed:
        return event
    if len(event.packed) > MAX_EVENT_BYTES or event.containers > MAX_CONTAINERS:
        raise ValueError("too_large")
    read = _msgpack(event.packed)
    # An event with `event_type` is a standard one, even if it has a `type` as well.
    return read if isinstance(read, dict) and "event_type" in read else event


def is_json(payload: bytes) -> bool:
    return bool(payload) and payload[0] in _JSON_STARTS


def engine_payload(event: RawEvent, rank: int | None) -> bytes:
    """Returns a batch of one engine's own event, for the decoder of such batches."""
    packed_rank: bytes = msgpack.packb(rank)
    return _ONE_EVENT + event.packed + packed_rank


# ---- members of standard events


def text(event: Event, name: str) -> str | None:
    value = event.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_TEXT_BYTES:
        raise ValueError(name)
    # `encode` refuses text that is not Unicode, before the event has any effect.
    if not value.isascii() and len(value.encode()) > MAX_TEXT_BYTES:
        raise ValueError(name)
    return value


def name(event: Event, member: str) -> str | None:
    """Returns a text that is kept as a name; raises ValueError if it cannot be one."""
    value = text(event, member)
    if value is not None and not is_name(value):
        raise ValueError(member)
    return value


def number(event: Event, name: str, maximum: int) -> int | None:
    value = event.get(name)
    if value is not None and (type(value) is not int or not 0 <= value <= maximum):
        raise ValueError(name)
    return value


def hash_of(value: object) -> int:
    """Returns a hash as 64 bits: negative ones as two's complement, bytes by their last eight."""
    if type(value) is int:
        if I64_MIN <= value <= U64_MAX:
            return value & U64_MAX
    elif isinstance(value, bytes):
        if value:
            return int.from_bytes(value[-8:], "big")
    elif isinstance(value, str) and (found := _number_in(value)) is not None:
        return found
    raise ValueError("hash")


def hashes(event: Event) -> list[object]:
    """Returns the hashes of an event's blocks, each to be read with `hash_of`.

    They are in `seq_hashes`, else in `block_hashes`. An event of a store whose lists are empty may
    name its object instead. Raises ValueError for an event without either list.
    """
    names = ("seq_hashes", "block_hashes")
    lists: list[list[object]] = [event[name] for name in names if event.get(name) is not None]
    if not lists or not all(isinstance(each, list) for each in lists):
        raise ValueError("seq_hashes")
    for each in lists:
        if each:
            return each
    for name in ("connector_block_hash", "object_key"):
        found = object_hash(event.get(name))
        if found is not None:
            return [found]
    return []


def names_object(event: Event) -> bool:
    """Returns whether the hash from `hashes` is a name that an engine's connector gave the block.

    It is the engine's own hash then, which covers the adapter and the salt, too.
    """
    if event.get("seq_hashes") or event.get("block_hashes"):
        return False
    if object_hash(event.get("connector_block_hash")) is not None:
        return True
    key = event.get("object_key")
    return isinstance(key, str) and _number_in(key) is None and object_hash(key) is not None


def tokens(event: Event) -> list[int] | None:
    """Returns the token ids, unchecked (see `check_tokens`); None without any."""
    value = event.get("token_ids")
    if not value and (value is None or isinstance(value, list)):
        return None
    if not isinstance(value, list):
        raise ValueError("token_ids")
    return value


def check_tokens(values: list[int]) -> None:
    """Raises ValueError unless all values, of which there is at least one, are token ids."""
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) > U32_MAX:
        raise ValueError("token_ids")


def object_hash(key: object) -> int | None:
    """Returns the hash of the block that an object of a store contains, wholly or in part.

    A number is the hash itself. Engines' connectors include their own block hash in the key of an
    object: vLLM's (`model@tp_rank:0@...@HEX`, Ascend's with a layer behind) publish its last 64
    bits, SGLang (`model_HEX_rank_k`) the first. Returns None for other keys, longer ones than any
    name too, and for objects that SGLang stores beside a block's keys and values.
    """
    if key is None:
        return None
    if not isinstance(key, str):
        try:
            return hash_of(key)
        except ValueError:
            return None
    if len(key) > MAX_TEXT_BYTES:  # searching all of an event's longest text takes 0.2 s
        return None
    if (found := _number_in(key)) is not None:
        return found
    if "@" in key:
        for part in reversed(key.split("@")):
            if _CONNECTOR_HASH.fullmatch(part):
                return int(part[-16:], 16)
        return None
    if match := _SGLANG_KEY.fullmatch(key):
        return int(match[1], 16)
    if len(key) > 16 and _CONNECTOR_HASH.fullmatch(key):  # a connector's hash alone
        return int(key[-16:], 16)
    return None


def _number_in(value: str) -> int | None:
    if _DECIMAL.fullmatch(value):
        found = int(value)
        return found & U64_MAX if I64_MIN <= found <= U64_MAX else None
    return int(value, 16) if _HEX.fullmatch(value) else None


def _msgpack(payload: bytes) -> object:
    try:
        return msgpack.unpackb(payload, strict_map_key=False, unicode_errors="surrogateescape")
    except Exception:  # msgpack's errors have no common base; RecursionError is among them
        raise ValueError("msgpack") from None
