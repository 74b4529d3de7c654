"""Bodies for the slot tracker's POST routes: a valid one for each, and values that it refuses."""

from __future__ import annotations

from typing import Any

from tests.support.bodies import NO_ARRAYS, NO_INTEGERS, NO_NAMES, NO_TEXTS, U32, Bodies, elements

MODEL = "face/model"
WORKER = 1  # with ranks 3 and 4, in blocks of 16
LIVE = "live"  # a request whose prefill is complete
REPLICA = "tcp://127.0.0.1:1"

REGISTERED = {"worker_id": WORKER, "model_name": MODEL, "block_size": 16, "dp_start": 3}
REGISTERED |= {"dp_size": 2}
BOOKED = {"model_name": MODEL, "request_id": LIVE, "worker_id": WORKER, "dp_rank": 3}
BOOKED |= {"sequence_hashes": [1, 2, 3], "new_isl_tokens": 48}

POSTS: dict[str, tuple[dict[str, Any], int]] = {
    "/register": ({**REGISTERED, "model_name": "new"}, 201),
    "/unregister": ({"worker_id": WORKER, "model_name": "new"}, 404),
    "/add": ({**BOOKED, "request_id": "new"}, 201),
    "/prefill_complete": ({"model_name": MODEL, "request_id": LIVE}, 200),
    "/free": ({"model_name": MODEL, "request_id": "unknown"}, 200),
    "/potential_loads": ({"model_name": MODEL, "sequence_hashes": [1, 2, 9]}, 200),
    # Refused, as this process has no port for replicas.
    "/replica_sync/register_peer": ({"endpoint": REPLICA}, 409),
    "/replica_sync/deregister_peer": ({"endpoint": REPLICA}, 409),
}

TEXT = (*NO_TEXTS, "null")
U32_NUMBER = (*NO_INTEGERS, *U32, "null")
U64_NUMBER = (*NO_INTEGERS, "18446744073709551616", "-1", "null")
TOKENS = (*NO_INTEGERS, "9007199254740993", "-1", "null")  # 2^53 is the most
I64 = ("9223372036854775808", "-9223372036854775809", "18446744073709551615")
SIGNED = (*NO_ARRAYS, *elements(*I64))  # of 64 bits with a sign, as in Dynamo
HASHES = (*NO_ARRAYS, *elements("18446744073709551616", "-9223372036854775809"))

PARTITION = {"model_name": TEXT, "tenant_id": TEXT, "routing_group": TEXT}
STEP = {**PARTITION, "request_id": TEXT}
UNFIT: dict[str, dict[str, tuple[str, ...]]] = {
    "/register": {
        **dict.fromkeys(PARTITION, (*NO_NAMES, "null")),
        "worker_id": U64_NUMBER,
        **dict.fromkeys(("block_size", "dp_start", "dp_size"), U32_NUMBER),
    },
    "/unregister": {**PARTITION, "worker_id": U64_NUMBER},
    "/add": {
        **STEP,
        "worker_id": U64_NUMBER,
        "dp_rank": U32_NUMBER,
        "sequence_hashes": SIGNED,
        "new_isl_tokens": TOKENS,
    },
    "/prefill_complete": STEP,
    "/free": STEP,
    "/potential_loads": {**PARTITION, "sequence_hashes": HASHES, "new_isl_tokens": TOKENS},
    "/replica_sync/register_peer": {"endpoint": TEXT},
    "/replica_sync/deregister_peer": {"endpoint": TEXT},
}
REQUIRED = {path: tuple(name for name in body) for path, (body, _) in POSTS.items()}
REQUIRED["/add"] = tuple(name for name in REQUIRED["/add"] if name != "new_isl_tokens")
MIB = 1024 * 1024

TWO_TENANTS = (b'"tenant_id": "a", "routing_group": "b"',)
SLOT_TRACKER = Bodies(
    POSTS,
    REQUIRED,
    UNFIT,
    {path: TWO_TENANTS for path in POSTS if not path.startswith("/replica_sync/")},
    dict.fromkeys(POSTS, 2 * MIB),
)
