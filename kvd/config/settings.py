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
from kvd.wire.event_stream import STALE_AFTER_S
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
        "block_size", parsers.parse_positive, None, "TOKENS", "block size of the workers given here"
    ),
    Setting("model_name", parsers.parse_name, "default", "NAME", "model of the workers given here"),
    Setting(
        "tenant_id", parsers.parse_name, DEFAULT_TENANT, "NAME", "tenant of the workers given here"
    ),
    Setting(
        "workers",
        parsers.parse_list,
        None,
        "ID[:RANK]=ENDPOINT[;REPLAY][;URL],...",
        "engines to listen to from the start, with the endpoint that replays are asked from, and "
        "the URL at which the worker serves, with which it can be selected, too",
    ),
)

REPLICA_SETTINGS = (
    Setting(
        "replica_sync_port",
        parsers.parse_replica_port,
        None,
        "PORT",
        "where requests are told to replicas of this process",
    ),
    Setting(
        "replica_sync_host",
        parsers.parse_host,
        "127.0.0.1",
        "HOST",
        "address of that port; 0.0.0.0 is every interface",
    ),
    Setting(
        "replica_sync_peers",
        parsers.parse_replica_peers,
        None,
        "ENDPOINT,...",
        "replicas to take requests from, as tcp://HOST:PORT",
    ),
    Setting(
        "replica_sync_queue_messages",
        parsers.within(0, I32_MAX),
        REPLICA_LINK.queue_messages,
        "N",
        "events queued to each replica, and from each, before some are dropped; 0 is unbounded",
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
        "who is chosen among the workers that may serve a request",
        live=True,
    ),
    _dynamo(
        "active_decode_blocks_threshold",
        parsers.parse_share_threshold,
        OFF,
        "SHARE",
        "of a worker's blocks in use, above which it gets no new work",
        live=True,
    ),
    _dynamo(
        "active_prefill_tokens_threshold",
        parsers.parse_tokens_threshold,
        OFF,
        "TOKENS",
        "being prefilled, above which a worker gets no new work",
        live=True,
    ),
    _dynamo(
        "active_prefill_tokens_threshold_frac",
        parsers.parse_threshold,
        OFF,
        "BATCHES",
        "prefill tokens, in batches, above which a worker gets no new work",
        live=True,
    ),
    _dynamo(
        "router_conditional_disagg_prefill_busy_threshold",
        parsers.parse_threshold,
        OFF,
        "BATCHES",
        "prefill tokens, in batches, above which advisory answers call a worker prefill_busy",
        live=True,
    ),
    _dynamo(
        "router_conditional_disagg_decode_busy_threshold",
        parsers.parse_threshold,
        OFF,
        "SHARE",
        "of a worker's blocks in use, above which answers call it decode_busy",
        live=True,
    ),
    _dynamo(
        "router_kv_overlap_score_weight",
        parsers.parse_weight,
        1.0,
        "WEIGHT",
        "what a prompt block to compute costs, beside 1 for a block in use",
        live=True,
        also_borrowed=("DYN_ROUTER_PREFILL_LOAD_SCALE", "DYN_OVERLAP_SCORE_WEIGHT"),
    ),
    _dynamo(
        "router_kv_overlap_score_credit",
        parsers.parse_weight,
        1.0,
        "CREDIT",
        "of a block that is saved when it is cached on the device",
        live=True,
    ),
    _dynamo(
        "router_kv_overlap_score_credit_decay",
        parsers.parse_weight,
        0.0,
        "DECAY",
        "of that credit, as a worker prefills more than the others; 1 halves it at one prompt more",
        live=True,
    ),
    _dynamo(
        "router_decode_active_request_weight",
        parsers.parse_weight,
        0.0,
        "WEIGHT",
        "what each request of a worker costs beside its blocks, in blocks",
        live=True,
    ),
    _dynamo(
        "router_host_cache_hit_weight",
        parsers.parse_share,
        0.75,
        "SHARE",
        "of a block that is saved when it is cached in host memory",
        live=True,
    ),
    _dynamo(
        "router_disk_cache_hit_weight",
        parsers.parse_share,
        0.25,
        "SHARE",
        "of a block that is saved when it is cached on disk or beyond",
        live=True,
    ),
    _dynamo(
        "router_temperature",
        parsers.parse_weight,
        0.0,
        "T",
        "0 takes the cheapest worker, more samples",
        live=True,
    ),
    _dynamo(
        "router_queue_threshold",
        parsers.parse_threshold,
        DEFAULT_QUEUE_THRESHOLD,
        "BATCHES",
        "prefill tokens, in batches, above which a worker is busy; off: none ever is",
        live=True,
    ),
    _dynamo(
        "router_queue_policy",
        parsers.parse_policy,
        QueuePolicy.FCFS,
        "|".join(QueuePolicy),
        "who goes first when all workers were busy",
        live=True,
    ),
    Setting(
        "router_queue_requests",
        COUNT,
        MAX_WAITING,
        "N",
        "selections that may wait at once; more are answered 503",
        live=True,
    ),
    Setting(
        "router_queue_s",
        parsers.parse_seconds,
        DEFAULT_MAX_WAIT_S,
        "SECONDS",
        "that a selection waits; below http_handler_s, which ends it without saying why",
        live=True,
    ),
    Setting(
        "router_disconnected_s",
        parsers.parse_grace,
        DEFAULT_DISCONNECTED_S,
        "SECONDS",
        "how long a worker is chosen still whose event connection is lost; off: as if it were not",
        live=True,
    ),
    Setting(
        "router_unconnected_s",
        parsers.parse_grace,
        OFF,
        "SECONDS",
        "the same of a connection that was never made; off: chosen all the while",
        live=True,
    ),
    Setting(
        "router_retries",
        COUNT,
        MAX_RETRIES,
        "N",
        "answers to bookings kept for whoever asks again with its Idempotency-Key",
    ),
    _dynamo(
        "router_use_kv_events",
        parsers.parse_switch,
        True,
        "BOOL",
        "whether workers say what they cache",
        also="--router-kv-events",
    ),
    _dynamo(
        "router_ttl_secs",
        parsers.parse_pause,
        DEFAULT_TTL_S,
        "SECONDS",
        "without events, how long a booked prompt is thought to be cached",
    ),
    _dynamo(
        "router_max_tree_size",
        parsers.parse_positive,
        DEFAULT_MAX_TREE_SIZE,
        "BLOCKS",
        "without events, blocks of a model and tenant thought to be cached",
    ),
    _dynamo(
        "router_prune_target_ratio",
        parsers.parse_share,
        DEFAULT_PRUNE_TARGET_RATIO,
        "SHARE",
        "of these, how many stay when there are more",
    ),
    _dynamo(
        "router_predicted_ttl_secs",
        parsers.parse_seconds,
        None,
        "SECONDS",
        "beside events, how long a booked prompt is thought to be cached (default: not)",
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
        "whether output blocks weigh less towards the expected end of a request",
    ),
    Setting(
        "session_affinity_ttl_secs",
        parsers.parse_affinity_ttl,
        None,
        "SECONDS",
        "how long a session is bound to its rank after its last request (default: not)",
    ),
    Setting(
        "session_affinity_sessions",
        COUNT,
        MAX_SESSIONS,
        "N",
        "sessions that are bound at once; more end the binding that would end next",
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
        "whether the last token of a prompt, and so its block, is computed though it is cached",
        live=True,
    ),
    _dynamo(
        "router_event_threads",
        parsers.parse_positive,
        4,
        "N",
        "without effect: one thread applies events and answers questions",
    ),
)

