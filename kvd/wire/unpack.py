"""Reads untrusted msgpack into Python values, within bounds of memory and time."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that a payload may hold."""

    payload_bytes: int
    array_elements: int  # of one array
    text_bytes: int  # of one text
    containers: int = 64  # maps and arrays; an empty map is 1 byte there and 64 here
    map_members: int = 64  # of one map


def unpack(payload: bytes, bounds: Bounds) -> object:
    """Returns the one value of a payload; raises ValueError for other bytes or beyond bounds.

    All containers together may hold `array_elements`, plus `map_members` for each container. A map
    that contains a key twice is refused.

    msgpack allocates an array at its header, so a short payload of headers could demand gigabytes.
    Therefore the payload is first skipped through, without allocations, to see that it is complete.
    """
    if len(payload) > bounds.payload_bytes:
        raise ValueError("the payload is too long")
    budget = _SizeBudget(bounds)
    try:
        whole = msgpack.Unpacker(max_buffer_size=bounds.payload_bytes)
        whole.feed(payload)
        whole.skip()
    except msgpack.UnpackException as error:
        raise ValueError(f"the payload cannot be read: {error!r}") from None
    value: object = msgpack.unpackb(
        payload,
        object_pairs_hook=budget.map,
        list_hook=budget.array,
        max_array_len=bounds.array_elements,
        max_map_len=bounds.map_members,
        max_str_len=bounds.text_bytes,
        max_bin_len=bounds.text_bytes,
        max_ext_len=0,
    )
    return value


class _SizeBudget:
    """Counts the containers and elements of one payload against its bounds."""

    __slots__ = ("_containers", "_elements")

    def __init__(self, bounds: Bounds) -> None:
        self._containers = bounds.containers
        self._elements = bounds.array_elements + bounds.containers * bounds.map_members

    def map(self, pairs: list[tuple[object, object]]) -> dict[object, object]:
        self._take(len(pairs))
        members = dict(pairs)
        if len(members) != len(pairs):
            raise ValueError("a map contains a key twice")
        return members

    def array(self, items: list[object]) -> list[object]:
        self._take(len(items))
        return items

    def _take(self, elements: int) -> None:
        self._containers -= 1
        self._elements -= elements
        if self._containers < 0 or self._elements < 0:
            raise ValueError("the payload has too many values")
