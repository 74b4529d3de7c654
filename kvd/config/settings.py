"""The settings of the daemon, one row each: its name, how its text is read, its default.

`--indexer-bind` of the command line is `KVD_INDEXER_BIND` in the environment and `indexer_bind`
in the configuration file and in code.
"""

from __future__ import annotations

from dataclasses import replace

from kvd.config import parsers
from kvd.config.parsers import OFF, Binds, Parse, Setting, TcpBind
from kvd.http.limits import HttpLimits
from kvd.http.types import DEFAULT_BODY_LIMIT
from kvd.model import DEFAULT_TENANT, MAX_PARTITIONS
from kvd.net.backlog import MAX_QUEUED_BYTES, MAX_QUEUED_MESSAGES
from kvd.net.dialing import LOOK_AGAIN_S, LOOKUP_S
from kvd.net.link import LinkOptions
from kvd.net.recovery import RecoveryLimits
from kvd.net.replay import ReplayOptions
from kvd.net.replication import REPLICA_LINK
from kvd.platform.descriptors import MAX_WAITING
from kvd.selection.options import (
    DEFAULT_DISCONNECTED_S,
    DEFAULT_MAX_TREE_SIZE,
    DEFAULT_MAX_WAIT_S,
    DEFAULT_PRUNE_TARGET_RATIO,
    DEFAULT_QUEUE_THRESHOLD,
    DEFAULT_TTL_S,
    MAX_RETRIES,
    RouterMode,
)
from kvd.selection.queue import QueuePolicy
from kvd.selection.sessions import MAX_SESSIONS
from kvd.telemetry.logs import FORMS, LEVELS
from kvd.wire import egress as outgoing
from kvd.wire.stream_link import STALE_AFTER_S
from kvd_core.conductor.conductor import DEFAULT_SEED
from kvd_core.ledger.ledger import MAX_BLOCKS as MAX_REQUEST_BLOCKS
from kvd_core.ledger.ledger import MAX_REQUESTS

# The ports of the originals, on loopback only.
DEFAULT_INDEXER_BIND = TcpBind("127.0.0.1", 8090)
DEFAULT_SLOT_TRACKER_BIND = TcpBind("127.0.0.1", 8091)
DEFAULT_SELECTION_BIND = TcpBind("127.0.0.1", 8092)
DEFAULT_CONDUCTOR_BIND = TcpBind("127.0.0.1", 13333)

BINDS = "[tls:]HOST:PORT|unix:PATH,...|off"

HTTP_DEFAULTS = HttpLimits()
LINK_DEFAULTS = LinkOptions()
REPLAY_DEFAULTS = ReplayOptions()
RECOVERY_DEFAULTS = RecoveryLimits()

# Dumps under way: replicas that start at once. Each takes 0.2 ms of every pass of the loop, and
# watches every chain that changes; a client that does not read is closed after 5 s.
MAX_DUMPS = 8

I32_MAX = 2**31 - 1  # libzmq's bounds are of this type
COUNT = parsers.within(1, I32_MAX)

WORKER_SETTINGS = (
    Setting(
        "block_size",
        parsers.parse_positive,
        None,
        "TOKENS",
        "block size of the workers in --workers",
    ),
    Setting(
        "model_name", parsers.parse_name, "default", "NAME", "model of the workers in --workers"
    ),
    Setting(
        "tenant_id",
        parsers.parse_name,
        DEFAULT_TENANT,
        "NAME",
        "tenant of the workers in --workers",
    ),
    Setting(
        "workers",
        parsers.parse_list,
        None,
        "ID[:RANK]=ENDPOINT[;REPLAY][;URL],...",
        "engines to subscribe to at startup: event endpoint, replay endpoint, and the URL "
        "at which the worker can be selected",
    ),
)

REPLICA_SETTINGS = (
    Setting(
        "replica_sync_port",
        parsers.parse_replica_port,
        None,
        "PORT",
        "port on which this process publishes its requests to replicas",
    ),
    Setting(
        "replica_sync_host",
        parsers.parse_host,
        "127.0.0.1",
        "HOST",
        "address of --replica-sync-port; 0.0.0.0 is every interface",
    ),
    Setting(
        "replica_sync_peers",
        parsers.parse_replica_peers,
        None,
        "ENDPOINT,...",
        "replicas to receive requests from, as tcp://HOST:PORT",
    ),
    Setting(
        "replica_sync_queue_messages",
        parsers.within(0, I32_MAX),
        REPLICA_LINK.queue_messages,
        "N",
        "maximum number of events queued to and from each replica; further events are "
        "dropped; 0: unlimited",
    ),
)