CONDUCTOR_SETTINGS = (
    Setting(
        "hash_seed",
        parsers.parse_u64,
        DEFAULT_SEED,
        "SEED",
        "of the rolling sequence hashes that publishers and clients of the conductor use",
    ),
)

PEER_SETTINGS = (
    Setting(
        "peers",
        parsers.parse_peers,
        None,
        "URL,...",
        "indexers to take the state from at the start",
    ),
    Setting(
        "peers_token_file",
        parsers.parse_path,
        None,
        "FILE",
        "a bearer token, with the scope admin at the peers",
    ),
    Setting(
        "recovery_delay_s",
        parsers.parse_pause,
        1.0,  # as documented: past the moment in which a new subscription misses events
        "SECONDS",
        "pause between listening and asking a peer",
    ),
    Setting(
        "recovery_connect_s",
        parsers.parse_seconds,
        RECOVERY_DEFAULTS.connect_s,
        "SECONDS",
        "until a peer is connected to, or the next one asked",
    ),
    Setting(
        "recovery_stall_s",
        parsers.parse_seconds,
        RECOVERY_DEFAULTS.stall_s,
        "SECONDS",
        "without a byte of its dump",
    ),
    Setting(
        "recovery_total_s",
        parsers.parse_seconds,
        RECOVERY_DEFAULTS.total_s,
        "SECONDS",
        "for one peer in all",
    ),
    Setting(
        "recovery_bytes",
        parsers.within(1024 * 1024, 2**40),
        RECOVERY_DEFAULTS.body_bytes,
        "BYTES",
        "of a dump",
    ),
    Setting(
        "recovery_blocks",
        COUNT,
        RECOVERY_DEFAULTS.blocks,
        "BLOCKS",
        "of a dump, and so many runs of blocks; 16 and 56 bytes each until they are stored",
    ),
)

