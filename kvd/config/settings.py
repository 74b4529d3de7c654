"""The settings of the daemon: each has one row here, with everything about it.

`--indexer-bind` of the command line is `KVD_INDEXER_BIND` in the environment and `indexer_bind`
in the configuration file and in code. `kvd.config.sources` finds their values, of which
`kvd.config.load` makes the `Config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from kvd.config import parsers
from kvd.config.parsers import OFF, Binds, Setting, TcpBind
from kvd.gateway.exchanges import RelayLimits
from kvd.gateway.pools import DEFAULT_REMOTE_TOKENS
from kvd.gateway.remote import DEFAULT_DEADLINE_S
from kvd.gateway.tokens import DEFAULT_TOKENIZE_S
from kvd.gateway.tunnels import UpstreamTls
from kvd.http.limits import DEFAULT_BODY_LIMIT, HttpLimits
from kvd.model import DEFAULT_TENANT, MAX_PARTITIONS
from kvd.net.backlog import MAX_QUEUED_BYTES, MAX_QUEUED_MESSAGES
from kvd.net.dialing import LOOKUP_EVERY_S, LOOKUP_S
from kvd.net.link import LinkOptions
from kvd.net.recovery import RecoveryLimits
from kvd.net.replay import ReplayOptions
from kvd.net.replication import REPLICA_LINK
from kvd.selection.options import RouterMode, RouterOptions
from kvd.selection.policies import Policy, RouterPolicy
from kvd.selection.queue import QueuePolicy
from kvd.telemetry.logs import FORMS, LEVELS
from kvd.telemetry.rotating import MAX_FILES
from kvd.wire import egress
from kvd.wire.stream_link import STALE_AFTER_S
from kvd_core.conductor.conductor import DEFAULT_SEED
from kvd_core.ledger.ledger import MAX_BLOCKS as MAX_REQUEST_BLOCKS
from kvd_core.ledger.ledger import MAX_REQUESTS
from kvd_core.selector.settings import Settings

# The ports of the originals, on loopback only.
DEFAULT_INDEXER_BIND = TcpBind("127.0.0.1", 8090)
DEFAULT_SLOT_TRACKER_BIND = TcpBind("127.0.0.1", 8091)
DEFAULT_SELECTION_BIND = TcpBind("127.0.0.1", 8092)
DEFAULT_CONDUCTOR_BIND = TcpBind("127.0.0.1", 13333)
DEFAULT_GATEWAY_BIND = TcpBind("127.0.0.1", 8080)

# Dumps under way, for replicas that start at once. Each takes 0.2 ms of every pass of the loop, and
# watches every chain that changes; a client that does not read is closed after 5 s.
MAX_DUMPS = 8

# Stores, evictions and clears that are remembered: by default 2 MB of them, at most 8 MB, which an
# explanation reads in some milliseconds.
DEFAULT_CHRONICLE, MAX_CHRONICLE = 65_536, 262_144

# The fast path reads heads up to these bounds, whatever the settings (kvd/http/plain_head.hpp).
LEAST_HEAD_BYTES, LEAST_HEADERS = 4096, 48

# Microseconds in which the next request of a client on this machine, or near it, arrives.
MAX_BUSY_WAIT_US = 1000

I32_MAX = 2**31 - 1  # libzmq's bounds are of this type
DYN = "DYN_"  # the prefix of variables of Dynamo's router

# Rows of the usual types; other rows name their parser and the form of their value.
binds = partial(Setting, parsers.parse_face_binds, "[tls:]HOST:PORT|unix:PATH,...|off", common=True)
count = partial(Setting, parsers.within(1, I32_MAX), "N")
file = partial(Setting, parsers.parse_path, "FILE")
pause = partial(Setting, parsers.parse_pause, "SECONDS")
seconds = partial(Setting, parsers.parse_seconds, "SECONDS")
switch = partial(Setting, parsers.parse_switch, "BOOL")
cost = partial(
    Setting, options_class=Settings, env=DYN, live=True
)  # how the core weighs and chooses


def section(
    options_class: type | None = None, prefix: str = "", **rows: Setting
) -> tuple[Setting, ...]:
    """Returns the settings, each with its name.

    If `options_class` has a member with the name in a setting's `field`, or with its name without
    `prefix`, the setting sets that member, and takes its default unless the row has one.
    """
    made = []
    for name, row in rows.items():
        row_class = row.options_class or options_class
        field = row.field or name.removeprefix(prefix)
        defaults = {} if row_class is None else _defaults(row_class)
        if field in defaults:
            default = defaults[field] if row.default is None else row.default
            row = replace(row, options_class=row_class, field=field, default=default)
        made.append(replace(row, name=name))
    return tuple(made)


def _defaults(of: type) -> Mapping[str, Any]:
    if of is Settings:
        return RouterOptions().settings.members
    return {each.name: each.default for each in fields(of)}


WORKER_SETTINGS = section(
    block_size=Setting(
        parsers.parse_positive, "TOKENS", "block size of the workers in --workers", common=True
    ),
    model_name=Setting(
        parsers.parse_name, "NAME", "model of the workers in --workers", "default", common=True
    ),
    tenant_id=Setting(
        parsers.parse_name, "NAME", "tenant of the workers in --workers", DEFAULT_TENANT
    ),
    workers=Setting(
        parsers.parse_list,
        "ID[:RANK]=ENDPOINT[;REPLAY][;URL],...",
        "engines to subscribe to at startup: event endpoint, replay endpoint, and the URL "
        "at which the worker can be selected",
        common=True,
    ),
)

REPLICA_SETTINGS = section(
    replica_sync_port=Setting(
        parsers.parse_replica_port,
        "PORT",
        "port on which this process publishes its requests to replicas",
    ),
    replica_sync_host=Setting(
        parsers.parse_host,
        "HOST",
        "address of --replica-sync-port; 0.0.0.0 is every interface",
        "127.0.0.1",
    ),
    replica_sync_peers=Setting(
        parsers.parse_replica_peers,
        "ENDPOINT,...",
        "replicas to receive requests from, as tcp://HOST:PORT",
    ),
    replica_sync_queue_messages=Setting(
        parsers.within(0, I32_MAX),
        "N",
        "maximum number of events queued to and from each replica; further events are "
        "dropped; 0: unlimited",
        REPLICA_LINK.queue_messages,
    ),
)

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

CONDUCTOR_SETTINGS = section(
    hash_seed=Setting(
        parsers.parse_u64,
        "SEED",
        "seed of the rolling sequence hashes shared by the conductor's publishers and clients",
        DEFAULT_SEED,
    ),
)

PEER_SETTINGS = section(
    RecoveryLimits,
    "recovery_",
    peers=Setting(parsers.parse_peers, "URL,...", "indexers to recover the index from at startup"),
    peers_token_file=file("file with a bearer token of scope admin at the peers"),
    recovery_delay_s=pause(
        "longest wait for engines to connect, before a peer is asked for its dump",
        1.0,  # as long as Dynamo always waits
    ),
    recovery_connect_s=seconds("time allowed to connect to a peer before the next peer is asked"),
    recovery_stall_s=seconds("time allowed without receiving a byte of a peer's dump"),
    recovery_total_s=seconds("total time allowed for recovery from one peer"),
    recovery_bytes=Setting(
        parsers.within(1024 * 1024, 2**40),
        "BYTES",
        "maximum size of a peer's dump",
        field="body_bytes",
    ),
    recovery_blocks=Setting(
        parsers.within(1, I32_MAX),
        "BLOCKS",
        "maximum number of blocks in a peer's dump, and of runs of blocks; a block takes "
        "16 bytes and a run 56 until stored",
    ),
)

SECURITY_SETTINGS = section(
    tls_certfile=file("PEM certificate chain of tls: addresses", live=True, common=True),
    tls_keyfile=file("PEM private key of tls: addresses", live=True, common=True),
    tls_client_ca=file(
        "PEM certificates of the authorities whose client certificates tls: addresses require",
        live=True,
    ),
    unix_socket_mode=Setting(
        parsers.parse_file_mode, "MODE", "file mode of the sockets of unix: addresses", "0660"
    ),
    unix_socket_group=Setting(
        parsers.parse_group,
        "GROUP",
        "name or number of the group that owns the sockets of unix: addresses",
    ),
    tokens_file=file(
        "file of bearer tokens with their scopes; every client needs one of them; see "
        "docs/security.md",
        live=True,
        common=True,
    ),
    allow_unauthenticated=switch(
        "whether addresses beyond this machine may serve unauthenticated clients", False
    ),
    allowed_hosts=Setting(
        parsers.parse_hosts,
        "NAME,...",
        "further names, in the Host header, that kvd accepts on the loopback interface",
        live=True,
    ),
    allowed_origins=Setting(
        parsers.parse_origins,
        "ORIGIN,...",
        "origins of the web pages that may send requests",
        live=True,
    ),
)

FLEET_SETTINGS = section(
    fleet_file=file(
        "TOML file of workers, publishers and replicas; kvd applies its changes while running",
        common=True,
    ),
)

OUTGOING_SETTINGS = section(
    outgoing_allow=Setting(
        parsers.parse_outgoing,
        "NETWORK,...",
        "networks in which kvd may connect to engines, replicas and peers: addresses such as "
        "10.0.0.0/8, private, ipc",
        egress.DEFAULT,
        live=True,
    ),
    outgoing_lookup_s=seconds("time allowed for one host name lookup", LOOKUP_S, live=True),
    outgoing_lookup_every_s=seconds(
        "pause between lookups of a host name whose connection is lost", LOOKUP_EVERY_S, live=True
    ),
)

ENGINE_SETTINGS = section(
    LinkOptions,
    "engine_",
    engine_heartbeat_s=seconds("interval between pings of each engine and replica"),
    engine_heartbeat_timeout_s=seconds(
        "silence after which the connection to an engine or replica counts as lost"
    ),
    engine_connect_timeout_s=seconds(
        "time allowed to connect to an engine or replica before another attempt"
    ),
    engine_handshake_timeout_s=seconds(
        "time allowed for the ZMTP handshake with an engine or replica"
    ),
    engine_reconnect_s=seconds(
        "pause before the first reconnection attempt; each failure doubles the pause"
    ),
    engine_reconnect_max_s=seconds("longest pause between reconnection attempts"),
    engine_stale_s=seconds(
        "time after which a disconnected stream is stale and a silent stream is reported",
        STALE_AFTER_S,
    ),
    engine_queue_messages=Setting(
        parsers.within(0, I32_MAX),
        "N",
        "maximum number of unapplied batches of an engine; further batches are dropped and "
        "leave a gap; 0: unlimited",
    ),
    engine_queue_bytes=Setting(
        parsers.within(0, 2**40),
        "BYTES",
        "maximum size of the unapplied batches of an engine, with 16 bytes added for each "
        "batch; 0: unlimited",
    ),
    engine_message_bytes=Setting(
        parsers.within(64 * 1024, I32_MAX),  # the decoder takes no more
        "BYTES",
        "maximum size of a batch; a larger batch closes the connection",
        field="max_message_bytes",
    ),
) + section(
    ReplayOptions,
    "replay_",
    replay_idle_s=seconds("time allowed between two useful batches of a replay", live=True),
    replay_total_s=seconds(
        "total time allowed for a replay, including the wait for its turn", live=True
    ),
    replay_spare_s=pause(
        "pause before an engine is asked again after a replay that brought nothing", live=True
    ),
    replay_messages=count(
        "maximum number of messages in a replay", field="max_messages", live=True
    ),
    replay_bytes=Setting(
        parsers.within(64 * 1024, 2**40),
        "BYTES",
        "maximum size of a replay",
        field="max_bytes",
        live=True,
    ),
    replay_at_once=Setting(
        parsers.within(1, 4096),  # three descriptors each
        "N",
        "maximum number of concurrent replays",
        live=True,
    ),
)

INDEX_SETTINGS = section(
    index_max_blocks=Setting(
        parsers.within(0, 2**40),
        "BLOCKS",
        "maximum number of indexed blocks over all models and tenants, and of (rank, "
        "block) pairs; 0: unlimited",
        0,
        live=True,
    ),
    index_chronicle=Setting(
        parsers.within(0, MAX_CHRONICLE),
        "CHANGES",
        "number of stores, evictions and clears of blocks remembered for `kvd explain`, over all "
        "models and tenants, 32 bytes each; 0: none",
        DEFAULT_CHRONICLE,
    ),
    max_partitions=count(
        "maximum number of (model, tenant) pairs on each face", MAX_PARTITIONS, live=True
    ),
    max_dumps=Setting(
        parsers.within(1, 1024), "N", "maximum number of concurrent dumps of the index", MAX_DUMPS
    ),
)

CURVE_SETTINGS = section(
    curve_secret_key_file=file(
        "file with this process's CURVE secret key for engines and replicas",
        when_unset="a fresh key at each start",
    ),
    replica_sync_client_keys=file(
        "file with the CURVE public keys of the replicas that may subscribe to requests, "
        "one per line",
        when_unset="any replica may",
    ),
)

HTTP_SETTINGS = section(
    HttpLimits,
    "http_",
    http_connections=Setting(
        parsers.parse_positive, "N", "maximum number of HTTP connections per listener", live=True
    ),
    http_idle_s=seconds("time after which an idle HTTP connection is closed", live=True),
    http_graceful_s=seconds("time allowed for open requests to finish at shutdown", live=True),
    http_body_bytes=Setting(
        parsers.at_least(DEFAULT_BODY_LIMIT),
        "BYTES",
        "maximum size of the body of a query or of a worker registration; other bodies may "
        "have 2 MiB",
    ),
    http_bodies_bytes=Setting(
        parsers.at_least(DEFAULT_BODY_LIMIT),
        "BYTES",
        "maximum total size of the request bodies that a listener is receiving",
    ),
    http_head_bytes=Setting(
        parsers.at_least(LEAST_HEAD_BYTES), "BYTES", "maximum size of a request head"
    ),
    http_headers=Setting(
        parsers.at_least(LEAST_HEADERS), "N", "maximum number of headers of a request"
    ),
    http_url_bytes=Setting(
        parsers.at_least(LEAST_HEAD_BYTES), "BYTES", "maximum length of the request target"
    ),
    http_head_s=seconds("time allowed to receive a request head"),
    http_body_s=seconds("time allowed to receive a request body"),
    http_handler_s=seconds("time allowed for a handler to begin its answer"),
    http_send_s=seconds("time allowed without the client reading a byte of the answer"),
    http_linger_s=seconds(
        "time a refused client may keep sending before its connection is closed",
    ),
    http_busy_wait_us=Setting(
        parsers.within(0, MAX_BUSY_WAIT_US),
        "N",
        "longest time in microseconds for which kvd stays awake after a request, for the next "
        "one, where requests come that fast and the machine has a core to spare; 0: never",
    ),
)

BIND_SETTINGS = section(
    indexer_bind=binds("addresses of the KV indexer", Binds((DEFAULT_INDEXER_BIND,))),
    slot_tracker_bind=binds("addresses of the slot tracker", Binds((DEFAULT_SLOT_TRACKER_BIND,))),
    selection_bind=binds("addresses of the selection service", Binds((DEFAULT_SELECTION_BIND,))),
    conductor_bind=binds("addresses of the conductor", Binds((DEFAULT_CONDUCTOR_BIND,))),
    gateway_bind=binds("addresses of the gateway", OFF),
)

# Processes of a gateway: more processes than cores gain nothing.
MAX_PROCESSES = 256

GATEWAY_SETTINGS = section(
    RelayLimits,
    "gateway_",
    upstreams=Setting(
        parsers.parse_upstreams,
        "URL,...",
        "engines behind the gateway, as http://HOST:PORT; dns:NAME:PORT and dns:https://NAME:PORT "
        "stand for every address of a name",
        common=True,
    ),
    prefills=Setting(
        parsers.parse_upstreams,
        "URL,...",
        "vLLM engines that compute prompts for the upstreams; SGLang's prefill engines are listed "
        "as upstreams",
        common=True,
    ),
    gateway_remote_prefill_tokens=Setting(
        parsers.at_least(0),
        "TOKENS",
        "minimum number of prompt tokens to compute, on the upstream that has most of the prompt "
        "cached, for which a prefill engine is used",
        DEFAULT_REMOTE_TOKENS,
    ),
    gateway_canary=switch(
        "whether kvd checks with a short prompt of its own that an engine's KV events match what "
        "the engine computes",
        default=True,
    ),
    upstream_key_file=file("file with the API key of the engines, for the gateway's own requests"),
    upstream_tls_ca=file(
        "PEM certificates of the authorities that engines with https: URLs are believed by; "
        "without it, those of the system",
        options_class=UpstreamTls,
        field="ca_file",
    ),
    upstream_tls_certfile=file(
        "PEM certificate chain that is shown to engines with https: URLs that ask for one",
        options_class=UpstreamTls,
        field="certfile",
    ),
    upstream_tls_keyfile=file(
        "PEM private key of upstream_tls_certfile", options_class=UpstreamTls, field="keyfile"
    ),
    upstream_tls_server_name=Setting(
        parsers.parse_server_name,
        "NAME",
        "name in the certificates of engines with https: URLs",
        when_unset="the host of the URL",
        options_class=UpstreamTls,
        field="server_name",
    ),
    upstream_tls_insecure=switch(
        "whether any certificate of an engine will do; anyone between kvd and the engine can "
        "then read and change everything",
        False,
        options_class=UpstreamTls,
        field="insecure",
    ),
    gateway_processes=Setting(
        parsers.within(1, MAX_PROCESSES),
        "N",
        "number of processes that share the gateway's port; with more than one, a further process "
        "chooses for all of them",
        1,
        also="--processes",
    ),
    gateway_kvd=Setting(
        parsers.parse_kvds,
        "URL,...",
        "kvds that choose for the gateway, as http://HOST:PORT or unix:/PATH of their selection "
        "service; the first that answers is asked",
        when_unset="this process chooses",
        also="--kvd",
    ),
    gateway_kvd_s=Setting(
        parsers.parse_seconds,
        "SECONDS",
        "time allowed for a kvd of gateway_kvd to choose; if none does, the request is routed by "
        "load",
        DEFAULT_DEADLINE_S,
    ),
    gateway_kvd_token_file=file(
        "file with the bearer token for the kvds of gateway_kvd, of scopes read, lifecycle and "
        "admin"
    ),
    gateway_body_bytes=Setting(
        parsers.within(1024, 2**31),
        "BYTES",
        "maximum size of a request body of the gateway",
        64 * 1024 * 1024,
    ),
    gateway_memory_bytes=Setting(
        parsers.within(0, 2**40),
        "BYTES",
        "memory for the token blocks of known conversations, whose next turns need not be "
        "tokenized; 0: none",
        256 * 1024 * 1024,
    ),
    gateway_tokenize_s=Setting(
        parsers.parse_seconds,
        "SECONDS",
        "time allowed for an engine to tokenize a prompt; without its tokens the request is "
        "routed by session and load",
        DEFAULT_TOKENIZE_S,
    ),
    gateway_decision_headers=switch(
        "whether answers name, in headers, the engine that served the request and the reason for "
        "the choice",
        True,
    ),
    gateway_connect_s=seconds("time allowed to connect to an engine"),
    gateway_silence_s=seconds("time an engine may send nothing before its request is abandoned"),
    gateway_client_s=seconds("time a client may read nothing before its connection is closed"),
    gateway_idle_s=pause("time an idle connection to an engine is kept; engines close after 5 s"),
    gateway_filler_s=pause(
        "time a stream may be silent before the client is sent a comment that keeps proxies from "
        "closing it; 0: never"
    ),
)

LOG_SETTINGS = section(
    log_level=Setting(
        parsers.one_of(LEVELS),
        "|".join(LEVELS),
        "lowest level that is logged",
        "info",
        live=True,
        common=True,
    ),
    log_format=Setting(
        parsers.one_of(FORMS),
        "|".join(FORMS),
        "format of the log lines on stderr",
        "logfmt",
        live=True,
    ),
    access_log=switch("whether kvd logs every HTTP request", False, live=True),
)

DECISION_SETTINGS = section(
    decision_log=file(
        "file that records each booked choice of the selection service and the end of its "
        "request, without prompts, for `kvd replay`",
        when_unset="no record",
    ),
    decision_log_bytes=Setting(
        parsers.within(64 * 1024, 2**40),
        "BYTES",
        "size at which a new file of the decision log begins",
        64 * 1024 * 1024,
    ),
    decision_log_files=Setting(
        parsers.within(1, MAX_FILES),
        "N",
        "maximum number of files of the decision log; the oldest is removed",
        8,
    ),
)

STATE_SETTINGS = section(
    state_dir=Setting(
        parsers.parse_state_dir,
        "DIR|off",
        "directory for the state that survives a restart: registrations made by calls, bookings, "
        "and snapshots of the index",
        when_unset="the StateDirectory of the systemd unit, or off",
        default_env="STATE_DIRECTORY",
    ),
    snapshot_s=Setting(
        parsers.parse_pause,
        "SECONDS",
        "pause between two snapshots of the index in the state directory; 0: only at shutdown",
        60.0,
    ),
)

SHARED_STATE_SETTINGS = section(
    state_url=Setting(
        parsers.parse_state_url,
        "URL",
        "Redis or Valkey server where replicas share bookings, sessions and registrations: "
        "redis://[USER@]HOST:PORT[/DB], rediss:// for TLS, redis+sentinel://HOST:PORT,.../NAME or "
        "redis+cluster://HOST:PORT,...",
        when_unset="nothing is shared",
    ),
    state_prefix=Setting(
        parsers.parse_prefix,
        "TEXT",
        "prefix of kvd's keys on the server of state_url; the same for all replicas of a fleet",
        "kvd",
    ),
    state_password_file=file("file with the password for the server of state_url"),
    state_ca_file=file(
        "file with the certificates of authorities for the server of state_url",
        when_unset="the system's authorities",
    ),
    state_advertise=Setting(
        parsers.parse_advertised,
        "URL",
        "base URL at which other replicas reach this indexer: new replicas recover the index from "
        "it, and answers with status 421 name it",
        when_unset="other replicas do not learn it",
    ),
    state_lease_s=Setting(
        parsers.parse_lease,
        "SECONDS",
        "time without a sign of life on the server of state_url after which a replica counts as "
        "gone; each replica gives one, and reads changed registrations, ten times as often",
        10.0,
    ),
)

PARTITION_SETTINGS = section(
    serve=Setting(
        parsers.parse_served,
        "MODEL[@TENANT],...",
        "models, or single tenants of models, that this kvd serves; requests for others are "
        "answered with 421",
        when_unset="all models",
    ),
    owners=Setting(
        parsers.parse_owners,
        "MODEL[@TENANT]=URL,...",
        "URLs of the kvds that serve other models; answers with status 421 name them",
    ),
)

DAEMON_SETTINGS = section(
    min_initial_workers=Setting(
        parsers.parse_u32,
        "N",
        "number of instances that must register before kvd applies any events",
        0,
        env="DYN_ROUTER_MIN_INITIAL_WORKERS",
        empty_is_wrong=True,
    ),
    request_expiry_s=Setting(
        parsers.parse_positive,
        "SECONDS",
        "age at which a live request is dropped",
        300,
        env="DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
        live=True,
    ),
    max_requests=Setting(
        parsers.within(1, MAX_REQUESTS),
        "N",
        "maximum number of live requests per model and tenant, on the slot tracker and on "
        "the selection service each",
        MAX_REQUESTS,
    ),
    max_request_blocks=Setting(
        parsers.within(1, MAX_REQUEST_BLOCKS),
        "BLOCKS",
        "maximum number of blocks of live requests per model and tenant, on the slot "
        "tracker and the selection service together",
        MAX_REQUEST_BLOCKS,
    ),
    queues_messages=Setting(
        parsers.within(0, 2**40),
        "N",
        "maximum number of unapplied messages of all engines and replicas; 0: unlimited",
        MAX_QUEUED_MESSAGES,
    ),
    queues_bytes=Setting(
        parsers.within(0, 2**40),
        "BYTES",
        "maximum total size of the unapplied messages of all engines and replicas; 0: unlimited",
        MAX_QUEUED_BYTES,
    ),
    metrics_ranks=Setting(
        parsers.parse_u32,
        "N",
        "largest number of registered ranks for which /metrics shows loads rank by rank",
        1000,
        live=True,
    ),
)

# Settings of every command that serves a face.
FACE_SETTINGS = (
    *SECURITY_SETTINGS,
    *FLEET_SETTINGS,
    *OUTGOING_SETTINGS,
    *CURVE_SETTINGS,
    *STATE_SETTINGS,
    *SHARED_STATE_SETTINGS,
    *PARTITION_SETTINGS,
)

_AS_ORIGINAL = {"router_last_token": False, "router_policy": Policy(RouterPolicy.DYNAMO)}

# Settings of `kvd select-service`, with its own names for the addresses and peers. By default it
# chooses exactly as the original does, even between equals.
SELECT_SERVICE_SETTINGS = (
    *REPLICA_SETTINGS,
    *(
        replace(setting, default=_AS_ORIGINAL.get(setting.name, setting.default))
        for setting in ROUTER_SETTINGS
    ),
    *(setting for setting in DAEMON_SETTINGS if setting.is_borrowed),
)

# Options of Dynamo's router without an equivalent here, by flag without the dashes, and why. kvd
# accepts them with a warning, so that one command line and one environment do for both.
_NO_NATS = "kvd has no event store; --peers names the indexers to recover from"
_NO_CACHE = "kvd caches no selections; retries need an Idempotency-Key"
_NO_KEYS = "kvd hashes prompts without a key"
WITHOUT_EFFECT = {
    "router-replica-sync": "--replica-sync-port and --replica-sync-peers set up replicas",
    "kv-cache-block-size": "each registration states the block size of its worker",
    "router-durable-kv-events": _NO_NATS,
    "router-reset-states": _NO_NATS,
    "router-snapshot-threshold": _NO_NATS,
    "event-plane": "kvd receives events over ZMQ only",
    "selection-cache-ttl-secs": _NO_CACHE,
    "selection-cache-max-entries": _NO_CACHE,
    "selection-cache-max-bytes": _NO_CACHE,
    "router-tracking-hash": _NO_KEYS,
    "router-tracking-key-file": _NO_KEYS,
    "router-tracking-key-id": _NO_KEYS,
}

# The most used settings: the help of a command shows them first, together with the flags that are
# no settings.
COMMON = "Common"

# By subject, in the order of the help, the manual and the documentation.
GROUPS = {
    COMMON: (*BIND_SETTINGS, *WORKER_SETTINGS, *LOG_SETTINGS),
    "Recovery": PEER_SETTINGS,
    "Replicas": REPLICA_SETTINGS,
    "Routing": ROUTER_SETTINGS,
    "The conductor": CONDUCTOR_SETTINGS,
    "The gateway": GATEWAY_SETTINGS,
    "Who may connect": SECURITY_SETTINGS,
    "The fleet file": FLEET_SETTINGS,
    "Outgoing connections": OUTGOING_SETTINGS,
    "CURVE": CURVE_SETTINGS,
    "Engines and replays": ENGINE_SETTINGS,
    "The index": INDEX_SETTINGS,
    "HTTP limits": HTTP_SETTINGS,
    "State that outlives the process": STATE_SETTINGS,
    "State that replicas share": SHARED_STATE_SETTINGS,
    "A fleet divided among several kvds": PARTITION_SETTINGS,
    "The decision log": DECISION_SETTINGS,
    "The daemon": DAEMON_SETTINGS,
}
SETTINGS = tuple(setting for group in GROUPS.values() for setting in group)
