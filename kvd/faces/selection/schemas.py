"""Schemas of the selection service's routes: of bodies, as its modules read them, and answers."""

from __future__ import annotations

from kvd.faces.common.every_face import EVERY_FACE, REPLICAS
from kvd.faces.common.schemas import (
    BLOCK_SIZE,
    BLOCKS,
    COUNT,
    FAILURE,
    FILTERS,
    FLAG,
    HASH,
    LABEL,
    NAME,
    NUMBER,
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
    Schema,
    array,
    by_name,
    by_rank,
    in_json,
    in_query,
    members,
    nullable,
    one_of,
    row,
    whole,
)
from kvd.faces.indexer.schemas import (
    DUMP_OPERATION,
    MATCHING,
    OVERLAP,
    STREAM,
    STREAM_MEMBERS,
    WARNING,
)
from kvd.faces.selection.choosing import INPUT_TRIGGERS, OVERRIDES
from kvd.faces.selection.members import MAX_MILLISECONDS
from kvd.faces.selection.records import ENFORCEMENTS
from kvd.faces.selection.tuning import OFF
from kvd.selection.options import RouterMode
from kvd.selection.phases import Phase
from kvd.selection.policies import CAN_BE_OFF, DYNAMO_WEIGHTS, WEIGHTS, RouterPolicy
from kvd.selection.readiness import Recovery
from kvd.selection.worker_record import SHOWN_AS_GIVEN, Role, WorkerLifecycle
from kvd_core.ledger.ledger import MAX_REQUEST_ID_BYTES
from kvd_core.selector.selector import MAX_ISL_TOKENS
from kvd_core.selector.settings import MAX_WEIGHT

MODEL = {"model_name": TEXT}
PARTITION = {**MODEL, "tenant_id": TEXT}
RANK = {"worker_id": U64, "dp_rank": U32}
MODE = one_of(*RouterMode)
POLICY: Schema = {
    "anyOf": [
        TEXT | {"description": f"NAME[,WEIGHT=NUMBER]..., NAME of {', '.join(RouterPolicy)}"},
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "policy": {"anyOf": [TEXT, {"type": "null"}]},
                "weights": {"anyOf": [by_name(nullable(NUMBER)), {"type": "null"}]},
            },
        },
    ]
}


ABOVE_0: Schema = {**NUMBER, "exclusiveMinimum": 0}
MILLISECONDS: Schema = {**ABOVE_0, "maximum": MAX_MILLISECONDS}


def optional(**schemas: Schema) -> dict[str, Schema]:
    """Returns members that may be null, which means the same as absent."""
    return {name: nullable(schema) for name, schema in schemas.items()}


# ---- workers

