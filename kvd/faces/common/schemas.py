"""Helpers for JSON schemas, and the descriptions of routes that several faces have.

Handlers ignore members of a body that its schema lacks. Answers have no such members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvd.diagnosis.findings import KINDS, Severity
from kvd.faces.common.bodies import MAX_KEPT_BYTES, MAX_RETRY_KEY_BYTES, U32_MAX, U64_MAX
from kvd.telemetry.metrics import CONTENT_TYPE, METRICS_PATH
from kvd_core.index.prefix_index import TIERS
from kvd_core.index.trace import END_REASONS
from kvd_core.index.trace import KINDS as CHANGES

Schema = dict[str, Any]
Members = dict[str, Schema]
Content = dict[str, Schema]  # by content type

JSON = "application/json"
DOCUMENT_PATH = "/openapi.json"
DIAGNOSE_PATH = "/diagnose"
EXPLAIN_PATH = "/explain"
PICTURE_PATH, BRANCHES_PATH = "/picture", "/branches"
# The files of the page that every face serves: by path, the name in kvd/faces/ui/files and the
# content type.
UI_FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/kvd.svg": ("kvd.svg", "image/svg+xml"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/ui/asking.js": ("asking.js", "text/javascript; charset=utf-8"),
    "/ui/drawing.js": ("drawing.js", "text/javascript; charset=utf-8"),
    "/ui/examining.js": ("examining.js", "text/javascript; charset=utf-8"),
    "/ui/explaining.js": ("explaining.js", "text/javascript; charset=utf-8"),
    "/ui/live.js": ("live.js", "text/javascript; charset=utf-8"),
    "/ui/tree.js": ("tree.js", "text/javascript; charset=utf-8"),
    "/ui/trying.js": ("trying.js", "text/javascript; charset=utf-8"),
}


# Reasons in explanations. ELSEWHERE: why a match ends, beside the reasons of the chronicle
# (END_REASONS). SHUT_OUT: why a rank cannot be chosen.
ELSEWHERE = (
    "other_salt",
    "other_adapter",
    "other_tenant",
    "not_predicted",
    "not_heard",
    "no_events",
)
SHUT_OUT = ("unreachable", "not_eligible", "overloaded", "busy", "not_preferred")


def whole(minimum: int, maximum: int) -> Schema:
    return {"type": "integer", "minimum": minimum, "maximum": maximum}


def counted(unit: str) -> Schema:
    """Returns the schema of a count of `unit`."""
    return {"type": "integer", "minimum": 0, "description": unit}


ANY: Schema = {}  # a value that kvd does not interpret
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
U32, U64 = whole(0, U32_MAX), whole(0, U64_MAX)
I64, HASH = whole(-(2**63), 2**63 - 1), whole(-(2**63), U64_MAX)
BLOCK_SIZE: Schema = {**whole(1, U32_MAX), "description": "tokens"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TOKENS, BLOCKS, SECONDS = counted("tokens"), counted("blocks"), counted("seconds")
# Texts that are kept have a bound in bytes; names have no control characters.
LABEL: Schema = {**TEXT, "maxLength": MAX_KEPT_BYTES}
NAME: Schema = {**LABEL, "pattern": r"^[^\x00-\x1f\x7f-\x9f]*$"}
ADDRESS: Schema = {**LABEL, "minLength": 1}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def by_name(values: Schema) -> Schema:
    """Returns the schema of an object whose member names are data."""
    return {"type": "object", "additionalProperties": values}


def by_rank(values: Schema) -> Schema:
    """Returns the schema of an object with a member for each data-parallel rank."""
    return by_name(values) | {"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def members(required: Members, optional: Members | None = None) -> Schema:
    """Returns the schema of an object in a body, whose other members are ignored."""
    schema: Schema = {"type": "object", "properties": {**required, **(optional or {})}}
    return schema | ({"required": list(required)} if required else {})


def row(required: Members, optional: Members | None = None) -> Schema:
    """Returns the schema of an object in an answer, which has no other members."""
    return members(required, optional) | {"additionalProperties": False}


def in_json(schema: Schema) -> Content:
    return {JSON: {"schema": schema}}


def in_query(name: str, required: bool = False) -> Schema:
    return {"name": name, "in": "query", "required": required, "schema": TEXT}


@dataclass(frozen=True, slots=True)
class Operation:
    """The documentation of one route.

    `answers` has the content of each successful answer, by status; `refuses` has the statuses of
    the handler's own failures, beside those that any route can have. `parameters` are those of the
    query and the head. `segment` is the schema of the text that fills the path's placeholder.
    """

    summary: str
    answers: Mapping[int, Content]
    refuses: tuple[int, ...] = ()
    body: Content | None = None
    parameters: tuple[Schema, ...] = ()
    segment: Schema | None = None
    needs_body: bool = True


@dataclass(frozen=True, slots=True)
class Description:
    """The documentation of a face's routes, by method and path, and of its failures."""

    operations: Mapping[str, Operation]
    failure: Schema
    failure_types: tuple[str, ...] = (JSON,)


