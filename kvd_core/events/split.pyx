# distutils: language = c++
"""Splits a msgpack payload into its events, without reading any (events/split.hpp)."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE


def split(bytes payload not None, size_t max_events):
    """Returns (events, number of further events, rank or None) of a payload.

    An event is (its bytes, its number of maps and arrays); at most `max_events` are returned.
    Raises ValueError with the fault of a payload: "msgpack", "batch_shape", "rank".
    """
    cdef CSplit found
    cdef const char* data = PyBytes_AS_STRING(payload)
    found.read(<const uint8_t*>data, PyBytes_GET_SIZE(payload), max_events)
    if found.fault != NULL:
        raise ValueError((<bytes>found.fault).decode())
    events = [(data[each.begin : each.end], each.containers) for each in found.events]
    return events, found.beyond, found.rank if found.has_rank else None