SECURITY_SETTINGS = (
    Setting(
        "tls_certfile",
        parsers.parse_path,
        None,
        "FILE",
        "PEM certificate chain of addresses with tls:",
        live=True,
    ),
    Setting("tls_keyfile", parsers.parse_path, None, "FILE", "PEM private key of that", live=True),
    Setting(
        "tls_client_ca",
        parsers.parse_path,
        None,
        "FILE",
        "PEM certificates: on addresses with tls: clients need one that these have signed",
        live=True,
    ),
    Setting(
        "unix_socket_mode",
        parsers.parse_file_mode,
        "0660",
        "MODE",
        "of the sockets of addresses with unix:",
    ),
    Setting(
        "unix_socket_group",
        parsers.parse_group,
        None,
        "GROUP",
        "name or number of the group they belong to",
    ),
    Setting(
        "tokens_file",
        parsers.parse_path,
        None,
        "FILE",
        "bearer tokens that clients need, each with its scopes; see security.md",
        live=True,
    ),
    Setting(
        "allow_unauthenticated",
        parsers.parse_switch,
        False,
        "BOOL",
        "whether addresses beyond this machine may be open to whoever reaches them",
    ),
    Setting(
        "allowed_hosts",
        parsers.parse_hosts,
        None,
        "NAME,...",
        "names of this machine that clients of its loopback interface may use",
        live=True,
    ),
    Setting(
        "allowed_origins",
        parsers.parse_origins,
        None,
        "ORIGIN,...",
        "of pages whose requests are served",
        live=True,
    ),
)

FLEET_SETTINGS = (
    Setting(
        "fleet_file",
        parsers.parse_path,
        None,
        "FILE",
        "TOML file of workers, publishers and replicas, followed while kvd runs",
    ),
)

OUTGOING_SETTINGS = (
    Setting(
        "outgoing_allow",
        parsers.parse_outgoing,
        outgoing.DEFAULT,
        "NETWORK,...",
        "where engines, replicas and peers may be: networks as 10.0.0.0/8, private, ipc",
        live=True,
    ),
    Setting(
        "outgoing_lookup_s",
        parsers.parse_seconds,
        LOOKUP_S,
        "SECONDS",
        "that one lookup of a name may take",
        live=True,
    ),
    Setting(
        "outgoing_lookup_every_s",
        parsers.parse_seconds,
        LOOK_AGAIN_S,
        "SECONDS",
        "between two lookups of a name whose connection is lost",
        live=True,
    ),
)