def _dynamo(
    name: str,
    parse: Parse,
    default: object,
    metavar: str,
    help: str,
    *,
    also: str | None = None,
    live: bool = False,
    also_borrowed: tuple[str, ...] = (),
) -> Setting:
    """Returns a setting of Dynamo's router, under its variable there."""
    borrowed = f"DYN_{name.upper()}"
    return Setting(
        name,
        parse,
        default,
        metavar,
        help,
        borrowed=borrowed,
        also=also,
        live=live,
        also_borrowed=also_borrowed,
    )


ROUTER_SETTINGS = (
    _dynamo(
        "router_mode",
        parsers.parse_mode,
        RouterMode.KV,
        "|".join(RouterMode),
        "rule that picks a worker among the eligible ones",
        live=True,
    ),
    _dynamo(
        "active_decode_blocks_threshold",
        parsers.parse_share_threshold,
        OFF,
        "SHARE",
        "share of a worker's KV blocks in use above which the worker gets no new requests",
        live=True,
    ),
    _dynamo(
        "active_prefill_tokens_threshold",
        parsers.parse_tokens_threshold,
        OFF,
        "TOKENS",
        "prefill tokens above which a worker gets no new requests",
        live=True,
    ),
    _dynamo(
        "active_prefill_tokens_threshold_frac",
        parsers.parse_threshold,
        OFF,
        "BATCHES",
        "prefill load, in batches, above which a worker gets no new requests",
        live=True,
    ),
    _dynamo(
        "router_conditional_disagg_prefill_busy_threshold",
        parsers.parse_threshold,
        OFF,
        "BATCHES",
        "prefill load, in batches, above which advisory answers mark a worker prefill_busy",
        live=True,
    ),
    _dynamo(
        "router_conditional_disagg_decode_busy_threshold",
        parsers.parse_threshold,
        OFF,
        "SHARE",
        "share of a worker's KV blocks in use above which advisory answers mark the worker "
        "decode_busy",
        live=True,
    ),
    _dynamo(
        "router_kv_overlap_score_weight",
        parsers.parse_weight,
        1.0,
        "WEIGHT",
        "cost of a prompt block to compute, relative to a block in use, which costs 1",
        live=True,
        also_borrowed=("DYN_ROUTER_PREFILL_LOAD_SCALE", "DYN_OVERLAP_SCORE_WEIGHT"),
    ),
    _dynamo(
        "router_kv_overlap_score_credit",
        parsers.parse_weight,
        1.0,
        "CREDIT",
        "share of a prompt block's cost saved when the block is cached on the device",
        live=True,
    ),
    _dynamo(
        "router_kv_overlap_score_credit_decay",
        parsers.parse_weight,
        0.0,
        "DECAY",
        "decay of the overlap credit while a worker prefills more than the others; 1 "
        "halves the credit at one prompt more",
        live=True,
    ),
    _dynamo(
        "router_decode_active_request_weight",
        parsers.parse_weight,
        0.0,
        "WEIGHT",
        "cost of each active request of a worker, in blocks",
        live=True,
    ),
    _dynamo(
        "router_host_cache_hit_weight",
        parsers.parse_share,
        0.75,
        "SHARE",
        "share of a prompt block's cost saved when the block is cached in host memory",
        live=True,
    ),
    _dynamo(
        "router_disk_cache_hit_weight",
        parsers.parse_share,
        0.25,
        "SHARE",
        "share of a prompt block's cost saved when the block is cached on disk or beyond",
        live=True,
    ),
    _dynamo(
        "router_temperature",
        parsers.parse_weight,
        0.0,
        "T",
        "0 always picks the cheapest worker; higher values sample among workers",
        live=True,
    ),
    _dynamo(
        "router_queue_threshold",
        parsers.parse_threshold,
        DEFAULT_QUEUE_THRESHOLD,
        "BATCHES",
        "prefill load, in batches, above which a worker is busy; off: a worker is never busy",
        live=True,
    ),
    _dynamo(
        "router_queue_policy",
        parsers.parse_policy,
        QueuePolicy.FCFS,
        "|".join(QueuePolicy),
        "order in which queued requests are scheduled once a worker is free",
        live=True,
    ),
    Setting(
        "router_queue_requests",
        COUNT,
        MAX_WAITING,
        "N",
        "maximum number of queued requests; further requests are answered with 503",
        live=True,
    ),
    Setting(
        "router_queue_s",
        parsers.parse_seconds,
        DEFAULT_MAX_WAIT_S,
        "SECONDS",
        "maximum time a request waits in the queue; keep it below http_handler_s, which "
        "ends the request without a reason",
        live=True,
    ),
    Setting(
        "router_disconnected_s",
        parsers.parse_grace,
        DEFAULT_DISCONNECTED_S,
        "SECONDS",
        "time a worker stays eligible after its event connection is lost; off: it stays eligible",
        live=True,
    ),
    Setting(
        "router_unconnected_s",
        parsers.parse_grace,
        OFF,
        "SECONDS",
        "time a worker stays eligible before its event connection is first made; off: it "
        "stays eligible",
        live=True,
    ),
    Setting(
        "router_retries",
        COUNT,
        MAX_RETRIES,
        "N",
        "maximum number of reservation answers kept for retries with the same Idempotency-Key",
    ),
    _dynamo(
        "router_use_kv_events",
        parsers.parse_switch,
        True,
        "BOOL",
        "whether workers publish KV events; if not, cached blocks are predicted from requests",
        also="--router-kv-events",
    ),
    _dynamo(
        "router_ttl_secs",
        parsers.parse_pause,
        DEFAULT_TTL_S,
        "SECONDS",
        "lifetime of predicted blocks when workers publish no KV events",
    ),
    _dynamo(
        "router_max_tree_size",
        parsers.parse_positive,
        DEFAULT_MAX_TREE_SIZE,
        "BLOCKS",
        "maximum number of predicted blocks per model and tenant when workers publish no KV events",
    ),
    _dynamo(
        "router_prune_target_ratio",
        parsers.parse_share,
        DEFAULT_PRUNE_TARGET_RATIO,
        "SHARE",
        "fraction of predicted blocks kept when router_max_tree_size is exceeded",
    ),
    _dynamo(
        "router_predicted_ttl_secs",
        parsers.parse_seconds,
        None,
        "SECONDS",
        "lifetime of blocks predicted in addition to KV events (default: no predictions)",
    ),
    _dynamo(
        "router_assume_kv_reuse",
        parsers.parse_switch,
        True,
        "BOOL",
        "whether requests with equal tokens share their blocks in use",
    ),
    _dynamo(
        "router_track_active_blocks",
        parsers.parse_switch,
        True,
        "BOOL",
        "whether blocks in use count in the cost",
        live=True,
    ),
    _dynamo(
        "router_track_output_blocks",
        parsers.parse_switch,
        False,
        "BOOL",
        "whether output blocks lose weight towards the expected end of a request",
    ),
    Setting(
        "session_affinity_ttl_secs",
        parsers.parse_affinity_ttl,
        None,
        "SECONDS",
        "time a session stays bound to its rank after its last request (default: sessions "
        "are not bound)",
    ),
    Setting(
        "session_affinity_sessions",
        COUNT,
        MAX_SESSIONS,
        "N",
        "maximum number of bound sessions; a further session replaces the binding that "
        "expires first",
    ),
    _dynamo(
        "router_track_prefill_tokens",
        parsers.parse_switch,
        True,
        "BOOL",
        "whether prompt tokens to compute count in the cost",
        live=True,
    ),
    Setting(
        "router_last_token",
        parsers.parse_switch,
        True,
        "BOOL",
        "whether the last prompt token and its block are computed even if they are cached",
        live=True,
    ),
    _dynamo(
        "router_event_threads",
        parsers.parse_positive,
        4,
        "N",
        "accepted without effect: one thread applies events and answers queries",
    ),
)

