"""Schemas of /explain: of a question, and of an explanation."""

from __future__ import annotations

from kvd.faces.common.schemas import (
    BLOCK_SIZE,
    BLOCKS,
    COUNT,
    FLAG,
    HASH,
    NUMBER,
    TENANT,
    TEXT,
    TOKENS,
    U32,
    Members,
    Schema,
    array,
    by_name,
    members,
    nullable,
    one_of,
    row,
)
from kvd_core.index.prefix_index import TIERS
from kvd_core.index.trace import END_REASONS
from kvd_core.index.trace import KINDS as CHANGES

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

# Members of a question, beside those of its prompt, that a choice depends on as in POST /select.
CHOICE_MEMBERS = (
    "session_context",
    "affinity_target",
    "pinned_worker",
    "allowed_worker_ids",
    "routing_constraints",
    "phase",
    "router_policy",
    "slo_ttft_ms",
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
        **dict.fromkeys(("router_config_override", *CHOICE_MEMBERS), AS_IN_SELECT),
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
