"""Schemas of the slot tracker's routes: of bodies, as `routes` reads them, and answers."""

from __future__ import annotations

from kvd.faces.common.every_face import EVERY_FACE, HEALTH, REPLICAS
from kvd.faces.common.schemas import (
    BLOCK_SIZE,
    BLOCKS,
    COUNT,
    FAILURE,
    FILTERS,
    FLAG,
    HASH,
    I64,
    KEPT_TENANT,
    NAME,
    OK,
    RETRY_KEY,
    SECONDS,
    TENANT,
    TEXT,
    TOKENS,
    U32,
    U64,
    Description,
    Operation,
    array,
    in_json,
    in_query,
    members,
    row,
    whole,
)
from kvd_core.ledger.ledger import MAX_REQUEST_ID_BYTES, MAX_TOKENS

MODEL = {"model_name": TEXT}
NEW_TOKENS = {"new_isl_tokens": {**whole(0, MAX_TOKENS), "description": "tokens"}}
RANK = {"worker_id": U64, "dp_rank": U32}
RANGE = {"dp_start": U32, "dp_size": whole(1, 4096)}

REGISTER = members(
    {"model_name": NAME, "worker_id": U64, "block_size": BLOCK_SIZE, **RANGE}, KEPT_TENANT
)
UNREGISTER = members(MODEL | {"worker_id": U64}, TENANT)
STEP = members(MODEL | {"request_id": TEXT}, TENANT)
ADD = members(
    {
        **MODEL,
        "request_id": {**TEXT, "maxLength": MAX_REQUEST_ID_BYTES},
        **RANK,
        "sequence_hashes": array(I64),
    },
    TENANT | NEW_TOKENS,
)
PROJECTION = members(MODEL | {"sequence_hashes": array(HASH)}, TENANT | NEW_TOKENS)

PARTITION = {"model_name": TEXT, "tenant_id": TEXT}
WORKER = row({"worker_id": U64, **PARTITION, "block_size": BLOCK_SIZE, **RANGE})
LOAD = row({**PARTITION, **RANK, "active_prefill_tokens": TOKENS, "active_decode_blocks": BLOCKS})
POTENTIAL_LOAD = row(
    {
        **RANK,
        "potential_prefill_tokens": TOKENS,
        "potential_decode_blocks": BLOCKS,
        "active_requests": COUNT,
    }
)
REQUEST = row(
    {
        "request_id": TEXT,
        **PARTITION,
        **RANK,
        "blocks": BLOCKS,
        "new_isl_tokens": TOKENS,
        "active_prefill_tokens": TOKENS,
        "prefill_complete": FLAG,
        "output_blocks": BLOCKS,
        "age_s": {**SECONDS, "type": "number"},
    }
)

DESCRIPTION = Description(
    {
        **EVERY_FACE,
        **REPLICAS,
        "GET /health": HEALTH,
        "POST /register": Operation("Adds a worker", {201: OK}, (409, 422), in_json(REGISTER)),
        "POST /unregister": Operation(
            "Removes a worker with its requests", {200: OK}, (404, 422), in_json(UNREGISTER)
        ),
        "GET /workers": Operation(
            "Lists workers", {200: in_json(array(WORKER))}, (422,), parameters=FILTERS
        ),
        "POST /add": Operation(
            "Books a request on a rank; 200 for a retry",
            {200: OK, 201: OK},
            (404, 409, 422),
            in_json(ADD),
            (RETRY_KEY,),
        ),
        "POST /prefill_complete": Operation(
            "Ends the prefill of a request", {200: OK}, (404, 422), in_json(STEP)
        ),
        "POST /free": Operation("Ends a request", {200: OK}, (404, 422), in_json(STEP)),
        "GET /loads": Operation(
            "Returns the load of each rank",
            {200: in_json(array(LOAD))},
            (422,),
            parameters=FILTERS,
        ),
        "POST /potential_loads": Operation(
            "Returns the load that each rank would have with one more prompt",
            {200: in_json(array(POTENTIAL_LOAD))},
            (404, 422),
            in_json(PROJECTION),
        ),
        "GET /requests/{request_id}": Operation(
            "Shows a live request",
            {200: in_json(REQUEST)},
            (404, 422),
            parameters=(in_query("model_name", required=True), *FILTERS[1:]),
        ),
    },
    FAILURE,
)
