"""Bodies for the selection service's routes: a valid one for each, and values that it refuses."""

from __future__ import annotations

from typing import Any

from tests.support.bodies import NO_ARRAYS, NO_INTEGERS, NO_NAMES, NO_TEXTS, U32, Bodies, elements

MODEL = "face/model"
WORKER = 1  # with ranks 0 and 1, in blocks of 4
LIVE = "live"  # a reservation whose prefill is complete
REPLICA = "tcp://127.0.0.1:1"
MIB = 1024 * 1024

REGISTERED: dict[str, Any] = {
    "worker_id": WORKER,
    "model_name": MODEL,
    "endpoint": "http://worker:8000",
    "block_size": 4,
    "data_parallel_size": 2,
    "kv_events_endpoints": {"0": "ipc:///nonexistent/0", "1": "ipc:///nonexistent/1"},
    "taints": ["gpu"],
}
PROMPT: dict[str, Any] = {
    "model_name": MODEL,
    "block_hashes": [1, 2],
    "sequence_hashes": [3, 4],
    "isl_tokens": 8,
}
BOOKED = PROMPT | {"worker_id": WORKER, "dp_rank": 0, "reservation_id": LIVE}

POSTS: dict[str, tuple[dict[str, Any], int]] = {
    "/workers": ({**REGISTERED, "worker_id": 2, "model_name": "new"}, 201),
    "/select": (PROMPT, 200),
    "/select_and_reserve": ({**PROMPT, "reservation_id": "new"}, 200),
    "/reservations": ({**BOOKED, "reservation_id": "new", "effective_prefill_tokens": 8}, 201),
    f"/reservations/{LIVE}/output_block": ({"decay_fraction": 0.5}, 200),
    "/potential_loads": (PROMPT, 200),
    "/overlap_scores": (PROMPT, 200),
    "/busy_threshold": ({"model": MODEL, "active_decode_blocks_threshold": 1}, 200),
    "/router_mode": ({"model": MODEL, "router_mode": "kv"}, 200),
    "/policy": ({"model": MODEL, "router_policy": "dynamo"}, 200),
    # Refused, as this process has no port for replicas.
    "/replica_sync/register_peer": ({"endpoint": REPLICA}, 409),
}

TEXT = NO_TEXTS  # where null means absence
NAME = (*NO_TEXTS, "null")
U32_NUMBER = (*NO_INTEGERS, *U32)
U64_NUMBER = (*NO_INTEGERS, "18446744073709551616", "-1")
TOKENS = (*NO_INTEGERS, "9007199254740993", "-1")  # 2^53 is the most
HASH = ("18446744073709551616", "-9223372036854775809")
ARRAYS = NO_ARRAYS[1:]  # where null means absence
HASHES = (*ARRAYS, *elements(*HASH))
NUMBER = ("true", '"1"', "[1]", "{}", "1e400", "9" * 400, "9" * 5000)
FLAG = ("0", "1", '"true"', "[]", "{}", "1.0")
OBJECT = ("1", '"x"', "[]", "[{}]", "true")
TEXTS = ("1", '"x"', "{}", "[1]", "[null]", '["a", 1]', "[[]]")
MAP = ("1", '"x"', "[]", '{"0": 1}', '{"0": null}', '{"0": []}')
RANKS = (*MAP, '{"x": "a"}', '{"-1": "a"}', '{"00": "a"}', '{"4294967296": "a"}', '{"": "a"}')
RANKS += ('{"\\u00b2": "a"}', '{"1.0": "a"}')


def within(member: str, values: tuple[str, ...], *rest: str) -> tuple[str, ...]:
    """Returns objects in which `member` has these values, beside the members of `rest`.

    Leaves out the longest values, whose cases would have equal names, and -0, which is 0 here.
    """
    return tuple(
        "{" + ", ".join((*rest, f'"{member}": {v}')) + "}"
        for v in values
        if len(v) < 2000 and v != "-0"
    )