CONDUCTOR_SETTINGS = (
    Setting(
        "hash_seed",
        parsers.parse_u64,
        DEFAULT_SEED,
        "SEED",
        "seed of the rolling sequence hashes shared by the conductor's publishers and clients",
    ),
)

PEER_SETTINGS = (
    Setting(
        "peers",
        parsers.parse_peers,
        None,
        "URL,...",
        "indexers to recover the index from at startup",
    ),
    Setting(
        "peers_token_file",
        parsers.parse_path,
        None,
        "FILE",
        "file with a bearer token of scope admin at the peers",
    ),
    Setting(
        "recovery_delay_s",
        parsers.parse_pause,
        1.0,  # as documented: past the moment in which a new subscription misses events
        "SECONDS",
        "pause between subscribing to events and asking a peer for its dump",
    ),
    Setting(
        "recovery_connect_s",
        parsers.parse_seconds,
        RECOVERY_DEFAULTS.connect_s,
        "SECONDS",
        "time allowed to connect to a peer before the next peer is asked",
    ),
    Setting(
        "recovery_stall_s",
        parsers.parse_seconds,
        RECOVERY_DEFAULTS.stall_s,
        "SECONDS",
        "time allowed without receiving a byte of a peer's dump",
    ),
    Setting(
        "recovery_total_s",
        parsers.parse_seconds,
        RECOVERY_DEFAULTS.total_s,
        "SECONDS",
        "total time allowed for recovery from one peer",
    ),
    Setting(
        "recovery_bytes",
        parsers.within(1024 * 1024, 2**40),
        RECOVERY_DEFAULTS.body_bytes,
        "BYTES",
        "maximum size of a peer's dump",
    ),
    Setting(
        "recovery_blocks",
        COUNT,
        RECOVERY_DEFAULTS.blocks,
        "BLOCKS",
        "maximum number of blocks in a peer's dump, and of runs of blocks; a block takes "
        "16 bytes and a run 56 until stored",
    ),
)

