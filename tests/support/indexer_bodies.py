"""Bodies for the indexer's POST routes: a valid one for each, and values that it refuses."""

from __future__ import annotations

from typing import Any

from tests.support.bodies import NO_ARRAYS, NO_INTEGERS, NO_NAMES, NO_TEXTS, U32, Bodies, elements

MODEL = "face:model"  # has the colon that separates model and tenant in a dump
SOMEWHERE = "tcp://127.0.0.1:1"  # nobody listens there

POSTS: dict[str, tuple[dict[str, Any], int]] = {
    "/register": (
        {"instance_id": 2, "endpoint": SOMEWHERE, "model_name": "new", "block_size": 4},
        201,
    ),
    "/unregister": ({"instance_id": 2, "model_name": "new"}, 404),
    "/query": ({"token_ids": [1, 2, 3, 4], "model_name": MODEL}, 200),
    "/query_by_hash": ({"block_hashes": [1, -1], "model_name": MODEL}, 200),
    "/query_tiered_by_hash": ({"block_hashes": [1, -1], "model_name": MODEL}, 200),
}

UNFIT: dict[str, dict[str, tuple[str, ...]]] = {
    "/register": {
        "instance_id": (*NO_INTEGERS, "18446744073709551616", "-1", "null"),
        "block_size": (*NO_INTEGERS, *U32, "null"),
        "dp_rank": (*NO_INTEGERS, *U32),
        "endpoint": (*NO_TEXTS, "null"),
        "model_name": (*NO_NAMES, "null"),
        "tenant_id": (*NO_NAMES, "null"),
        "routing_group": (*NO_NAMES, "null"),
        "replay_endpoint": NO_TEXTS,
        "additional_salt": NO_TEXTS,
        "additionalsalt": NO_TEXTS,
    },
    "/unregister": {
        "instance_id": (*NO_INTEGERS, "18446744073709551616", "-1", "null"),
        "dp_rank": (*NO_INTEGERS, *U32),
        "model_name": (*NO_TEXTS, "null"),
        "tenant_id": NO_TEXTS,
        "routing_group": NO_TEXTS,
    },
    "/query": {
        "token_ids": (*NO_ARRAYS, *elements(*U32)),
        "model_name": (*NO_TEXTS, "null"),
        "tenant_id": (*NO_TEXTS, "null"),
        "routing_group": (*NO_TEXTS, "null"),
        "lora_name": NO_TEXTS,
        "cache_salt": NO_TEXTS,
    },
    "/query_by_hash": {
        "block_hashes": (*NO_ARRAYS, *elements("18446744073709551616", "-9223372036854775809")),
        "model_name": (*NO_TEXTS, "null"),
        "tenant_id": (*NO_TEXTS, "null"),
        "cache_salt": NO_TEXTS,
    },
    "/query_tiered_by_hash": {
        "block_hashes": (*NO_ARRAYS, *elements("18446744073709551616", "-9223372036854775809")),
        "model_name": (*NO_TEXTS, "null"),
        "tenant_id": (*NO_TEXTS, "null"),
        "routing_group": (*NO_TEXTS, "null"),
    },
}
REQUIRED = {
    "/register": ("instance_id", "endpoint", "model_name", "block_size"),
    "/unregister": ("instance_id", "model_name"),
    "/query": ("token_ids", "model_name"),
    "/query_by_hash": ("block_hashes", "model_name"),
    "/query_tiered_by_hash": ("block_hashes", "model_name"),
}
# The salt's two names exclude each other even with equal values.
CONTRADICTIONS = {
    "/register": (
        b'"tenant_id": "a", "routing_group": "b"',
        b'"additional_salt": "a", "additionalsalt": "a"',
    ),
    "/unregister": (b'"tenant_id": "a", "routing_group": "b"',),
    "/query": (b'"tenant_id": "a", "routing_group": "b"',),
    "/query_by_hash": (b'"tenant_id": "a", "routing_group": "b"',),
    "/query_tiered_by_hash": (b'"tenant_id": "a", "routing_group": "b"',),
}
MIB = 1024 * 1024
LIMITS = {
    "/register": 2 * MIB,
    "/unregister": 2 * MIB,
    "/query": 8 * MIB,
    "/query_by_hash": 8 * MIB,
    "/query_tiered_by_hash": 8 * MIB,
}
INDEXER = Bodies(POSTS, REQUIRED, UNFIT, CONTRADICTIONS, LIMITS)