PHASES = (*NO_TEXTS, '""', '"Prefill"', '"whole"')
MODES = (*NO_TEXTS, '""', '"KV"', '"round_robin"')
POLICIES = (
    *(*NO_TEXTS, '""', '"kvd_tuned"', '"kvd,hold_up"', '"kvd,hold_up=nan"', '"dynamo,hold_up=1"'),
    *('{"policy": 1}', '{"policy": "x"}', '{"hold_up": 1}', '{"weights": [1]}'),
    *(f'{{"policy": "kvd", "weights": {{"hold_up": {v}}}}}' for v in ("null", '"1"', "-1", "1e39")),
)
WEIGHTS = ("1", '"x"', "true", "[1]", *(f'{{"gpu": {v}}}' for v in (*NUMBER[:6], "null", "1e39")))
PARTITION = {"model_name": NAME, "tenant_id": NAME, "routing_group": NAME}
OVERRIDE = (
    *OBJECT,
    *within("overlap_score_weight", (*NUMBER, "-1", "1e301")),
    *within("router_temperature", (*NUMBER, "-0.1")),
    *within("track_prefill_tokens", FLAG),
    *within("assume_kv_reuse", FLAG),
    *within("router_mode", MODES),
)
PROMPTS = {
    **PARTITION,
    "block_hashes": HASHES,
    "sequence_hashes": HASHES,
    "isl_tokens": TOKENS,
    "token_ids": (*ARRAYS, *elements(*U32)),
    "lora_name": TEXT,
    "cache_salt": TEXT,
    "is_eagle": FLAG,
    "router_config_override": OVERRIDE,
}
SELECTED = {
    **PROMPTS,
    "selection_id": TEXT,
    "expected_output_tokens": U32_NUMBER,
    "priority_jump": NUMBER,
    "strict_priority": U32_NUMBER,
    "session_id": TEXT,
    "affinity_target": (*OBJECT, "{}", *within("worker_id", (*U64_NUMBER, "null"))),
    "pinned_worker": (
        *OBJECT,
        "{}",
        '{"worker_id": 1}',
        '{"dp_rank": 1}',
        *within("worker_id", (*U64_NUMBER, "null"), '"dp_rank": 0'),
        *within("dp_rank", (*U32_NUMBER, "null"), '"worker_id": 1'),
    ),
    "allowed_worker_ids": (
        "1",
        "{}",
        '"1"',
        *(f"[{v}]" for v in U64_NUMBER if len(v) < 2000 and v != "-0"),
    ),
    "routing_constraints": (
        *OBJECT,
        *within("required_taints", TEXTS),
        *within("preferred_taints", WEIGHTS),
    ),
    "explain": FLAG,
    "phase": PHASES,
    "nvext": (*OBJECT, *within("agent_hints", OBJECT)),
    "session_context": (*OBJECT, *within("session_id", TEXT)),
    "advisory": FLAG,
    "router_policy": POLICIES,
}
UNFIT: dict[str, dict[str, tuple[str, ...]]] = {
    "/workers": {
        **dict.fromkeys(PARTITION, (*NO_NAMES, "null")),
        "worker_id": (*U64_NUMBER, "null"),
        **dict.fromkeys(("kv_events_endpoint", "replay_endpoint"), TEXT),
        **dict.fromkeys(
            (
                "endpoint",
                "stable_routing_id",
                "kv_transfer_domain",
            ),
            NO_NAMES,
        ),
        **dict.fromkeys(
            ("block_size", "data_parallel_start_rank", "data_parallel_size"), U32_NUMBER
        ),
        **dict.fromkeys(("max_num_batched_tokens", "total_kv_blocks"), U64_NUMBER),
        "is_eagle": FLAG,
        "role": (*TEXT, '"other"', '""', '"Prefill"'),
        "taints": (*TEXTS, '["a\\u0000"]'),
        "topology_domains": (*MAP, '{"a": "\\u0000"}', '{"\\u0000": "a"}'),
        "kv_events_endpoints": RANKS,
        "router_hint_worker_type": NO_NAMES,
        "router_hint_source_control_endpoints": RANKS,
        "kv_transfer_enforcement": (*TEXT, '"other"', '""', '"Required"'),
        "kv_transfer_preferred_weight": NUMBER,
    },
    "/select": SELECTED,
    "/select_and_reserve": {**SELECTED, "reservation_id": TEXT},
    "/reservations": {
        **PROMPTS,
        "worker_id": (*U64_NUMBER, "null"),
        "dp_rank": U32_NUMBER,
        "reservation_id": TEXT,
        "effective_prefill_tokens": TOKENS,
        "expected_output_tokens": U32_NUMBER,
        "phase": (*PHASES, '"both"'),
    },
    f"/reservations/{LIVE}/output_block": {"decay_fraction": NUMBER},
    "/potential_loads": PROMPTS,
    "/overlap_scores": PROMPTS,
    "/busy_threshold": {
        **PARTITION,
        "model": NAME,
        "active_decode_blocks_threshold": NUMBER,
        "active_prefill_tokens_threshold": TOKENS,
        "active_prefill_tokens_threshold_frac": NUMBER,
    },
    "/router_mode": {**PARTITION, "model": NAME, "router_mode": MODES},
    "/policy": {**PARTITION, "model": NAME, "router_policy": POLICIES},
    "/replica_sync/register_peer": {"endpoint": NAME},
}
REQUIRED: dict[str, tuple[str, ...]] = dict.fromkeys(POSTS, ())
TUNING = ("/busy_threshold", "/router_mode", "/policy")
REQUIRED |= dict.fromkeys(TUNING, ("model",))
REQUIRED["/workers"] = ("worker_id",)
REQUIRED["/reservations"] = ("worker_id",)

TWO_TENANTS = (b'"tenant_id": "a", "routing_group": "b"',)
PLACED = ("/workers", "/select", "/select_and_reserve", "/reservations")
PLACED += ("/potential_loads", "/overlap_scores", *TUNING)
LIMITS = dict.fromkeys(POSTS, 8 * MIB)
for small in ("/replica_sync/register_peer", *TUNING):
    LIMITS[small] = 2 * MIB
SELECTION = Bodies(POSTS, REQUIRED, UNFIT, dict.fromkeys(PLACED, TWO_TENANTS), LIMITS)