ENGINE_SETTINGS = (
    Setting(
        "engine_heartbeat_s",
        parsers.parse_seconds,
        LINK_DEFAULTS.heartbeat_s,
        "SECONDS",
        "ping each engine and replica every",
    ),
    Setting(
        "engine_heartbeat_timeout_s",
        parsers.parse_seconds,
        LINK_DEFAULTS.heartbeat_timeout_s,
        "SECONDS",
        "a silent engine or replica is lost after",
    ),
    Setting(
        "engine_connect_timeout_s",
        parsers.parse_seconds,
        LINK_DEFAULTS.connect_timeout_s,
        "SECONDS",
        "until a connection to one is made, or tried again",
    ),
    Setting(
        "engine_handshake_timeout_s",
        parsers.parse_seconds,
        LINK_DEFAULTS.handshake_timeout_s,
        "SECONDS",
        "until it has answered there",
    ),
    Setting(
        "engine_reconnect_s",
        parsers.parse_seconds,
        LINK_DEFAULTS.reconnect_s,
        "SECONDS",
        "pause before another attempt, doubled with each that fails",
    ),
    Setting(
        "engine_reconnect_max_s",
        parsers.parse_seconds,
        LINK_DEFAULTS.reconnect_max_s,
        "SECONDS",
        "the longest of these pauses",
    ),
    Setting(
        "engine_stale_s",
        parsers.parse_seconds,
        STALE_AFTER_S,
        "SECONDS",
        "disconnected, after which a stream is stale, and one that says nothing is reported",
    ),
    Setting(
        "engine_queue_messages",
        parsers.within(0, I32_MAX),
        LINK_DEFAULTS.queue_messages,
        "N",
        "batches of an engine that wait to be applied; beyond it gaps; 0 is unbounded",
    ),
    Setting(
        "engine_queue_bytes",
        parsers.within(0, 2**40),
        LINK_DEFAULTS.queue_bytes,
        "BYTES",
        "that these may take, with 16 for each; 0 is unbounded",
    ),
    Setting(
        "engine_message_bytes",
        parsers.within(64 * 1024, I32_MAX),  # the decoder takes no more
        LINK_DEFAULTS.max_message_bytes,
        "BYTES",
        "of a batch; a longer one costs the connection",
    ),
    Setting(
        "replay_idle_s",
        parsers.parse_seconds,
        REPLAY_DEFAULTS.idle_s,
        "SECONDS",
        "that a replay goes on without a batch of use",
        live=True,
    ),
    Setting(
        "replay_total_s",
        parsers.parse_seconds,
        REPLAY_DEFAULTS.total_s,
        "SECONDS",
        "that it takes in all, with the wait for its turn",
        live=True,
    ),
    Setting(
        "replay_spare_s",
        parsers.parse_pause,
        REPLAY_DEFAULTS.spare_s,
        "SECONDS",
        "for which an engine is not asked again after one that brought nothing",
        live=True,
    ),
    Setting(
        "replay_messages",
        COUNT,
        REPLAY_DEFAULTS.max_messages,
        "N",
        "messages of one answer",
        live=True,
    ),
    Setting(
        "replay_bytes",
        parsers.within(64 * 1024, 2**40),
        REPLAY_DEFAULTS.max_bytes,
        "BYTES",
        "of one answer",
        live=True,
    ),
    Setting(
        "replay_at_once",
        parsers.within(1, 4096),  # three descriptors each
        REPLAY_DEFAULTS.at_once,
        "N",
        "replays under way",
        live=True,
    ),
)

INDEX_SETTINGS = (
    Setting(
        "index_max_blocks",
        parsers.within(0, 2**40),
        0,
        "BLOCKS",
        "of all models and tenants, and as many (rank, block) pairs; 0 is as many as fit",
        live=True,
    ),
    Setting(
        "max_partitions",
        COUNT,
        MAX_PARTITIONS,
        "N",
        "models and tenants that each face knows",
        live=True,
    ),
    Setting(
        "max_dumps",
        parsers.within(1, 1024),
        MAX_DUMPS,
        "N",
        "dumps of the index under way",
    ),
)