DESCRIBED = optional(
    model_name=NAME,
    tenant_id=NAME,
    routing_group=NAME,
    endpoint=NAME,
    kv_events_endpoint=LABEL,
    kv_events_endpoints=by_rank(LABEL),
    replay_endpoint=LABEL,
    block_size=U32,
    data_parallel_start_rank=U32,
    data_parallel_size=U32,
    max_num_batched_tokens=U64,
    total_kv_blocks=U64,
    stable_routing_id=NAME,
    is_eagle=FLAG,
    without_kv_events=FLAG,
    prefill_tokens_per_s=ABOVE_0,
    decode_step_ms=ABOVE_0,
    role=one_of(*Role),
    taints=array(NAME),
    topology_domains=by_name(NAME) | {"propertyNames": NAME},
    kv_transfer_domain=NAME,
    kv_transfer_enforcement=one_of(*ENFORCEMENTS),
    kv_transfer_preferred_weight=NUMBER,
    router_hint_worker_type=NAME,
    router_hint_source_control_endpoints=by_rank(LABEL),
    curve_server_key=LABEL,
)
OF_WORKERS = {name: DESCRIBED[name]["anyOf"][0] for name in ("model_name", "tenant_id")} | {
    "routing_group": NAME
}
WORKER = members({"worker_id": U64}, DESCRIBED | OF_WORKERS)
WORKERS = members({"workers": array(WORKER)}, MODEL | TENANT)
PATCH = members({}, {"worker_id": nullable(U64)} | DESCRIBED)
SPEED = row(
    {
        "prefill_tokens_per_s": NUMBER,
        "base_ttft_s": NUMBER,
        "confidence": NUMBER,
        "observations": COUNT,
        "given": FLAG,
    },
    dict.fromkeys(("output_token_s", "output_token_s_per_request", "decode_confidence"), NUMBER),
)
RECORD = row(
    {
        "worker_id": U64,
        **PARTITION,
        "lifecycle": one_of(*WorkerLifecycle),
        **{
            name: DESCRIBED[name]
            for name in ("endpoint", "kv_events_endpoint", "replay_endpoint", *SHOWN_AS_GIVEN)
        },
    },
    {
        "kv_events_endpoints": by_rank(TEXT),
        "router_hint_worker_type": TEXT,
        "router_hint_source_control_endpoints": by_rank(TEXT),
        "curve_server_key": TEXT,
        "without_kv_events": FLAG,
        "prefill_tokens_per_s": NUMBER,
        "decode_step_ms": NUMBER,
        "speeds": by_rank(SPEED),
        "not_schedulable_reasons": array(TEXT),
        "disconnected_dp_ranks": by_rank(TEXT),
        "listeners": by_rank(STREAM_MEMBERS),
        **MATCHING,
        **WARNING,
    },
)
READY = row(
    {
        "ready": FLAG,
        "schedulable_workers": COUNT,
        "not_ready_reasons": array(TEXT),
        "lifecycles": row(dict.fromkeys(WorkerLifecycle, COUNT)),
        "min_initial_workers": COUNT,
        "recovery": row({"state": one_of(*Recovery), "peers": COUNT, "blocks": BLOCKS}),
    },
    {
        "workers": array(RECORD),
        "shared_state": row(
            {
                "server": TEXT,
                "connected": FLAG,
                "replicas": COUNT,
                "behind": COUNT,
                "fault": nullable(TEXT),
            }
        ),
    },
)

# ---- prompts and selections

ISL_TOKENS: Schema = {**whole(0, MAX_ISL_TOKENS), "description": "tokens"}
OVERRIDE = members(
    {},
    optional(
        **dict.fromkeys(OVERRIDES, NUMBER),
        assume_kv_reuse=FLAG,
        track_prefill_tokens=FLAG,
        router_mode=MODE,
    ),
)
PROMPT = {
    **MODEL,
    **TENANT,
    "block_hashes": nullable(array(HASH)),
    "sequence_hashes": nullable(array(HASH)),
    "token_ids": nullable(array(U32)),
    "isl_tokens": nullable(ISL_TOKENS),
    **optional(
        lora_name=TEXT,
        cache_salt=TEXT,
        router_config_override=OVERRIDE,
        is_eagle=FLAG,
    ),
}
TAINT_WEIGHTS: Schema = {"anyOf": [by_name(NUMBER), array(NAME)]}
RESERVATION_ID: Schema = {**TEXT, "maxLength": MAX_REQUEST_ID_BYTES}
SELECT = members(
    {},
    PROMPT
    | optional(
        selection_id=TEXT,
        reservation_id=TEXT,
        expected_output_tokens=U32,
        strict_priority=U32,
        session_id=TEXT,
        priority_jump=NUMBER,
        affinity_target=members({"worker_id": U64}, optional(dp_rank=U32)),
        pinned_worker=members(RANK),
        allowed_worker_ids=array(U64),
        routing_constraints=members(
            {}, optional(required_taints=array(NAME), preferred_taints=TAINT_WEIGHTS)
        ),
        explain=FLAG,
        expected_ttft=FLAG,
        slo_ttft_ms=MILLISECONDS,
        phase=one_of(*Phase),
        nvext=members(
            {},
            optional(
                agent_hints=members(
                    {}, optional(osl=U32, latency_sensitivity=NUMBER, priority=NUMBER)
                )
            ),
        ),
        session_context=members(
            {"session_id": TEXT},
            optional(
                parent_session_id=TEXT,
                session_final=FLAG,
                input_trigger=one_of(*INPUT_TRIGGERS),
            ),
        ),
        advisory=FLAG,
        router_policy=POLICY,
    ),
)
RESERVE = members(
    {"worker_id": U64},
    PROMPT
    | optional(
        selection_id=TEXT,
        reservation_id=RESERVATION_ID,
        dp_rank=U32,
        effective_prefill_tokens=ISL_TOKENS,
        expected_output_tokens=U32,
        phase=one_of(Phase.PREFILL, Phase.DECODE),
    ),
)
OUTPUT = members({}, optional(decay_fraction={"type": "number", "minimum": 0, "maximum": 1}))
ASK = members({}, PROMPT)

