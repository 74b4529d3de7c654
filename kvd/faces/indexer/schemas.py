"""Schemas of the indexer's routes: of bodies, as `routes` reads them, and answers."""

from __future__ import annotations

from kvd.faces.common.every_face import EVERY_FACE, HEALTH
from kvd.faces.common.schemas import (
    ADDRESS,
    ANY,
    BLOCK_SIZE,
    BLOCKS,
    COUNT,
    FAILURE,
    FILTERS,
    FLAG,
    HASH,
    KEPT_TENANT,
    LABEL,
    NAME,
    OK,
    SECONDS,
    TENANT,
    TEXT,
    TOKENS,
    U32,
    U64,
    Content,
    Description,
    Operation,
    Schema,
    array,
    by_name,
    by_rank,
    in_json,
    members,
    nullable,
    one_of,
    row,
)
from kvd.wire.dump import BINARY_DUMP
from kvd.wire.event_stream import StreamHealth
from kvd.wire.stream_link import ListenerStatus, Quiet

# ---- questions

STREAM, STATUS = one_of(*StreamHealth), one_of(*ListenerStatus)
STREAMS = {"streams": nullable(FLAG)}
SALT = {"cache_salt": nullable(TEXT)}
MODEL = {"model_name": TEXT}

QUERY = members(
    MODEL | {"token_ids": array(U32)}, TENANT | SALT | STREAMS | {"lora_name": nullable(TEXT)}
)
QUERY_BY_HASH = members(MODEL | {"block_hashes": array(HASH)}, TENANT | SALT | STREAMS)
QUERY_TIERED = members(MODEL | {"block_hashes": array(HASH)}, TENANT)

OVERLAP = {
    "longest_matched": TOKENS,
    "gpu": TOKENS,
    "dp": by_rank(TOKENS),
    "cpu": TOKENS,
    "disk": TOKENS,
}
SCORES = row(
    {
        "scores": by_name(by_rank(TOKENS)),
        "frequencies": array({**COUNT, "description": "ranks that hold the block"}),
        "instances": by_name(row(OVERLAP)),
    },
    {"streams": by_name(by_rank(STREAM))},
)
RANK_BLOCKS: Schema = {
    "type": "array",
    "prefixItems": [row({"worker_id": U64, "dp_rank": U32}), BLOCKS],
    "minItems": 2,
    "maxItems": 2,
}
TIER: Schema = {
    "type": "array",
    "prefixItems": [
        one_of("host_pinned", "disk", "external"),
        row({"hits": array(RANK_BLOCKS)}),
    ],
    "minItems": 2,
    "maxItems": 2,
}
TIERED = row(
    {
        "block_size": BLOCK_SIZE,
        "tiered": row(
            {
                "device": row({"scores": array(RANK_BLOCKS), "frequencies": array(COUNT)}),
                "lower_tier": array(TIER),
            }
        ),
    }
)

# ---- registrations

RANK = {"instance_id": U64}
REGISTER = members(
    RANK | {"endpoint": ADDRESS, "model_name": NAME, "block_size": BLOCK_SIZE},
    KEPT_TENANT
    | {
        "dp_rank": nullable(U32),
        "replay_endpoint": nullable(ADDRESS),
        "curve_server_key": nullable(TEXT),
        "additional_salt": nullable(TEXT),
        "additionalsalt": nullable(TEXT),
    },
)
UNREGISTER = members(
    RANK | MODEL,
    {
        "tenant_id": nullable(TEXT),
        "routing_group": nullable(TEXT),
        "dp_rank": nullable(U32),
    },
)
LISTENER = members(RANK, TENANT | {"model_name": nullable(TEXT), "dp_rank": nullable(U32)})
PEER = members({"url": LABEL})

# Members of a model and tenant that say whether questions match anything.
MATCHING = {"questions": COUNT, "matched": COUNT}
WARNING = {"warning": TEXT}
# Members of a rank's stream.
STREAM_MEMBERS = row(
    {"endpoint": TEXT, "status": STATUS, "stream": STREAM},
    {
        "last_error": TEXT,
        "loss": TEXT,
        "quiet": one_of(*Quiet),
        "quiet_s": SECONDS,
        "ignored_events": by_name(COUNT),
        "last_seq": U64,
        "publisher_id": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    },
)
WORKER = row(
    {
        "instance_id": {"type": ["integer", "string"]},
        "source": {"const": "zmq"},
        "status": STATUS,
        "stream": STREAM,
        "model_name": TEXT,
        "tenant_id": TEXT,
        "block_size": BLOCK_SIZE,
        **MATCHING,
        "endpoints": by_rank(TEXT),
        "listeners": by_rank(STREAM_MEMBERS),
    },
    WARNING,
)

# ---- dumps

DUMPED_BLOCK = row({"block_hash": U64, "tokens_hash": U64, "mm_extra_info": {"type": "null"}})
STORED = row(
    {
        "parent_hash": nullable(U64),
        "start_position": {"type": "null"},
        "blocks": array(DUMPED_BLOCK),
    }
)
DUMPED_EVENT = row(
    {
        "worker_id": {"type": ["integer", "string"]},
        "storage_tier": one_of("device", "host_pinned", "disk", "external"),
        "event": row({"event_id": COUNT, "data": row({"stored": STORED}), "dp_rank": U32}),
    },
    {"residency_domain": TEXT},
)
DUMP: Content = in_json(
    by_name(
        row(
            {
                "model_name": TEXT,
                "tenant_id": TEXT,
                "block_size": BLOCK_SIZE,
                "events": array(DUMPED_EVENT),
            }
        )
    )
) | {BINARY_DUMP.decode(): {"schema": ANY}}
DUMP_OPERATION = Operation("Exports the index", {200: DUMP})

DESCRIPTION = Description(
    {
        **EVERY_FACE,
        "GET /health": HEALTH,
        "POST /query": Operation(
            "Returns how much of a prompt each rank caches, by its token ids",
            {200: in_json(SCORES)},
            (404, 422),
            in_json(QUERY),
        ),
        "POST /query_by_hash": Operation(
            "Returns how much of a prompt each rank caches, by its local hashes",
            {200: in_json(SCORES)},
            (404, 422),
            in_json(QUERY_BY_HASH),
        ),
        "POST /query_tiered_by_hash": Operation(
            "Returns how many blocks of a prompt each rank caches on each tier",
            {200: in_json(TIERED)},
            (404, 422),
            in_json(QUERY_TIERED),
        ),
        "POST /register": Operation(
            "Subscribes to a rank of an engine", {201: OK}, (409, 422), in_json(REGISTER)
        ),
        "POST /unregister": Operation(
            "Drops an engine and its blocks", {200: OK}, (404, 422), in_json(UNREGISTER)
        ),
        "GET /workers": Operation(
            "Lists engines", {200: in_json(array(WORKER))}, (422,), parameters=FILTERS
        ),
        "GET /dump": DUMP_OPERATION,
        "POST /register_peer": Operation("Adds a peer", {201: OK}, (422,), in_json(PEER)),
        "POST /deregister_peer": Operation("Removes a peer", {200: OK}, (404, 422), in_json(PEER)),
        "GET /peers": Operation("Lists peers", {200: in_json(array(TEXT))}),
        "POST /test/pause_listener": Operation(
            "Pauses a listener, whose stream then loses batches, for tests",
            {200: OK},
            (404, 409, 422),
            in_json(LISTENER),
        ),
        "POST /test/resume_listener": Operation(
            "Resumes a paused listener", {200: OK}, (404, 409, 422), in_json(LISTENER)
        ),
    },
    FAILURE,
)