CURVE_SETTINGS = (
    Setting(
        "curve_secret_key_file",
        parsers.parse_path,
        None,
        "FILE",
        "secret key of this process, to engines and replicas that speak CURVE (default: any)",
    ),
    Setting(
        "replica_sync_client_keys",
        parsers.parse_path,
        None,
        "FILE",
        "public keys of replicas, one a line: nobody else hears of requests (default: everybody)",
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
        "HTTP connections per listener",
        live=True,
    ),
    Setting(
        "http_idle_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.idle_seconds,
        "SECONDS",
        "idle HTTP connections close after",
        live=True,
    ),
    Setting(
        "http_graceful_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.graceful_seconds,
        "SECONDS",
        "time that open requests get at shutdown",
        live=True,
    ),
    Setting(
        "http_body_bytes",
        parsers.at_least(DEFAULT_BODY_LIMIT),
        HTTP_DEFAULTS.body_bytes,
        "BYTES",
        "of a question's or workers' body; all others may have 2 MiB",
    ),
    Setting(
        "http_bodies_bytes",
        parsers.at_least(DEFAULT_BODY_LIMIT),
        HTTP_DEFAULTS.bodies_bytes,
        "BYTES",
        "of all bodies that a listener is receiving",
    ),
    Setting(
        "http_head_bytes",
        parsers.at_least(LEAST_HEAD_BYTES),
        HTTP_DEFAULTS.head_bytes,
        "BYTES",
        "of a request's head",
    ),
    Setting(
        "http_headers",
        parsers.at_least(LEAST_HEADERS),
        HTTP_DEFAULTS.headers,
        "N",
        "headers of a request",
    ),
    Setting(
        "http_url_bytes",
        parsers.at_least(LEAST_HEAD_BYTES),
        HTTP_DEFAULTS.url_bytes,
        "BYTES",
        "of its target",
    ),
    Setting(
        "http_head_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.head_seconds,
        "SECONDS",
        "from its first byte to the end of its head",
    ),
    Setting(
        "http_body_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.body_seconds,
        "SECONDS",
        "from there to the end of its body",
    ),
    Setting(
        "http_handler_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.handler_seconds,
        "SECONDS",
        "until an answer that waits for something begins",
    ),
    Setting(
        "http_send_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.send_seconds,
        "SECONDS",
        "without a client taking a byte of its answer",
    ),
    Setting(
        "http_linger_s",
        parsers.parse_seconds,
        HTTP_DEFAULTS.linger_seconds,
        "SECONDS",
        "in which a refused client may go on sending",
    ),
)

DAEMON_SETTINGS = (
    Setting(
        "min_initial_workers",
        parsers.parse_u32,
        0,
        "N",
        "instances that must be registered before any is listened to",
        borrowed="DYN_ROUTER_MIN_INITIAL_WORKERS",
        empty_is_wrong=True,
    ),
    Setting(
        "indexer_bind",
        parsers.parse_face_binds,
        Binds((DEFAULT_INDEXER_BIND,)),
        BINDS,
        "where the KV indexer listens",
    ),
    Setting(
        "slot_tracker_bind",
        parsers.parse_face_binds,
        Binds((DEFAULT_SLOT_TRACKER_BIND,)),
        BINDS,
        "where the slot tracker listens",
    ),
    Setting(
        "selection_bind",
        parsers.parse_face_binds,
        Binds((DEFAULT_SELECTION_BIND,)),
        BINDS,
        "where the selection service listens",
    ),
    Setting(
        "conductor_bind",
        parsers.parse_face_binds,
        Binds((DEFAULT_CONDUCTOR_BIND,)),
        BINDS,
        "where the conductor listens",
    ),
    Setting(
        "request_expiry_s",
        parsers.parse_positive,
        300,
        "SECONDS",
        "a request is forgotten when it is older than",
        borrowed="DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
        live=True,
    ),
    Setting(
        "max_requests",
        parsers.within(1, MAX_REQUESTS),
        MAX_REQUESTS,
        "N",
        "live requests of a model and tenant, on the slot tracker, and on the selection service",
    ),
    Setting(
        "max_request_blocks",
        parsers.within(1, MAX_REQUEST_BLOCKS),
        MAX_REQUEST_BLOCKS,
        "BLOCKS",
        "of these, on both together",
    ),
    Setting(
        "queues_messages",
        parsers.within(0, 2**40),
        MAX_QUEUED_MESSAGES,
        "N",
        "messages of all engines and replicas that wait; 0 is unbounded",
    ),
    Setting(
        "queues_bytes",
        parsers.within(0, 2**40),
        MAX_QUEUED_BYTES,
        "BYTES",
        "that these may take; 0 is unbounded",
    ),
    Setting(
        "metrics_ranks",
        parsers.parse_u32,
        1000,
        "N",
        "/metrics shows loads rank by rank while no more ranks are registered than",
        live=True,
    ),
    Setting(
        "log_level", parsers.parse_level, "info", "LEVEL", f"one of {', '.join(LEVELS)}", live=True
    ),
    Setting(
        "log_format",
        parsers.parse_log_form,
        "logfmt",
        "|".join(FORMS),
        "form of the lines on stderr",
        live=True,
    ),
    Setting(
        "access_log",
        parsers.parse_switch,
        False,
        "BOOL",
        "whether each HTTP request is a line of the log",
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

GROUPS = {
    "Workers known from the start": WORKER_SETTINGS,
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