OK = in_json(row({"status": {"const": "ok"}}))
NOTHING: Content = {}
FAILURE = row({"error": TEXT})
TENANT: Members = {"tenant_id": TEXT, "routing_group": TEXT}
KEPT_TENANT: Members = {"tenant_id": NAME, "routing_group": NAME}
FILTERS = (in_query("model_name"), in_query("tenant_id"), in_query("routing_group"))
RETRY_KEY: Schema = {
    "name": "idempotency-key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "maxLength": MAX_RETRY_KEY_BYTES},
}

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
AS_IN_SELECT: Schema = {"description": "as in POST /select of the selection service"}
QUESTION = members(
    {},
    {
        **TENANT,
        "model_name": TEXT,
        "token_ids": nullable(array(U32)),
        "block_hashes": nullable(array(HASH)),
        "sequence_hashes": nullable(array(HASH)),
        "isl_tokens": nullable(TOKENS),
        **{name: nullable(TEXT) for name in ("lora_name", "cache_salt", "session_id")},
        "is_eagle": nullable(FLAG),
        "request_id": {**nullable(TEXT), "description": "of a live booking, in place of a prompt"},
        **dict.fromkeys(
            (
                "router_config_override",
                "session_context",
                "affinity_target",
                "pinned_worker",
                "allowed_worker_ids",
                "routing_constraints",
                "phase",
                "router_policy",
                "slo_ttft_ms",
            ),
            AS_IN_SELECT,
        ),
    },
)
RANK_MEMBERS: Members = {"worker_id": TEXT, "dp_rank": U32}
WHY: Members = {"why": one_of(*END_REASONS, *ELSEWHERE), "age_s": nullable(NUMBER)}
COSTED = row(
    {**RANK_MEMBERS, "chance": NUMBER, "cost": nullable(NUMBER), "behind": nullable(NUMBER)}
)
CANDIDATE_EXPLAINED = row(
    {
        **RANK_MEMBERS,
        "blocks": BLOCKS,
        "predicted_blocks": BLOCKS,
        "tiers": array(row({"tier": one_of(*TIERS), "from": BLOCKS, "to": BLOCKS, **WHY})),
        "ended": row(
            {
                **WHY,
                "at_block": BLOCKS,
                "tier": nullable(one_of(*TIERS)),
                "elsewhere_blocks": nullable(BLOCKS),
            }
        ),
    },
    {
        "chance": NUMBER,
        "shut_out": nullable(one_of(*SHUT_OUT)),
        "exceeded": array(TEXT),
        "cost": nullable(NUMBER),
        "preference": NUMBER,
        "terms": array(row({"name": TEXT, "weight": NUMBER, "cost": NUMBER})),
        "facts": by_name(NUMBER),
        "stream": nullable(TEXT),
        "expected_ttft_s": nullable(NUMBER),
    },
)
CHOICE_EXPLAINED = row(
    {
        "phase": nullable(TEXT),
        "by": nullable(TEXT),
        "router_mode": nullable(TEXT),
        "router_policy": nullable(TEXT),
        "temperature": NUMBER,
        "unit": nullable(one_of("blocks", "tokens", "requests")),
        "refusal": nullable(
            one_of("nobody_eligible", "all_busy", "all_overloaded", "no_selection")
        ),
        "chosen": nullable(COSTED),
        "runner_up": nullable(COSTED),
        "candidates": array(CANDIDATE_EXPLAINED),
        "more_candidates": COUNT,
    }
)
HAPPENED = row(
    {
        **RANK_MEMBERS,
        "age_s": NUMBER,
        "kind": one_of(*CHANGES),
        "tiers": array(one_of(*TIERS)),
        "from": BLOCKS,
        "to": BLOCKS,
        "changes": COUNT,
    }
)
BOOKED_SHOWN = row(
    {
        **RANK_MEMBERS,
        "request_id": TEXT,
        "age_s": NUMBER,
        "blocks": BLOCKS,
        "prefill_tokens": TOKENS,
        "active_prefill_tokens": TOKENS,
    }
)
EXPLANATION = row(
    {
        "model_name": TEXT,
        "tenant_id": TEXT,
        "block_size": BLOCK_SIZE,
        "blocks": BLOCKS,
        "request": nullable(BOOKED_SHOWN),
        "choices": array(CHOICE_EXPLAINED),
        "timeline": array(HAPPENED),
        "timeline_left_out": COUNT,
        "chronicle": row(
            {"changes": COUNT, "overwritten": COUNT, "capacity": COUNT, "reach_s": NUMBER}
        ),
    }
)
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
