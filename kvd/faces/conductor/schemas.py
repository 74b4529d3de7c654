"""Schemas of the conductor's routes in both dialects: of bodies, as they are read, and answers."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.faces.common.bodies import U32_MAX, U64_MAX
from kvd.faces.common.every_face import EVERY_FACE, HEALTH
from kvd.faces.common.schemas import (
    ANY,
    BLOCK_SIZE,
    COUNT,
    FLAG,
    HASH,
    JSON,
    LABEL,
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
    in_query,
    members,
    nullable,
    one_of,
    row,
    whole,
)
from kvd.faces.common.schemas import NAME as KEPT_NAME
from kvd.faces.conductor.members import HASHES, MODEL, SALT
from kvd.faces.conductor.msgpack import FORM, FORMS, PROFILES, RANK_MAX
from kvd.faces.conductor.registration import ECHOED
from kvd.faces.conductor.routes import REASONS
from kvd.faces.indexer.schemas import STATUS, STREAM

PACKED = FORM.content_type.decode()


def in_both(plain: Schema, packed: Schema) -> Content:
    """Returns the content of a body in JSON, and under each content type of msgpack."""
    return in_json(plain) | {name: {"schema": packed} for name in FORMS}


def answered(plain: Schema, packed: Schema) -> Mapping[int, Content]:
    return {200: in_json(plain) | {PACKED: {"schema": packed}}}


def closed(schema: Schema) -> Schema:
    """Returns the schema of an object in msgpack, which may have no further members."""
    return schema | {"additionalProperties": False}


def one_needed(*names: str) -> Schema:
    """Returns the schema of objects that must have one of these members."""
    return {"anyOf": [{"required": [name]} for name in names]}


# ---- bodies

NULLABLE_LABEL, NULLABLE_NAME = nullable(LABEL), nullable(KEPT_NAME)
GIVEN, GIVEN_NAME = {**LABEL, "minLength": 1}, {**KEPT_NAME, "minLength": 1}

ABOUT = {
    **dict.fromkeys(MODEL, nullable(GIVEN)),
    **dict.fromkeys(("tenant_id", "lora_name", "instance_id", *SALT), NULLABLE_LABEL),
    "lora_id": nullable(whole(-1, U64_MAX)),
}
QUERY = members(
    {"block_size": BLOCK_SIZE, "token_ids": array(U32)},
    ABOUT,
) | one_needed(*MODEL)
TEXT_HASH: Schema = {**TEXT, "description": "decimal, or hexadecimal with 0x"}
QUERY_BY_HASH = members(
    {"block_size": BLOCK_SIZE},
    ABOUT | dict.fromkeys(HASHES, nullable(array({"anyOf": [HASH, TEXT_HASH]}))),
) | {"allOf": [one_needed(*MODEL), one_needed(*HASHES)]}
PACKED_ABOUT = {
    "tenant_id": LABEL,
    "lora_name": LABEL,
    "cache_salt": NULLABLE_LABEL,
    "instance_id": LABEL,
}


def _numbers(bits: int) -> Schema:
    items = whole(-(2 ** (bits - 1)), 2**bits - 1)
    packed = {
        **TEXT,
        "contentMediaType": "application/octet-stream",
        "description": f"a bin of little-endian numbers of {bits} bits",
    }
    return {"anyOf": [array(items), packed]}


PACKED_QUERY, PACKED_QUERY_BY_HASH = (
    closed(members({"model": GIVEN, "block_size": BLOCK_SIZE, name: numbers}, PACKED_ABOUT))
    for name, numbers in (("token_ids", _numbers(32)), ("seq_hashes", _numbers(64)))
)

REGISTER = members(
    {
        "endpoint": GIVEN,
        "type": GIVEN_NAME,
        "instance_id": GIVEN_NAME,
        "block_size": BLOCK_SIZE,
        "dp_rank": U32,
    },
    {
        **dict.fromkeys(MODEL, nullable(GIVEN_NAME)),
        **dict.fromkeys(("lora_name", "tenant_id"), NULLABLE_NAME),
        **dict.fromkeys(("replay_endpoint", "curve_server_key", *SALT[1:]), NULLABLE_LABEL),
        **dict.fromkeys(ECHOED, ANY),
    },
) | one_needed(*MODEL)
PACKED_RANK = whole(0, RANK_MAX)
PROFILE = closed(
    members(
        {
            "strategy": one_of(*PROFILES),
            "algorithm": TEXT,
            "index_projection": TEXT,
        },
        {"python_hash_seed": GIVEN},
    )
)
PACKED_REGISTER = closed(
    members(
        {
            "endpoint": GIVEN,
            "type": GIVEN_NAME,
            "modelname": GIVEN_NAME,
            "instance_id": GIVEN_NAME,
            "block_size": BLOCK_SIZE,
            "dp_rank": PACKED_RANK,
        },
        {
            "replay_endpoint": LABEL,
            "lora_name": KEPT_NAME,
            "tenant_id": KEPT_NAME,
            "cache_group": nullable({"const": 0}),
            "hash_profile": PROFILE,
        },
    )
)
UNREGISTER = members(
    {"instance_id": GIVEN},
    {
        **dict.fromkeys(MODEL, NULLABLE_LABEL),
        **dict.fromkeys(("tenant_id", "type", "lora_name", "endpoint", *SALT[1:]), NULLABLE_LABEL),
        "dp_rank": nullable(whole(0, U32_MAX)),
        "block_size": nullable(BLOCK_SIZE),
    },
)
PACKED_UNREGISTER = closed(
    members({"instance_id": GIVEN, "dp_rank": PACKED_RANK}, {"tenant_id": LABEL})
)

# ---- answers

HOLDINGS = by_name(
    by_name(
        members(
            {
                "longest_matched": TOKENS,
                "GPU": TOKENS,
                "CPU": TOKENS,
                "DISK": TOKENS,
                "DP": by_rank(TOKENS),
            }
        )
        | {"additionalProperties": TOKENS}  # of further media
    )
)
REACHED = dict.fromkeys(("gpu", "cpu", "disk", "npu", "cpu_local", "cpu_share"), TOKENS)
PACKED_HOLDINGS = row(
    {
        "instances": by_name(
            row(
                {
                    "longest_matched": TOKENS,
                    "dp": by_rank(TOKENS),
                    "rank_matches": by_rank(row(REACHED)),
                    **REACHED,
                }
            )
        )
    }
)
IS_REGISTERED = row({"status": {"const": "registered successfully"}, "instance_id": TEXT})
IS_UNREGISTERED = row(
    {"status": {"const": "unregistered successfully"}, "removed_instances": array(TEXT)}
)

DESCRIBED = {
    "Endpoint": TEXT,
    "ReplayEndpoint": TEXT,
    "Type": TEXT,
    "ModelName": TEXT,
    "LoraName": TEXT,
    "TenantID": TEXT,
    "InstanceID": TEXT,
    "BlockSize": BLOCK_SIZE,
    "DPRank": U32,
}
OBSERVED = {
    "serves_all": FLAG,
    "status": STATUS,
    "stream": STREAM,
    "last_seq": nullable(U64),
    **dict.fromkeys(("gaps", "events", "event_id_gaps", "stale", "restarts"), COUNT),
    "mismatch": by_name(COUNT),
    **dict.fromkeys(("orphans", "unlocated", "conflicts", "bad_events"), COUNT),
    "bad": by_name(COUNT),
    "ignored": by_name(COUNT),
    "last_error": nullable(TEXT),
    **dict.fromkeys(("blocks", "waiting", "asked", "matched"), COUNT),
}
SOMETIMES = {**dict.fromkeys(ECHOED, ANY), "loss": TEXT, "warning": TEXT}
SERVICE = row({**DESCRIBED, "AdditionalSalt": TEXT, **OBSERVED}, SOMETIMES)
PACKED_SERVICE = row(
    {**DESCRIBED, "CacheGroup": ANY, "HashProfile": ANY}, {**OBSERVED, **SOMETIMES}
)
CONTEXT = {
    "model_name": TEXT,
    "lora_name": TEXT,
    "block_size": BLOCK_SIZE,
    "tenant_id": TEXT,
}
FULL_CONTEXT = row({**CONTEXT, "additional_salt": TEXT, "instance_id": TEXT})
PACKED_CONTEXT = row(
    {
        **CONTEXT,
        "prefix_count": COUNT,
        "hash_profile": ANY,
        "instances": by_name(array(U32)),
    }
)

REASON = one_of(
    *sorted(
        {
            *REASONS.values(),
            "missing",
            "invalid_type",
            "invalid_value",
            "invalid_json",
            "invalid_registration",
            "invalid_msgpack",
            "unknown_field",
            "out_of_range",
            "unsupported",
        }
    )
)
FAILURE = row({"error": TEXT}, {"reason": REASON, "field": TEXT, "index": COUNT})

DESCRIPTION = Description(
    {
        **EVERY_FACE,
        "GET /health": HEALTH,
        "POST /query": Operation(
            "Returns how much of a prompt each instance holds, by its token ids",
            answered(HOLDINGS, PACKED_HOLDINGS),
            body=in_both(QUERY, PACKED_QUERY),
        ),
        "POST /query_by_hash": Operation(
            "Returns how much of a prompt each instance holds, by its rolling sequence hashes",
            answered(HOLDINGS, PACKED_HOLDINGS),
            body=in_both(QUERY_BY_HASH, PACKED_QUERY_BY_HASH),
        ),
        "POST /register": Operation(
            "Subscribes to a publisher",
            answered(IS_REGISTERED, IS_REGISTERED),
            (409,),
            in_both(REGISTER, PACKED_REGISTER),
        ),
        "POST /unregister": Operation(
            "Drops publishers and their blocks",
            answered(IS_UNREGISTERED, IS_UNREGISTERED),
            (404,),
            in_both(UNREGISTER, PACKED_UNREGISTER),
        ),
        "GET /services": Operation(
            "Lists publishers, their events and streams",
            answered(
                row({"count": COUNT, "services": array(SERVICE)}),
                row({"count": COUNT, "services": array(PACKED_SERVICE)}),
            ),
            parameters=(in_query("verbose"),),
        ),
        "GET /global_view": Operation(
            "Lists the contexts (model, adapter, salt) that separate blocks",
            answered(
                row({"context_count": COUNT, "model_contexts": array(FULL_CONTEXT)}),
                row({"context_count": COUNT, "contexts": array(PACKED_CONTEXT)}),
            ),
        ),
    },
    FAILURE,
    (JSON, PACKED),
)