CANDIDATE = row(
    {
        **RANK,
        "device_blocks": BLOCKS,
        "host_blocks": BLOCKS,
        "disk_blocks": BLOCKS,
        "live_blocks": BLOCKS,
        "active_prefill_tokens": TOKENS,
        "active_decode_blocks": BLOCKS,
        "active_requests": COUNT,
        "decoding_requests": COUNT,
        "cached_tokens": TOKENS,
        "effective_prefill_tokens": TOKENS,
        "potential_decode_blocks": BLOCKS,
        "raw_prefill_blocks": NUMBER,
        "credit_blocks": NUMBER,
        "prefill_cost": NUMBER,
        "decode_cost": NUMBER,
        "counted_tokens": NUMBER,
        "uncached_cost": NUMBER,
        "hold_up_cost": NUMBER,
        "crowding_cost": NUMBER,
        "queued_cost": NUMBER,
        "request_cost": NUMBER,
        "block_cost": NUMBER,
        "product_cost": NUMBER,
        "cost": NUMBER,
        "keeps_sessions": FLAG,
        "eligible": FLAG,
        "overloaded": FLAG,
        "busy": FLAG,
        "preference": NUMBER,
        "heard": FLAG,
        "reachable": FLAG,
        "has_session": FLAG,
        "expected_ttft_s": nullable(NUMBER),
        "stream": nullable(STREAM),
    }
)
WORKER_LOAD = row(
    {
        "active_prefill_tokens": TOKENS,
        "prefill_token_capacity": nullable(TOKENS),
        "total_kv_blocks": nullable(BLOCKS),
    },
    {"prefill_busy": FLAG},
)
CHOSEN = {
    **PARTITION,
    **RANK,
    "endpoint": TEXT,
    "block_size": BLOCK_SIZE,
    "overlap": row(OVERLAP),
    "effective_prefill_tokens": TOKENS,
    "potential_decode_blocks": BLOCKS,
}
CHOSEN_SOMETIMES = {
    "selection_id": TEXT,
    "reservation_id": TEXT,
    "phase": one_of(*Phase),
    "router_policy": TEXT,
    "candidates": array(CANDIDATE),
    "worker_load": WORKER_LOAD,
    "expected_ttft_s": nullable(NUMBER),
    "slo_met": nullable(FLAG),
    "decode_busy": FLAG,
}
SELECTION = row(
    CHOSEN,
    CHOSEN_SOMETIMES | {"prefill": nullable(row(CHOSEN, CHOSEN_SOMETIMES)), "fallback": TEXT},
)
RESERVED = row({"reservation_id": TEXT, **PARTITION, **RANK, "endpoint": nullable(TEXT)})
REPORT = members(
    {},
    optional(
        prompt_tokens=ISL_TOKENS, cached_tokens=ISL_TOKENS, output_tokens=U32, ttft_ms=MILLISECONDS
    ),
)
ACCOUNT = {
    "reports": COUNT,
    **dict.fromkeys(
        ("expected_cached_tokens", "cached_tokens", "missing_tokens", "surplus_tokens"), TOKENS
    ),
    "timed": COUNT,
    **dict.fromkeys(
        ("expected_ttft_s", "ttft_s", "ttft_error_p50", "ttft_error_p90"), nullable(NUMBER)
    ),
}
REGRET = row(
    {
        "models": array(row(PARTITION | ACCOUNT)),
        "ranks": array(row(PARTITION | RANK | ACCOUNT)),
    }
)
RESERVATION = row(
    {
        "reservation_id": TEXT,
        **PARTITION,
        **RANK,
        "blocks": BLOCKS,
        "effective_prefill_tokens": TOKENS,
        "active_prefill_tokens": TOKENS,
        "prefill_complete": FLAG,
        "output_blocks": BLOCKS,
        "expected_output_tokens": nullable(U32),
        "age_s": {**SECONDS, "type": "number"},
    }
)
POTENTIAL_LOAD = row(
    {
        **RANK,
        "potential_prefill_tokens": TOKENS,
        "potential_decode_blocks": BLOCKS,
        "active_requests": COUNT,
    }
)
LOADS = row(
    {
        **PARTITION,
        "loads": array(POTENTIAL_LOAD),
        "pending_count": COUNT,
        "pending_isl_tokens": TOKENS,
    }
)
OVERLAPS = row(
    {
        "block_size": BLOCK_SIZE,
        "num_blocks": BLOCKS,
        "workers": array(
            row(
                {
                    **RANK,
                    "device_blocks": BLOCKS,
                    "host_pinned_blocks": BLOCKS,
                    "disk_blocks": BLOCKS,
                    "host_pinned_extension_blocks": BLOCKS,
                    "disk_extension_blocks": BLOCKS,
                    "shared_beyond_device_blocks": {"type": "null"},
                }
            )
        ),
        "shared_cache": row(
            {
                "enabled": {"const": False},
                "total_hit_blocks": {"const": 0},
                "ranges": {"type": "array", "maxItems": 0},
                "error": {"type": "null"},
            }
        ),
    }
)

