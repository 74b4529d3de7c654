"""Reads what publishers of KV events send: payloads into events, members into values.

A payload is a batch, and comes in every form that publishers have been seen to use:

    [ts, [event, ...], rank?]      mooncake_master, vLLM, SGLang
    {"events": [...], "dp_rank"?}  newer engines
    [event, ...]  or  event        bare
    the same as JSON text

Whether an event is a standard one or an engine's own is seen from the event (`read_event`), and a
batch may hold both. What is of a wrong type or range is ValueError; nothing here has state.

Of a payload nothing is made but the bytes of its events: the caller reads them one by one, and
engines' own not at all. JSON is written as msgpack first, in parts, and is that from then on.
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

# Longest payload with standard events: it is taken apart in one go, for up to 20 ms, and an event
# is read in one go, for as long. Engines' own batches may be longer: nothing is made of Python for
# them.
MAX_BYTES = 4 * 1024 * 1024
MAX_JSON_BYTES = 2 * 1024 * 1024  # longest payload of JSON, which becomes msgpack in slices
MAX_EVENT_BYTES = 1024 * 1024  # longest standard event: 100,000 hashes, or 300,000 token ids
# Maps and arrays of a standard event, 0.3 µs each; an empty one costs a byte.
MAX_CONTAINERS = 16_384
MAX_EVENTS = 16_384  # events of a payload, some 40 µs each; an empty one costs a byte
MAX_TEXT_BYTES = 4096  # longest name that is kept to distinguish streams, as in registrations

# No msgpack batch begins with one of these: as msgpack they are the numbers 9 to 123.
_JSON_STARTS = b"{[ \t\r\n"

MARK = b"event_type"  # a member that every standard event has, and no other
_ONE_EVENT = b"\x93\x00\x91"  # [0, [event], rank], up to the event

Event = dict[str, Any]

# SGLang's `[tag_][model_]HEX_suffix`, of which the last HEX counts: a block's keys and values end
# with their ranks, `_0_k`, `_0_1_v`, or `__k` where ranks share them. What ends otherwise is kept
# beside blocks: of a draft model (`_0_draft_k`), a window (`_0_swa_k`), an indexer, a state.
_SGLANG_KEY = re.compile(r"(?:.*_)?([0-9a-fA-F]{16})[0-9a-fA-F]{48}_(?:\d+(?:_\d+)?)?_[kv]")
# The hash that vLLM's connectors have in `prefix@model@...@HEX`.
_CONNECTOR_HASH = re.compile(r"[0-9a-fA-F]{16,128}")
_DECIMAL = re.compile(r"-?[0-9]{1,20}")
_HEX = re.compile(r"0[xX][0-9a-fA-F]{1,16}")


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of a payload, for `read_event`, and the rank that it says they are of."""

    events: list[RawEvent]
    rank: int | None
    beyond: int = 0  # events above MAX_EVENTS, which are not among these


class RawEvent(NamedTuple):
    """An event of a payload."""

    packed: bytes
    containers: int


def read_batch(payload: bytes) -> Batch:
    """Returns the events of a msgpack payload; raises ValueError, which says why, without any."""
    if len(payload) > MAX_BYTES:
        raise ValueError("too_large")
    events, beyond, rank = split(payload, MAX_EVENTS)
    return Batch(list(map(RawEvent._make, events)), rank, beyond)


def json_text(payload: bytes) -> Repack:
    """Returns a JSON payload, to be read in parts and then had as msgpack."""
    if len(payload) > MAX_JSON_BYTES:
        raise ValueError("too_large")
    return Repack(payload)


def read_event(event: RawEvent) -> RawEvent | Event:
    """Returns what an event of a batch says; one of an engine's own stays as it is.

    ValueError for a standard one that cannot be read, or that is larger than any.
    """
    if MARK not in event.packed:
        return event
    if len(event.packed) > MAX_EVENT_BYTES or event.containers > MAX_CONTAINERS:
        raise ValueError("too_large")
    read = _msgpack(event.packed)
    # A `type` beside it does not matter.
    return read if isinstance(read, dict) and "event_type" in read else event


def is_json(payload: bytes) -> bool:
    return bool(payload) and payload[0] in _JSON_STARTS


def engine_payload(event: RawEvent, rank: int | None) -> bytes:
    """Returns the batch of one engine event, for the decoder of those."""
    said: bytes = msgpack.packb(rank)
    return _ONE_EVENT + event.packed + said


# ---- members of standard events


def text(event: Event, name: str) -> str | None:
    value = event.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_TEXT_BYTES:
        raise ValueError(name)
    # Text that is not Unicode is refused here, before the event counts for anything.
    if not value.isascii() and len(value.encode()) > MAX_TEXT_BYTES:
        raise ValueError(name)
    return value


def name(event: Event, member: str) -> str | None:
    """Returns a text that names what is kept."""
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

    They are in `seq_hashes`, else in `block_hashes`; an event of a store that has empty ones may
    name its object instead. Without any of the lists it is no event (ValueError).
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
    """Returns whether `hashes` has returned what an engine's connector calls a block.

    Those are the engine's own hashes, which it has made of the adapter and the salt, too.
    """
    if event.get("seq_hashes") or event.get("block_hashes"):
        return False
    if object_hash(event.get("connector_block_hash")) is not None:
        return True
    key = event.get("object_key")
    return isinstance(key, str) and _number_in(key) is None and object_hash(key) is not None


def tokens(event: Event) -> list[int] | None:
    """Returns the token ids, each part of which `check_tokens` has to allow; None without any."""
    value = event.get("token_ids")
    if not value and (value is None or isinstance(value, list)):
        return None
    if not isinstance(value, list):
        raise ValueError("token_ids")
    return value


def check_tokens(values: list[int]) -> None:
    """Raises ValueError where a part of a list, not empty, is no token ids."""
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) > U32_MAX:
        raise ValueError("token_ids")


def object_hash(key: object) -> int | None:
    """Returns the hash of the block that an object of a store is, or is a part of.

    A number is the hash. Connectors of engines name an object by their own block hash among other
    things: vLLM's (`model@tp_rank:0@...@HEX`, Ascend's with a layer behind) publish its last 64
    bits, SGLang (`model_HEX_rank_k`) the first. None for other keys, and for what SGLang keeps
    beside a block's keys and values.
    """
    if key is None:
        return None
    if not isinstance(key, str):
        try:
            return hash_of(key)
        except ValueError:
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
    except Exception:  # its errors have no common base; RecursionError is among them
        raise ValueError("msgpack") from None
