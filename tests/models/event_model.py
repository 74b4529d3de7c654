"""A slow, plain reader of engine batches: what `decoder.decode` must report of a payload.

It unpacks the bytes with the msgpack package and follows the wire contract member by member; it
shares no code with the decoder. Maps are `Pairs`, which keep order and duplicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import xxhash

TIERS = {
    "device": ("", "GPU", "DEVICE"),
    "host": ("CPU", "CPU_PINNED", "CPU_TIER1", "cpu"),
    "disk": ("CPU_TIER2", "DISK", "NVME", "STORAGE", "FS", "OBJ"),
    "external": ("EXTERNAL", "NETWORK", "REMOTE", "SHARED"),
}
KINDS = {
    "full": ("full_attention", "mla_attention", "sink_full_attention"),
    "window": ("sliding_window", "sliding_window_mla"),
}
STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
REMOVED = ("block_hashes", "medium")
TAIL = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality")
ORIGINS = {"NEW": "new", "REUSED": "reused"}
TAGS = ("BlockStored", "BlockRemoved", "AllBlocksCleared", "Ignored")
RANKS = ("data_parallel_rank", "dp_rank", "attn_dp_rank")


class Pairs(list):
    """A msgpack map as a list of its pairs."""

    def members(self) -> dict[str, Any]:
        """Returns the members with a text as name and a value other than nil; the last one wins."""
        return {name: value for name, value in self if isinstance(name, str) and value is not None}


class Refused(Exception):
    """The batch or event cannot be used; the argument is the reason."""


@dataclass
class Seen:
    begun: bool = False
    rank: int | None = None
    events: list[dict[str, object]] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    framed: int = 0
    ignored: int = 0


def read(payload: bytes) -> Seen:
    """Returns what a sink must get of a payload that is exactly one msgpack value."""
    batch = msgpack.unpackb(
        payload,
        raw=False,
        unicode_errors="surrogateescape",
        strict_map_key=False,
        object_pairs_hook=Pairs,
    )
    try:
        events, rank = read_parts(batch)
    except Refused as refusal:
        return Seen(bad=[str(refusal)])
    seen = Seen(begun=True, rank=rank, framed=len(events))
    for event in events:
        try:
            read_event(event, seen)
        except Refused as refusal:
            seen.bad.append(str(refusal))
    return seen


def parts(batch: object) -> Iterator[tuple[str, Any]]:
    """Yields "ts", "events" and "rank" with their values, in the order that the batch has them."""
    if isinstance(batch, Pairs):
        names = dict.fromkeys(RANKS, "rank") | {"ts": "ts", "events": "events"}
        for name, value in batch:
            if isinstance(name, str) and name in names and value is not None:
                yield names[name], value
    elif is_list(batch) and len(batch) >= 2:
        yield from zip(("ts", "events"), batch, strict=False)
        if len(batch) > 2 and batch[2] is not None:
            yield "rank", batch[2]


def read_parts(batch: object) -> tuple[list[Any], int | None]:
    events = rank = None
    for part, value in parts(batch):
        if part == "ts" and not is_int(value) and not isinstance(value, float):
            raise Refused("timestamp")
        if part == "rank" and not (is_int(value) and 0 <= value < 2**31):
            raise Refused("rank")
        if part == "events" and (events is not None or not is_list(value)):
            raise Refused("batch_shape")
        events = value if part == "events" else events
        rank = value if part == "rank" else rank
    if events is None:
        raise Refused("batch_shape")
    return events, rank


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_list(value: object) -> bool:
    return isinstance(value, list) and not isinstance(value, Pairs)


def read_event(event: object, seen: Seen) -> None:
    tag, members, tail = named(event)
    if "event_type" in members:
        raise Refused("unknown_type")
    if not isinstance(tag, str):
        raise Refused("event_shape")
    if tag not in TAGS:
        raise Refused("unknown_type")
    if tag == "Ignored":
        seen.ignored += 1
    elif tag == "AllBlocksCleared":
        medium = members.get("medium")
        named_tier = isinstance(medium, str) and medium != ""
        seen.events.append({"type": "cleared", "tier": tier(medium) if named_tier else None})
    elif tag == "BlockRemoved":
        seen.events.append(removed(members | tail))
    else:
        seen.events.append(stored(members, tail))


def named(event: object) -> tuple[object, dict[str, Any], dict[str, Any]]:
    """Returns an event's tag, its members by name, and separately those in an array's tail."""
    if isinstance(event, Pairs):
        members = event.members()
        return members.get("type"), members, {}
    if not is_list(event) or not event:
        return None, {}, {}
    names = {"BlockStored": STORED, "BlockRemoved": REMOVED}.get(
        event[0] if isinstance(event[0], str) else "", ()
    )
    known = dict(zip(names, event[1:], strict=False))
    tail = named_tail(event[1 + len(names) :]) if names else {}
    return event[0], {name: v for name, v in known.items() if v is not None}, tail


def named_tail(tail: list[Any]) -> dict[str, Any]:
    tail = tail[:4]
    fits = all(
        value is None or (is_int(value) if i % 2 == 0 else isinstance(value, str))
        for i, value in enumerate(tail)
    )
    lists = [value for value in tail if is_list(value)]
    if not lists and (fits or len(tail) == 4):
        found = dict(zip(TAIL, tail, strict=False))
    else:
        numbers = [value for value in tail if is_int(value)]
        texts = [value for value in tail if isinstance(value, str)]
        found = dict(zip((TAIL[0], TAIL[2]), numbers, strict=False))
        found |= dict(zip((TAIL[1],), texts, strict=False))
        found |= {"block_mm_infos": lists[-1]} if lists else {}
    return {name: value for name, value in found.items() if usable_in_tail(name, value)}


def usable_in_tail(name: str, value: object) -> bool:
    """Whether a member in the tail counts: not with a wrong type, but with any locality."""
    if value is None:
        return False
    if name == "group_idx":
        return is_int(value) and 0 <= value < 2**31
    if name == "kv_cache_spec_sliding_window":
        return is_int(value) and 0 <= value < 2**63
    if name == "kv_cache_spec_kind":
        return isinstance(value, str)
    return True


def fold(value: object, reason: str) -> int:
    if is_int(value):
        return value % 2**64
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    raise Refused(reason)


def hashes(members: dict[str, Any]) -> list[int]:
    if not is_list(members.get("block_hashes")):
        raise Refused("hashes")
    return [fold(value, "hashes") for value in members["block_hashes"]]


def tier(medium: str) -> str:
    return next((name for name, spellings in TIERS.items() if medium in spellings), "unknown")


def shared(members: dict[str, Any]) -> dict[str, object]:
    medium = members.get("medium", "")
    kind = members.get("kv_cache_spec_kind")
    group = members.get("group_idx")
    window = members.get("kv_cache_spec_sliding_window", 0)
    good = (
        isinstance(medium, str)
        and (kind is None or isinstance(kind, str))
        and (group is None or (is_int(group) and 0 <= group < 2**31))
        and (is_int(window) and 0 <= window < 2**63)
    )
    if not good:
        raise Refused("field_type")
    kinds = [name for name, spellings in KINDS.items() if kind in spellings]
    return {
        "tier": tier(medium),
        "kind": None if kind is None else (kinds or ["other"])[0],
        "remote": members.get("locality", "LOCAL") != "LOCAL",
        "group": group,
    }


def removed(members: dict[str, Any]) -> dict[str, object]:
    names = hashes(members)
    left = members.get("remaining_copy_counts")
    is_valid = is_list(left) and len(left) == len(names) and all(map(is_u32, left))
    remaining = {"remaining": left if is_valid else None}
    return {"type": "removed", "hashes": names} | shared(members) | remaining


def is_u32(value: object) -> bool:
    return is_int(value) and 0 <= value < 2**32


def tokens(members: dict[str, Any]) -> tuple[list[int], bool]:
    ids = members.get("token_ids")
    if is_list(ids) and all(map(is_u32, ids)):
        return ids, False
    if is_list(ids) and all(is_list(x) and len(x) == 2 and all(map(is_u32, x)) for x in ids):
        return [first for first, _ in ids] + [ids[-1][1]], True
    raise Refused("tokens")


def stored(members: dict[str, Any], tail: dict[str, Any]) -> dict[str, object]:
    block_hashes = hashes(members)
    parent = members.get("parent_block_hash")
    folded_parent = None if parent is None else fold(parent, "parent")
    token_ids, pairs = tokens(members)
    block_size = members.get("block_size", 0)
    if not is_int(block_size) or block_size < 0:
        raise Refused("block_size")
    common = shared(members | tail)
    lora_name, salt = adapter(members)
    extra_salt, mm = identity(members, tail, lora_name, len(block_hashes), block_size)
    lora_id = members.get("lora_id")
    origin = members.get("origin")
    return common | {
        "type": "stored",
        "hashes": block_hashes,
        "parent": folded_parent,
        "tokens": token_ids,
        "pairs": pairs,
        "block_size": block_size,
        "window": (members | tail).get("kv_cache_spec_sliding_window", 0),
        "lora_name": lora_name,
        "lora_id": (lora_id + 2**63) % 2**64 - 2**63 if is_int(lora_id) else None,
        "salt": salt or ("" if parent is not None else extra_salt),
        "mm": mm if any(mm) else None,
        "origin": ORIGINS.get(origin) if isinstance(origin, str) else None,
    }


def adapter(members: dict[str, Any]) -> tuple[str, str]:
    """Returns the LoRA name, and the salt from its own member."""
    salt = members.get("cache_salt", "")
    name = members.get("lora_name", "")
    if isinstance(name, Pairs):
        salt, name = name.members().get("cache_salt", salt), ""
    if not isinstance(name, str) or not isinstance(salt, str):
        raise Refused("field_type")
    return name, salt


def identity(
    members: dict[str, Any], tail: dict[str, Any], lora_name: str, blocks: int, block_size: int
) -> tuple[str, list[list[int]]]:
    """Returns the salt in the first block's extra_keys, and the objects of each block, sorted."""
    infos = members.get("block_mm_infos", tail.get("block_mm_infos", []))
    extra = members.get("extra_keys", [])
    if not is_list(infos) or not is_list(extra):
        raise Refused("field_type")
    try:
        explicit = [mm_info(entry) for entry in infos[:blocks]]
    except Refused:
        if "block_mm_infos" in members:
            raise
        explicit = []
    read_keys = [keys(entry, lora_name, block_size) for entry in extra[:blocks]]
    salt = read_keys[0][0] if read_keys else ""
    found = explicit if any(explicit) else [ids for _, ids in read_keys]
    return salt, [sorted(ids) for ids in found] + [[] for _ in range(blocks - len(found))]