# ---- tuning

TUNED = {"model": TEXT, **MODEL, **TENANT}  # one of the first two is required
NAMED: Schema = {"anyOf": [{"required": ["model"]}, {"required": ["model_name"]}]}
THRESHOLD = {"type": "number", "minimum": 0, "maximum": MAX_WEIGHT}
SHARE: Schema = {**THRESHOLD, "maximum": 1, "description": "of total_kv_blocks"}
BATCHES: Schema = {**THRESHOLD, "description": "of max_num_batched_tokens"}
OFF_VALUE: Schema = {"const": OFF}
BUSY = (
    members(
        {},
        TUNED
        | {
            "active_decode_blocks_threshold": {"anyOf": [SHARE, OFF_VALUE, {"type": "null"}]},
            "active_prefill_tokens_threshold": {"anyOf": [ISL_TOKENS, OFF_VALUE, {"type": "null"}]},
            "active_prefill_tokens_threshold_frac": {
                "anyOf": [BATCHES, OFF_VALUE, {"type": "null"}]
            },
        },
    )
    | NAMED
)
SET_MODE = members({}, TUNED | optional(router_mode=MODE)) | NAMED
SET_POLICY = members({}, TUNED | optional(router_policy=POLICY)) | NAMED
SHOWN_BUSY = row(
    {
        "model": TEXT,
        "active_decode_blocks_threshold": nullable(SHARE),
        "active_prefill_tokens_threshold": nullable(ISL_TOKENS),
        "active_prefill_tokens_threshold_frac": nullable(BATCHES),
    },
    {"tenant_id": TEXT},
)
SHOWN_MODE = row({"model": TEXT, "router_mode": MODE}, {"tenant_id": TEXT})
SHOWN_WEIGHTS: Schema = {
    "anyOf": [
        row({name: nullable(NUMBER) if name in CAN_BE_OFF else NUMBER for name in names})
        for names in (DYNAMO_WEIGHTS, WEIGHTS)
    ]
}
SHOWN_POLICY = row(
    {"model": TEXT, "router_policy": TEXT, "weights": SHOWN_WEIGHTS}, {"tenant_id": TEXT}
)
TUNED_BY_QUERY = (in_query("model_name", required=True), *FILTERS[1:])