SECURITY_SETTINGS = (
    Setting(
        "tls_certfile",
        parsers.parse_path,
        None,
        "FILE",
        "PEM certificate chain of tls: addresses",
        live=True,
    ),
    Setting(
        "tls_keyfile",
        parsers.parse_path,
        None,
        "FILE",
        "PEM private key of tls: addresses",
        live=True,
    ),
    Setting(
        "tls_client_ca",
        parsers.parse_path,
        None,
        "FILE",
        "PEM certificates of the authorities that must have signed the certificate of a "
        "client of a tls: address",
        live=True,
    ),
    Setting(
        "unix_socket_mode",
        parsers.parse_file_mode,
        "0660",
        "MODE",
        "file mode of the sockets of unix: addresses",
    ),
    Setting(
        "unix_socket_group",
        parsers.parse_group,
        None,
        "GROUP",
        "name or number of the group that owns the sockets of unix: addresses",
    ),
    Setting(
        "tokens_file",
        parsers.parse_path,
        None,
        "FILE",
        "file of bearer tokens with their scopes; every client needs one of them; see security.md",
        live=True,
    ),
    Setting(
        "allow_unauthenticated",
        parsers.parse_switch,
        False,
        "BOOL",
        "whether addresses beyond this machine may serve unauthenticated clients",
    ),
    Setting(
        "allowed_hosts",
        parsers.parse_hosts,
        None,
        "NAME,...",
        "further names of this machine that clients on its loopback interface may use",
        live=True,
    ),
    Setting(
        "allowed_origins",
        parsers.parse_origins,
        None,
        "ORIGIN,...",
        "origins of the web pages that may send requests",
        live=True,
    ),
)

FLEET_SETTINGS = (
    Setting(
        "fleet_file",
        parsers.parse_path,
        None,
        "FILE",
        "TOML file of workers, publishers and replicas; kvd applies its changes while running",
    ),
)

OUTGOING_SETTINGS = (
    Setting(
        "outgoing_allow",
        parsers.parse_outgoing,
        outgoing.DEFAULT,
        "NETWORK,...",
        "networks where engines, replicas and peers may be: networks such as 10.0.0.0/8, "
        "private, ipc",
        live=True,
    ),
    Setting(
        "outgoing_lookup_s",
        parsers.parse_seconds,
        LOOKUP_S,
        "SECONDS",
        "time allowed for one host name lookup",
        live=True,
    ),
    Setting(
        "outgoing_lookup_every_s",
        parsers.parse_seconds,
        LOOK_AGAIN_S,
        "SECONDS",
        "pause between lookups of a host name whose connection is lost",
        live=True,
    ),
)

