"""How a rank is chosen for a prompt, and how long a selection may wait for one."""

from __future__ import annotations

from functools import partial

from kvd.config import parsers
from kvd.config.parsers import OFF
from kvd.config.sections.rows import DYN, count, pause, seconds, section, switch
from kvd.config.setting import Setting
from kvd.selection.options import RouterMode, RouterOptions
from kvd.selection.policies import Policy, RouterPolicy
from kvd.selection.queue import QueuePolicy
from kvd_core.selector.settings import Settings

# How the core weighs and chooses.
cost = partial(Setting, options_class=Settings, env=DYN, live=True)

ROUTER_SETTINGS = section(
    RouterOptions,
    "router_",
    router_mode=Setting(
        parsers.one_of(RouterMode),
        "|".join(RouterMode),
        "rule that picks a worker among the eligible ones",
        RouterMode.KV,
        env=DYN,
        live=True,
    ),
    router_policy=Setting(
        Policy.parse,
        "NAME[,WEIGHT=NUMBER]...",
        f"cost of a worker in mode kv: {', '.join(RouterPolicy)}; WEIGHT=NUMBER changes a weight",
        Policy(RouterPolicy.KVD),
        live=True,
    ),
    active_decode_blocks_threshold=cost(
        parsers.parse_share_threshold,
        "SHARE",
        "share of a worker's KV blocks in use above which the worker gets no new requests",
        OFF,
    ),
    active_prefill_tokens_threshold=cost(
        parsers.parse_tokens_threshold,
        "TOKENS",
        "prefill tokens above which a worker gets no new requests",
        OFF,
    ),
    active_prefill_tokens_threshold_frac=cost(
        parsers.parse_threshold,
        "BATCHES",
        "prefill tokens, as a multiple of the worker's max_num_batched_tokens, above which the "
        "worker gets no new requests",
        OFF,
    ),
    router_conditional_disagg_prefill_busy_threshold=Setting(
        parsers.parse_threshold,
        "BATCHES",
        "prefill tokens, as a multiple of the worker's max_num_batched_tokens, above which "
        "advisory answers mark the worker prefill_busy",
        OFF,
        field="prefill_busy",
        env=DYN,
        live=True,
    ),
    router_conditional_disagg_decode_busy_threshold=cost(
        parsers.parse_threshold,
        "SHARE",
        "share of a worker's KV blocks in use above which advisory answers mark the worker "
        "decode_busy",
        OFF,
        field="decode_busy_threshold",
    ),
    router_kv_overlap_score_weight=cost(
        parsers.parse_weight,
        "WEIGHT",
        "cost of a prompt block to compute, relative to a block in use, which costs 1",
        field="overlap_weight",
        also_env=("DYN_ROUTER_PREFILL_LOAD_SCALE", "DYN_OVERLAP_SCORE_WEIGHT"),
    ),
    router_kv_overlap_score_credit=cost(
        parsers.parse_weight,
        "CREDIT",
        "share of a prompt block's cost saved when the block is cached on the device",
        field="device_credit",
    ),
    router_kv_overlap_score_credit_decay=cost(
        parsers.parse_weight,
        "DECAY",
        "decay of the overlap credit with the prefill tokens of a worker beyond the least loaded "
        "one; at 1, as many tokens as the prompt has halve the credit",
        field="credit_decay",
    ),
    router_decode_active_request_weight=cost(
        parsers.parse_weight,
        "WEIGHT",
        "cost of each active request of a worker, in blocks",
        field="active_request_weight",
    ),
    router_host_cache_hit_weight=cost(
        parsers.parse_share,
        "SHARE",
        "share of a prompt block's cost saved when the block is cached in host memory",
        field="host_credit",
    ),
    router_disk_cache_hit_weight=cost(
        parsers.parse_share,
        "SHARE",
        "share of a prompt block's cost saved when the block is cached on disk or beyond",
        field="disk_credit",
    ),
    router_temperature=cost(
        parsers.parse_weight,
        "T",
        "0 always picks the cheapest worker; higher values sample among workers",
    ),
    router_queue_threshold=cost(
        parsers.parse_threshold,
        "BATCHES",
        "prefill tokens, as a multiple of the worker's max_num_batched_tokens, above which the "
        "worker is busy; off: a worker is never busy",
    ),
    router_queue_policy=Setting(
        parsers.one_of(QueuePolicy),
        "|".join(QueuePolicy),
        "order in which queued requests are scheduled once a worker is free",
        env=DYN,
        live=True,
    ),
    router_queue_requests=count(
        "maximum number of queued requests; further requests are answered with 503",
        field="max_held",
        live=True,
    ),
    router_queue_s=seconds(
        "maximum time a request waits in the queue; keep it below http_handler_s, which "
        "ends the request without a reason",
        field="max_wait_s",
        live=True,
    ),
    router_disconnected_s=Setting(
        parsers.parse_endless_grace,
        "SECONDS",
        "time a worker stays eligible, with nothing cached, after its event connection is lost; "
        "inf: for good; off: its cache counts, too",
        live=True,
    ),
    router_unconnected_s=Setting(
        parsers.parse_grace,
        "SECONDS",
        "time a worker stays eligible before its event connection is first made; off: it "
        "stays eligible",
        OFF,
        live=True,
    ),
    router_retries=count(
        "maximum number of reservation answers kept for retries with the same Idempotency-Key",
        field="max_retries",
    ),
    router_use_kv_events=switch(
        "whether workers publish KV events; if not, cached blocks are predicted from requests",
        field="uses_kv_events",
        env=DYN,
        also="--router-kv-events",
    ),
    router_ttl_secs=pause(
        "lifetime of predicted blocks when workers publish no KV events", field="ttl_s", env=DYN
    ),
    router_max_tree_size=Setting(
        parsers.parse_positive,
        "BLOCKS",
        "maximum number of predicted blocks per model and tenant when workers publish no KV events",
        env=DYN,
    ),
    router_prune_target_ratio=Setting(
        parsers.parse_share,
        "SHARE",
        "fraction of predicted blocks kept when router_max_tree_size is exceeded",
        env=DYN,
    ),
    router_predicted_ttl_secs=seconds(
        "lifetime of blocks predicted in addition to KV events",
        when_unset="no predictions",
        field="predicted_ttl_s",
        env=DYN,
    ),
    router_assume_kv_reuse=switch(
        "whether requests with equal tokens share their blocks in use",
        field="assumes_kv_reuse",
        env=DYN,
    ),
    router_track_active_blocks=cost(
        parsers.parse_switch, "BOOL", "whether blocks in use count in the cost"
    ),
    router_track_output_blocks=switch(
        "whether output blocks lose weight towards the expected end of a request",
        field="tracks_output_blocks",
        env=DYN,
    ),
    session_affinity_ttl_secs=Setting(
        parsers.within(1, 31_536_000),
        "SECONDS",
        "time a session stays bound to its rank after its last request",
        when_unset="sessions are not bound",
        field="session_affinity_ttl_s",
    ),
    session_affinity_sessions=count(
        "maximum number of bound sessions; a further session replaces the binding that "
        "expires first",
        field="max_sessions",
    ),
    router_track_prefill_tokens=cost(
        parsers.parse_switch,
        "BOOL",
        "whether prompt tokens to compute count in the cost",
        field="track_prefill",
    ),
    router_last_token=switch(
        "whether the last prompt token and its block are computed even if they are cached",
        True,
        options_class=Settings,
        live=True,
    ),
    router_event_threads=Setting(
        parsers.parse_positive,
        "N",
        "accepted without effect: one thread applies events and answers queries",
        4,
        env=DYN,
    ),
)