DESCRIPTION = Description(
    {
        **EVERY_FACE,
        **REPLICAS,
        "GET /dump": DUMP_OPERATION,
        "GET /health": Operation("Answers as long as the daemon lives", {200: OK}),
        "GET /ready": Operation(
            "Returns whether a worker can be selected", {200: in_json(READY), 503: in_json(READY)}
        ),
        "GET /workers": Operation(
            "Lists workers", {200: in_json(array(RECORD))}, (422,), parameters=FILTERS
        ),
        "POST /workers": Operation(
            "Adds or replaces a worker", {201: in_json(RECORD)}, (409, 422), in_json(WORKER)
        ),
        "PUT /workers": Operation(
            "Sets all workers of a model and tenant",
            {200: in_json(array(RECORD))},
            (409, 422),
            in_json(WORKERS),
        ),
        "PATCH /workers/{worker_id}": Operation(
            "Changes a worker",
            {200: in_json(RECORD)},
            (404, 409, 422),
            in_json(PATCH),
            segment=U64,
        ),
        "DELETE /workers/{worker_id}": Operation(
            "Removes a worker with its bookings", {200: in_json(RECORD)}, (404,), segment=U64
        ),
        "POST /select": Operation(
            "Returns the rank that should serve a prompt",
            {200: in_json(SELECTION)},
            (404, 409, 422),
            in_json(SELECT),
        ),
        "POST /select_and_reserve": Operation(
            "Chooses a rank and books the prompt there",
            {200: in_json(SELECTION)},
            (404, 409, 422),
            in_json(SELECT),
            (RETRY_KEY,),
        ),
        "POST /reservations": Operation(
            "Books a prompt on a rank that was selected before; 200 for a retry",
            {200: in_json(RESERVED), 201: in_json(RESERVED)},
            (404, 409, 422),
            in_json(RESERVE),
            (RETRY_KEY,),
        ),
        "POST /reservations/{reservation_id}/prefill_complete": Operation(
            "Ends the prefill of a booking", {200: OK}, (404,)
        ),
        "POST /reservations/{reservation_id}/output_block": Operation(
            "Adds a block of output to a booking",
            {200: OK},
            (404, 422),
            in_json(OUTPUT),
            needs_body=False,
        ),
        "POST /reservations/{reservation_id}/report": Operation(
            "Records the outcome of a booked request", {200: OK}, (404, 422), in_json(REPORT)
        ),
        "GET /regret": Operation(
            "Compares the expected outcomes of choices with the reported ones",
            {200: in_json(REGRET)},
        ),
        "GET /reservations/{reservation_id}": Operation(
            "Shows a booking", {200: in_json(RESERVATION)}, (404,)
        ),
        "DELETE /reservations/{reservation_id}": Operation("Ends a booking", {200: OK}, (404,)),
        "DELETE /reservations": Operation(
            "Ends all bookings whose ids begin with a text, but not with another",
            {200: in_json(row({"freed": COUNT}))},
            (400,),
            parameters=(in_query("prefix", required=True), in_query("spared")),
        ),
        "GET /loads": Operation(
            "Returns the load of each rank and the queued selections",
            {200: in_json(array(LOADS))},
            (422,),
            parameters=FILTERS,
        ),
        "POST /potential_loads": Operation(
            "Returns the load that each rank would have with one more prompt",
            {200: in_json(array(POTENTIAL_LOAD))},
            (404, 422),
            in_json(ASK),
        ),
        "POST /overlap_scores": Operation(
            "Returns how many blocks of a prompt each rank caches",
            {200: in_json(OVERLAPS)},
            (404, 422),
            in_json(ASK),
        ),
        "GET /busy_threshold": Operation(
            "Lists busy thresholds", {200: in_json(row({"thresholds": array(SHOWN_BUSY)}))}
        ),
        "POST /busy_threshold": Operation(
            "Sets busy thresholds", {200: in_json(SHOWN_BUSY)}, (404, 422), in_json(BUSY)
        ),
        "DELETE /busy_threshold": Operation(
            "Removes busy thresholds that a call has set",
            {200: in_json(SHOWN_BUSY)},
            (404, 422),
            parameters=TUNED_BY_QUERY,
        ),
        "GET /router_mode": Operation(
            "Lists router modes",
            {200: in_json(row({"router_mode": MODE, "router_modes": array(SHOWN_MODE)}))},
        ),
        "POST /router_mode": Operation(
            "Sets the router mode", {200: in_json(SHOWN_MODE)}, (404, 422), in_json(SET_MODE)
        ),
        "DELETE /router_mode": Operation(
            "Removes a router mode that a call has set",
            {200: in_json(SHOWN_MODE)},
            (404, 422),
            parameters=TUNED_BY_QUERY,
        ),
        "GET /policy": Operation(
            "Lists router policies, and the weights of each",
            {
                200: in_json(
                    row(
                        {
                            "router_policy": TEXT,
                            "weights": SHOWN_WEIGHTS,
                            "router_policies": array(SHOWN_POLICY),
                            "presets": row(dict.fromkeys(RouterPolicy, SHOWN_WEIGHTS)),
                        }
                    )
                )
            },
        ),
        "POST /policy": Operation(
            "Sets the router policy", {200: in_json(SHOWN_POLICY)}, (404, 422), in_json(SET_POLICY)
        ),
        "DELETE /policy": Operation(
            "Removes a router policy that a call has set",
            {200: in_json(SHOWN_POLICY)},
            (404, 422),
            parameters=TUNED_BY_QUERY,
        ),
    },
    FAILURE,
)