ENGINE_SETTINGS = (
    Setting(
        "engine_heartbeat_s",
        parsers.parse_seconds,
        LINK_DEFAULTS.heartbeat_s,
        "SECONDS",
        "interval between pings of each engine and replica",
    ),
    Setting(
        "engine_heartbeat_timeout_s",
        parsers.parse_seconds,
        LINK_DEFAULTS.heartbeat_timeout_s,
        "SECONDS",
        "silence after which the connection to an engine or replica counts as lost",
    ),
    Setting(
        "engine_connect_timeout_s",
        parsers.parse_seconds,
        LINK_DEFAULTS.connect_timeout_s,
        "SECONDS",
        "time allowed to connect to an engine or replica before another attempt",
    ),
    Setting(
        "engine_handshake_timeout_s",
        parsers.parse_seconds,
        LINK_DEFAULTS.handshake_timeout_s,
        "SECONDS",
        "time allowed for the ZMTP handshake with an engine or replica",
    ),
    Setting(
        "engine_reconnect_s",
        parsers.parse_seconds,
        LINK_DEFAULTS.reconnect_s,
        "SECONDS",
        "pause before the first reconnection attempt; each failure doubles the pause",
    ),
    Setting(
        "engine_reconnect_max_s",
        parsers.parse_seconds,
        LINK_DEFAULTS.reconnect_max_s,
        "SECONDS",
        "longest pause between reconnection attempts",
    ),
    Setting(
        "engine_stale_s",
        parsers.parse_seconds,
        STALE_AFTER_S,
        "SECONDS",
        "time after which a disconnected stream is stale and a silent stream is reported",
    ),
    Setting(
        "engine_queue_messages",
        parsers.within(0, I32_MAX),
        LINK_DEFAULTS.queue_messages,
        "N",
        "maximum number of unapplied batches of an engine; further batches are dropped and "
        "leave a gap; 0: unlimited",
    ),
    Setting(
        "engine_queue_bytes",
        parsers.within(0, 2**40),
        LINK_DEFAULTS.queue_bytes,
        "BYTES",
        "maximum size of the unapplied batches of an engine, with 16 bytes added for each "
        "batch; 0: unlimited",
    ),
    Setting(
        "engine_message_bytes",
        parsers.within(64 * 1024, I32_MAX),  # the decoder takes no more
        LINK_DEFAULTS.max_message_bytes,
        "BYTES",
        "maximum size of a batch; a larger batch closes the connection",
    ),
    Setting(
        "replay_idle_s",
        parsers.parse_seconds,
        REPLAY_DEFAULTS.idle_s,
        "SECONDS",
        "time allowed between two useful batches of a replay",
        live=True,
    ),
    Setting(
        "replay_total_s",
        parsers.parse_seconds,
        REPLAY_DEFAULTS.total_s,
        "SECONDS",
        "total time allowed for a replay, including the wait for its turn",
        live=True,
    ),
    Setting(
        "replay_spare_s",
        parsers.parse_pause,
        REPLAY_DEFAULTS.spare_s,
        "SECONDS",
        "pause before an engine is asked again after a replay that brought nothing",
        live=True,
    ),
    Setting(
        "replay_messages",
        COUNT,
        REPLAY_DEFAULTS.max_messages,
        "N",
        "maximum number of messages in a replay",
        live=True,
    ),
    Setting(
        "replay_bytes",
        parsers.within(64 * 1024, 2**40),
        REPLAY_DEFAULTS.max_bytes,
        "BYTES",
        "maximum size of a replay",
        live=True,
    ),
    Setting(
        "replay_at_once",
        parsers.within(1, 4096),  # three descriptors each
        REPLAY_DEFAULTS.at_once,
        "N",
        "maximum number of concurrent replays",
        live=True,
    ),
)

INDEX_SETTINGS = (
    Setting(
        "index_max_blocks",
        parsers.within(0, 2**40),
        0,
        "BLOCKS",
        "maximum number of indexed blocks over all models and tenants, and of (rank, "
        "block) pairs; 0: unlimited",
        live=True,
    ),
    Setting(
        "max_partitions",
        COUNT,
        MAX_PARTITIONS,
        "N",
        "maximum number of (model, tenant) pairs on each face",
        live=True,
    ),
    Setting(
        "max_dumps",
        parsers.within(1, 1024),
        MAX_DUMPS,
        "N",
        "maximum number of concurrent dumps of the index",
    ),
)

