"""Descriptions of the routes that every face has, and of those about replicas."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.diagnosis.findings import KINDS, Severity
from kvd.faces.common.paths import (
    BRANCHES_PATH,
    DIAGNOSE_PATH,
    DOCUMENT_PATH,
    EXPLAIN_PATH,
    PICTURE_PATH,
    UI_FILES,
)
from kvd.faces.common.schemas import (
    ADDRESS,
    ANY,
    BLOCK_SIZE,
    BLOCKS,
    COUNT,
    FLAG,
    NOTHING,
    NUMBER,
    OK,
    TEXT,
    TOKENS,
    U32,
    Members,
    Operation,
    Schema,
    array,
    by_name,
    in_json,
    in_query,
    members,
    nullable,
    one_of,
    row,
)
from kvd.faces.explain.schemas import EXPLANATION, QUESTION
from kvd.telemetry.metrics import CONTENT_TYPE, METRICS_PATH

# ---- /diagnose

FINDING = row(
    {
        "name": one_of(*KINDS),
        "severity": one_of(*Severity),
        "subject": TEXT,
        "evidence": TEXT,
        "remedy": TEXT,
    }
)
PROBE: Schema = {"name": "probe", "in": "query", "required": False, "schema": one_of("0", "1")}

# ---- the page at /ui: /picture, /branches

RANK: Members = {"model_name": TEXT, "tenant_id": TEXT, "worker_id": TEXT, "dp_rank": U32}
TIERED = by_name(BLOCKS)
STREAM: Members = {
    "stream": one_of("stale", "degraded", "recovering", "exact"),
    "status": one_of("pending", "active", "paused", "failed"),
}
CURVE = array(nullable(NUMBER))  # the oldest first; null: nothing was known then
CURVES = (
    "requests_per_s",
    "events_per_s",
    "live",
    "queued",
    "matched_share",
    "cached_share",
)
SUMS = (
    "requests",
    "events",
    "questions",
    "matched",
    "prompt_tokens",
    "cached_tokens",
    "live",
    "queued",
)
DECISION: Members = {
    **RANK,
    "age_s": NUMBER,
    "request": TEXT,
    "candidates": COUNT,
    "cost": NUMBER,
    "cached_tokens": TOKENS,
    "prefill_tokens": TOKENS,
    "queued_tokens": TOKENS,
    "expected_output_tokens": nullable(TOKENS),
}
RANK_SHOWN = row(
    RANK,
    {
        **STREAM,
        "why": TEXT,
        "lifecycle": TEXT,
        "reasons": array(TEXT),
        "total_blocks": BLOCKS,
        "load": row({"prefill_tokens": TOKENS, "decode_blocks": BLOCKS, "requests": COUNT}),
        "blocks": TIERED,
        "requests": CURVE,
        "cached_share": CURVE,
    },
)
MODEL_SHOWN = row(
    {
        "model_name": TEXT,
        "tenant_id": TEXT,
        "block_size": BLOCK_SIZE,
        "blocks": BLOCKS,
        "chains": COUNT,
        "held": TIERED,
        "questions": COUNT,
        "matched": COUNT,
        "never_matches": FLAG,
    }
)
PICTURE = row(
    {
        "kvd": row({"version": TEXT, "process": TEXT}),
        "faces": array(row({"name": TEXT, "addresses": array(TEXT), "requests": COUNT})),
        "totals": row(dict.fromkeys(SUMS, COUNT)),
        "history": row({"interval_s": NUMBER, **dict.fromkeys(CURVES, CURVE)}),
        "decisions": array(row(DECISION)),
        "streams": row(
            {
                "counts": by_name(COUNT),
                "doubtful": array(
                    row({"of": one_of("worker", "publisher"), **RANK, **STREAM}, {"why": TEXT})
                ),
            }
        ),
        "models": array(MODEL_SHOWN),
        "more_models": FLAG,
        "ranks": array(RANK_SHOWN),
        "more_ranks": FLAG,
    }
)
HELD_BY = row({"worker_id": nullable(TEXT), "dp_rank": nullable(U32), "blocks": BLOCKS})
BRANCH = row(
    {
        "name": TEXT,
        "blocks": BLOCKS,
        "children": COUNT,
        "whole": FLAG,
        "tiers": by_name(row({"count": COUNT, "holders": array(HELD_BY)})),
    }
)
BRANCHES_SHOWN = row(
    {
        "model_name": TEXT,
        "tenant_id": TEXT,
        "block_size": BLOCK_SIZE,
        "branches": array(BRANCH),
        "more": FLAG,
    }
)

# ---- the descriptions

UI: Mapping[str, Operation] = {
    f"GET {PICTURE_PATH}": Operation(
        "Shows ranks, rates, streams and recent choices, for pages and `kvd top`",
        {200: in_json(PICTURE)},
    ),
    f"GET {BRANCHES_PATH}": Operation(
        "Lists the branches of the prefix tree below one, a page at a time",
        {200: in_json(BRANCHES_SHOWN)},
        (404, 422),
        parameters=(
            in_query("model_name", required=True),
            in_query("tenant_id"),
            in_query("routing_group"),
            in_query("block_size"),
            in_query("above"),
            in_query("after"),
        ),
    ),
    **{
        f"GET {path}": Operation(
            f"Serves a part of the page: {name}", {200: {kind: {"schema": TEXT}}}
        )
        for path, (name, kind) in UI_FILES.items()
    },
}
PEER = {"endpoint": ADDRESS}
HEALTH = Operation("Answers as long as the daemon lives", {200: NOTHING})
EVERY_FACE: Mapping[str, Operation] = {
    f"GET {METRICS_PATH}": Operation(
        "Shows metrics in Prometheus' text format", {200: {CONTENT_TYPE.decode(): {"schema": TEXT}}}
    ),
    f"GET {DIAGNOSE_PATH}": Operation(
        "Lists what keeps prompts from matching, with evidence and remedies",
        {200: in_json(row({"findings": array(FINDING)}))},
        parameters=(PROBE,),
    ),
    f"GET {EXPLAIN_PATH}": Operation(
        "Explains which rank would be chosen for the prompt of a live booking",
        {200: in_json(EXPLANATION)},
        (404,),
        parameters=(in_query("request_id", required=True),),
    ),
    f"POST {EXPLAIN_PATH}": Operation(
        "Explains, candidate by candidate, which rank would be chosen for a prompt",
        {200: in_json(EXPLANATION)},
        (404, 422),
        in_json(QUESTION),
    ),
    f"GET {DOCUMENT_PATH}": Operation("Shows this document", {200: in_json(by_name(ANY))}),
    **UI,
}
REPLICAS: Mapping[str, Operation] = {
    "POST /replica_sync/register_peer": Operation(
        "Listens to a replica",
        {200: OK, 201: OK},
        (409, 422),
        in_json(members(PEER, {"curve_server_key": nullable(TEXT)})),
    ),
    "POST /replica_sync/deregister_peer": Operation(
        "Stops listening to a replica", {200: OK}, (404, 409, 422), in_json(members(PEER))
    ),
    "GET /replica_sync/peers": Operation("Lists replicas", {200: in_json(array(TEXT))}),
}