def mm_info(entry: object) -> list[int]:
    if entry is None:
        return []
    objects = entry.members().get("mm_objects", []) if isinstance(entry, Pairs) else None
    if not is_list(objects) or not all(isinstance(one, Pairs) for one in objects):
        raise Refused("field_type")
    values = [one.members().get("mm_hash") for one in objects]
    if not all(map(is_int, values)):
        raise Refused("field_type")
    return [value % 2**64 for value in values]


def keys(entry: object, lora_name: str, block_size: int) -> tuple[str, list[int]]:
    if entry is None:
        return "", []
    if not is_list(entry):
        raise Refused("field_type")
    if not all(isinstance(item, str | bytes) or is_item(item) for item in entry):
        return "", []
    ids = [item_hash(item[0]) for item in entry if is_list(item) and item[1] < block_size]
    ids += [item_hash(item) for item in entry if isinstance(item, bytes)]
    texts = [item for item in entry if isinstance(item, str)]
    if lora_name and lora_name in texts:
        texts.remove(lora_name)
    ids += [item_hash(text) for text in texts if is_digest(text)]
    marked = [text[18:] for text in texts if text.startswith("dynamo-cache-salt:")]
    bare = [
        text
        for text in texts
        if text and not is_digest(text) and not text.startswith("dynamo-cache-salt:")
    ]
    salts = [*marked[-1:], *bare, ""]
    return next((text for text in salts if text), ""), ids


def is_item(value: object) -> bool:
    return is_list(value) and len(value) == 2 and isinstance(value[0], str) and is_int(value[1])


def is_digest(text: str) -> bool:
    return len(text) == 64 and all(digit in "0123456789abcdefABCDEF" for digit in text)


def item_hash(item: str | bytes) -> int:
    text = item if isinstance(item, str) else item.decode("utf-8", "surrogateescape")
    if is_digest(text):
        return int(text[:16], 16)
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogateescape"))