CURVE_SETTINGS = (
    Setting(
        "curve_secret_key_file",
        parsers.parse_path,
        None,
        "FILE",
        "file with this process's CURVE secret key for engines and replicas (default: a "
        "fresh key at each start)",
    ),
    Setting(
        "replica_sync_client_keys",
        parsers.parse_path,
        None,
        "FILE",
        "file with the CURVE public keys of the replicas that may subscribe to requests, "
        "one per line (default: any replica may)",
    ),
)

# Heads up to these are read on the short way, whatever is said here (kvd/http/plain_head.hpp).
LEAST_HEAD_BYTES, LEAST_HEADERS = 4096, 48

HTTP_SETTINGS = (
    Setting(
        "http_connections",
        parsers.parse_positive,
        HTTP_DEFAULTS.connections,
        "N",
        "maximum number of HTTP connections per listener",
        live=True,
    ),
    Setting(
        "http_idle_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.idle_seconds,
        "SECONDS",
        "time after which an idle HTTP connection is closed",
        live=True,
    ),
    Setting(
        "http_graceful_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.graceful_seconds,
        "SECONDS",
        "time allowed for open requests to finish at shutdown",
        live=True,
    ),
    Setting(
        "http_body_bytes",
        parsers.at_least(DEFAULT_BODY_LIMIT),
        HTTP_DEFAULTS.body_bytes,
        "BYTES",
        "maximum size of the body of a query or of a worker registration; other bodies may "
        "have 2 MiB",
    ),
    Setting(
        "http_bodies_bytes",
        parsers.at_least(DEFAULT_BODY_LIMIT),
        HTTP_DEFAULTS.bodies_bytes,
        "BYTES",
        "maximum total size of the request bodies that a listener is receiving",
    ),
    Setting(
        "http_head_bytes",
        parsers.at_least(LEAST_HEAD_BYTES),
        HTTP_DEFAULTS.head_bytes,
        "BYTES",
        "maximum size of a request head",
    ),
    Setting(
        "http_headers",
        parsers.at_least(LEAST_HEADERS),
        HTTP_DEFAULTS.headers,
        "N",
        "maximum number of headers of a request",
    ),
    Setting(
        "http_url_bytes",
        parsers.at_least(LEAST_HEAD_BYTES),
        HTTP_DEFAULTS.url_bytes,
        "BYTES",
        "maximum length of the request target",
    ),
    Setting(
        "http_head_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.head_seconds,
        "SECONDS",
        "time allowed to receive a request head",
    ),
    Setting(
        "http_body_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.body_seconds,
        "SECONDS",
        "time allowed to receive a request body",
    ),
    Setting(
        "http_handler_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.handler_seconds,
        "SECONDS",
        "time allowed until the answer to a waiting request begins",
    ),
    Setting(
        "http_send_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.send_seconds,
        "SECONDS",
        "time allowed without the client reading a byte of the answer",
    ),
    Setting(
        "http_linger_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.linger_seconds,
        "SECONDS",
        "time a refused client may keep sending before its connection is closed",
    ),
)

BIND_SETTINGS = (
    Setting(
        "indexer_bind",
        parsers.parse_face_binds,
        Binds((DEFAULT_INDEXER_BIND,)),
        BINDS,
        "addresses of the KV indexer",
    ),
    Setting(
        "slot_tracker_bind",
        parsers.parse_face_binds,
        Binds((DEFAULT_SLOT_TRACKER_BIND,)),
        BINDS,
        "addresses of the slot tracker",
    ),
    Setting(
        "selection_bind",
        parsers.parse_face_binds,
        Binds((DEFAULT_SELECTION_BIND,)),
        BINDS,
        "addresses of the selection service",
    ),
    Setting(
        "conductor_bind",
        parsers.parse_face_binds,
        Binds((DEFAULT_CONDUCTOR_BIND,)),
        BINDS,
        "addresses of the conductor",
    ),
)

LOG_SETTINGS = (
    Setting(
        "log_level",
        parsers.parse_level,
        "info",
        "LEVEL",
        f"lowest level that is logged, one of {', '.join(LEVELS)}",
        live=True,
    ),
    Setting(
        "log_format",
        parsers.parse_log_form,
        "logfmt",
        "|".join(FORMS),
        "format of the log lines on stderr",
        live=True,
    ),
    Setting(
        "access_log",
        parsers.parse_switch,
        False,
        "BOOL",
        "whether kvd logs every HTTP request",
        live=True,
    ),
)

