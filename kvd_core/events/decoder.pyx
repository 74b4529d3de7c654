"""The decoder's view of a payload as plain Python values, for tests and tools.

  payload ──decode_batch──▶ Recorder (the sink) ──▶ Batch of dicts

The index does not use this: its own sink takes the structs. Invariants
 1. Any bytes give a Batch; only an argument that is not bytes raises.
 2. A Batch holds exactly what a sink was given, in the same order.
Cost: about 2 µs an event.
"""

from __future__ import annotations

from collections import namedtuple

from libc.stdint cimport uint8_t, uint32_t
from libcpp cimport bool
from libcpp.string_view cimport string_view

from kvd_core.events.decoder cimport (
    BatchResult,
    ClearedEvent,
    GroupKind,
    Origin,
    Reason,
    RemovedEvent,
    Scratch,
    StoredEvent,
    Tier,
    decode_batch,
    kPublisherBytes,
    kReasonNames,
    kReasons,
    publisher_of,
)

REASONS = tuple([kReasonNames[i].decode() for i in range(kReasons)])

Batch = namedtuple("Batch", ("begun", "rank", "events", "bad", "framed", "ignored"))

cdef dict _TIERS = {
    <int>Tier.DEVICE: "device",
    <int>Tier.HOST: "host",
    <int>Tier.DISK: "disk",
    <int>Tier.EXTERNAL: "external",
    <int>Tier.UNKNOWN: "unknown",
}
cdef dict _KINDS = {
    <int>GroupKind.NONE: None,
    <int>GroupKind.FULL: "full",
    <int>GroupKind.WINDOW: "window",
    <int>GroupKind.OTHER: "other",
}
cdef dict _ORIGINS = {
    <int>Origin.UNKNOWN: None,
    <int>Origin.NEW: "new",
    <int>Origin.REUSED: "reused",
}


cdef cppclass Recorder:
    object seen  # the _Seen that takes the values
    __init__(object seen):
        this.seen = seen

    void begin(bool has_rank, uint32_t rank) noexcept:
        this.seen.begun = True
        this.seen.rank = rank if has_rank else None

    void stored(const StoredEvent& event) noexcept:
        this.seen.events.append(_stored(event))

    void removed(const RemovedEvent& event) noexcept:
        this.seen.events.append(_removed(event))

    void cleared(const ClearedEvent& event) noexcept:
        this.seen.events.append(
            {"type": "cleared", "tier": _TIERS[<int>event.tier] if event.has_tier else None}
        )

    void bad(Reason reason) noexcept:
        this.seen.bad.append(REASONS[<int>reason])


cdef class _Seen:
    cdef public bint begun
    cdef public object rank
    cdef public list events
    cdef public list bad

    def __cinit__(self):
        self.events = []
        self.bad = []


def decode(bytes payload not None):
    """Returns all that a sink is given for one payload, as a Batch; no content makes it fail.

    begun is False when the batch is refused whole; rank is None when the payload names none.
    Stored events: hashes, parent (or None), tokens, pairs, block_size (0 absent), tier, kind,
    remote, group (or None), window (0 absent), origin (or None), lora_name and salt ("" none),
    lora_id (or None), mm (None, or a list of ascending hashes a block). Removed ones: `remaining`
    copies (or None). Text that is no UTF-8 keeps its bytes as surrogate escapes.
    """
    cdef Scratch scratch
    cdef const uint8_t* data = <const uint8_t*><const char*>payload
    cdef _Seen seen = _Seen()
    cdef Recorder* sink = new Recorder(seen)
    cdef BatchResult result
    try:
        result = decode_batch(data, <size_t>len(payload), scratch, sink[0])
    finally:
        del sink
    return Batch(seen.begun, seen.rank, seen.events, seen.bad, result.events, result.ignored)


def publisher(bytes payload not None):
    """Returns the 16 bytes of the publisher's id in a batch, b"" if it names none."""
    cdef const uint8_t* data = <const uint8_t*><const char*>payload
    cdef const uint8_t* found = publisher_of(data, <size_t>len(payload), NULL)
    return b"" if found == NULL else found[:kPublisherBytes]


cdef dict _stored(const StoredEvent& event):
    return {
        "type": "stored",
        "hashes": [event.hashes[i] for i in range(event.n_hashes)],
        "parent": event.parent if event.has_parent else None,
        "tokens": [event.tokens[i] for i in range(event.n_tokens)],
        "pairs": event.pairs,
        "block_size": event.block_size,
        "tier": _TIERS[<int>event.tier],
        "kind": _KINDS[<int>event.kind],
        "remote": event.remote,
        "group": event.group if event.group >= 0 else None,
        "window": event.window,
        "lora_name": _text(event.lora_name),
        "lora_id": event.lora_id if event.has_lora_id else None,
        "salt": _text(event.salt),
        "mm": _objects(event),
        "origin": _ORIGINS[<int>event.origin],
    }


cdef dict _removed(const RemovedEvent& event):
    return {
        "type": "removed",
        "hashes": [event.hashes[i] for i in range(event.n_hashes)],
        "tier": _TIERS[<int>event.tier],
        "kind": _KINDS[<int>event.kind],
        "remote": event.remote,
        "group": event.group if event.group >= 0 else None,
        "remaining": (
            None
            if event.remaining == NULL
            else [event.remaining[i] for i in range(event.n_hashes)]
        ),
    }


cdef list _objects(const StoredEvent& event):
    if event.mm_begin == NULL:
        return None
    return [
        [event.mm[j] for j in range(event.mm_begin[i], event.mm_begin[i + 1])]
        for i in range(event.n_hashes)
    ]


cdef str _text(string_view text):
    return text.data()[:text.size()].decode("utf-8", "surrogateescape") if text.size() else ""