DAEMON_SETTINGS = (
    Setting(
        "min_initial_workers",
        parsers.parse_u32,
        0,
        "N",
        "number of instances that must register before kvd subscribes to any of them",
        borrowed="DYN_ROUTER_MIN_INITIAL_WORKERS",
        empty_is_wrong=True,
    ),
    Setting(
        "request_expiry_s",
        parsers.parse_positive,
        300,
        "SECONDS",
        "age at which a live request is dropped",
        borrowed="DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
        live=True,
    ),
    Setting(
        "max_requests",
        parsers.within(1, MAX_REQUESTS),
        MAX_REQUESTS,
        "N",
        "maximum number of live requests per model and tenant, on the slot tracker and on "
        "the selection service each",
    ),
    Setting(
        "max_request_blocks",
        parsers.within(1, MAX_REQUEST_BLOCKS),
        MAX_REQUEST_BLOCKS,
        "BLOCKS",
        "maximum number of blocks of live requests per model and tenant, on the slot "
        "tracker and the selection service together",
    ),
    Setting(
        "queues_messages",
        parsers.within(0, 2**40),
        MAX_QUEUED_MESSAGES,
        "N",
        "maximum number of unapplied messages of all engines and replicas; 0: unlimited",
    ),
    Setting(
        "queues_bytes",
        parsers.within(0, 2**40),
        MAX_QUEUED_BYTES,
        "BYTES",
        "maximum total size of the unapplied messages of all engines and replicas; 0: unlimited",
    ),
    Setting(
        "metrics_ranks",
        parsers.parse_u32,
        1000,
        "N",
        "largest number of registered ranks for which /metrics shows loads rank by rank",
        live=True,
    ),
)

# Those that every command has which serves a face.
FACE_SETTINGS = (*SECURITY_SETTINGS, *FLEET_SETTINGS, *OUTGOING_SETTINGS, *CURVE_SETTINGS)

# Those of `kvd select-service`, with its own names for the addresses and peers. By default it
# chooses as the original does, to the last tie.
SELECT_SERVICE_SETTINGS = (
    *REPLICA_SETTINGS,
    *(
        replace(setting, default=False) if setting.name == "router_last_token" else setting
        for setting in ROUTER_SETTINGS
    ),
    *(setting for setting in DAEMON_SETTINGS if setting.borrowed),
)

# Options of Dynamo's router that nothing here corresponds to, by flag without the dashes, and why.
# They are taken, so that one command line and one environment do for both, and warned of.
_NO_NATS = "kvd has no event store; --peers names whom to take the state from"
_NO_CACHE = "a selection is answered once; retries are by Idempotency-Key"
_NO_KEYS = "prompts are not hashed by a key"
WITHOUT_EFFECT = {
    "router-replica-sync": "replicas are named: --replica-sync-port, --replica-sync-peers",
    "kv-cache-block-size": "each worker says its block size when it is registered",
    "router-durable-kv-events": _NO_NATS,
    "router-reset-states": _NO_NATS,
    "router-snapshot-threshold": _NO_NATS,
    "event-plane": "events come over ZMQ",
    "selection-cache-ttl-secs": _NO_CACHE,
    "selection-cache-max-entries": _NO_CACHE,
    "selection-cache-max-bytes": _NO_CACHE,
    "router-tracking-hash": _NO_KEYS,
    "router-tracking-key-file": _NO_KEYS,
    "router-tracking-key-id": _NO_KEYS,
}

# What everybody sets: the help of a command shows it first, together with the flags that are no
# settings.
COMMON = "Common"

# By subject, in the order of the help, the manual and the documentation.
GROUPS = {
    COMMON: (*BIND_SETTINGS, *WORKER_SETTINGS, *LOG_SETTINGS),
    "Recovery": PEER_SETTINGS,
    "Replicas": REPLICA_SETTINGS,
    "Routing": ROUTER_SETTINGS,
    "The conductor": CONDUCTOR_SETTINGS,
    "Who may connect": SECURITY_SETTINGS,
    "The fleet file": FLEET_SETTINGS,
    "Outgoing connections": OUTGOING_SETTINGS,
    "CURVE": CURVE_SETTINGS,
    "Engines and replays": ENGINE_SETTINGS,
    "The index": INDEX_SETTINGS,
    "HTTP limits": HTTP_SETTINGS,
    "The daemon": DAEMON_SETTINGS,
}
SETTINGS = tuple(setting for group in GROUPS.values() for setting in group)
