"""The settings of the daemon, one row each: its name, how its text is read, its default.

`--indexer-bind` of the command line is `KVD_INDEXER_BIND` in the environment and `indexer_bind`
in the configuration file and in code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.errors import BadRequest
from kvd.http.limits import HttpLimits
from kvd.logs import LEVELS
from kvd.model import DEFAULT_TENANT
from kvd.peers import MAX_PEERS
from kvd.scheduling.options import (
    DEFAULT_MAX_TREE_SIZE,
    DEFAULT_PRUNE_TARGET_RATIO,
    DEFAULT_QUEUE_THRESHOLD,
    DEFAULT_TTL_S,
    RouterMode,
)
from kvd.scheduling.queue import QueuePolicy
from kvd.wire.endpoints import check_replica_endpoint
from kvd_core.conductor import DEFAULT_SEED
from kvd_core.selector import MAX_ISL_TOKENS
from kvd_core.selector_settings import MAX_WEIGHT

ENV_PREFIX = "KVD_"

U16_MAX = 2**16 - 1
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
U64_DIGITS = 20  # more digits are refused unread: int() of a long text is slow


@dataclass(frozen=True, slots=True)
class TcpBind:
    """A listening TCP address; port 0 lets the system choose one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixBind:
    """A listening unix-domain socket."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


Bind = TcpBind | UnixBind

OFF = "off"  # the bind of a face that is not to be served

# The ports of the originals, on loopback only.
DEFAULT_INDEXER_BIND = TcpBind("127.0.0.1", 8090)
DEFAULT_SLOT_TRACKER_BIND = TcpBind("127.0.0.1", 8091)
DEFAULT_SELECTION_BIND = TcpBind("127.0.0.1", 8092)
DEFAULT_CONDUCTOR_BIND = TcpBind("127.0.0.1", 13333)


def parse_bind(text: str) -> Bind:
    """Reads `HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`; ValueError says what is wrong."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path or "\0" in path:
            raise ValueError("the path of the unix socket is missing")
        return UnixBind(path)
    return parse_tcp_bind(text)


def parse_face_bind(text: str) -> Bind | str:
    """Reads a bind, or OFF."""
    return OFF if text == OFF else parse_bind(text)


def parse_tcp_bind(text: str) -> TcpBind:
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address needs brackets: [::1]:8090")
    if not colon or not host:
        raise ValueError("expected HOST:PORT or unix:PATH")
    return TcpBind(host, parse_port(port))


def parse_uint(text: str, maximum: int) -> int:
    """Reads plain decimal digits, 0 to `maximum`; no sign, blank or underscore."""
    if not (text.isascii() and text.isdigit() and len(text) <= U64_DIGITS) or int(text) > maximum:
        raise ValueError(f"expected a whole number from 0 to {maximum}")
    return int(text)


def parse_port(text: str) -> int:
    return parse_uint(text, U16_MAX)


def parse_u32(text: str) -> int:
    return parse_uint(text, U32_MAX)


def parse_u64(text: str) -> int:
    return parse_uint(text, U64_MAX)


def parse_positive(text: str) -> int:
    if (number := parse_u32(text)) == 0:
        raise ValueError("expected a number greater than 0")
    return number


def parse_seconds(text: str) -> float:
    """Reads a duration in seconds, from a millisecond to a day."""
    seconds = float(text)
    if not 0.001 <= seconds <= 86400:
        raise ValueError("expected seconds, from 0.001 to 86400")
    return seconds


def parse_pause(text: str) -> float:
    """Reads a duration in seconds, from none to an hour."""
    seconds = float(text)
    if not 0 <= seconds <= 3600:
        raise ValueError("expected seconds, from 0 to 3600")
    return seconds


def parse_affinity_ttl(text: str) -> int:
    """Reads a whole number of seconds, from one to a year."""
    seconds = parse_u32(text)
    if not 1 <= seconds <= 31_536_000:
        raise ValueError("expected seconds, from 1 to 31536000")
    return seconds


def parse_weight(text: str) -> float:
    """Reads a weight or threshold, 0 or more."""
    weight = float(text)
    if not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(f"expected a number from 0 to {MAX_WEIGHT:g}")
    return weight


def parse_share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise ValueError("expected a number from 0 to 1")
    return share


def parse_threshold(text: str) -> float | str:
    """Reads a threshold, or OFF, which the originals write as None."""
    return OFF if text.lower() in (OFF, "none") else parse_weight(text)


def parse_switch(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected true or false")


def parse_policy(text: str) -> QueuePolicy:
    try:
        return QueuePolicy(text.lower())
    except ValueError:
        raise ValueError(f"expected one of {', '.join(QueuePolicy)}") from None


def parse_mode(text: str) -> RouterMode:
    try:
        return RouterMode(text.lower())
    except ValueError:
        raise ValueError(f"expected one of {', '.join(RouterMode)}") from None


def parse_share_threshold(text: str) -> float | str:
    """Reads a threshold from 0 to 1, or OFF."""
    return OFF if text.lower() in (OFF, "none") else parse_share(text)


def parse_tokens_threshold(text: str) -> int | str:
    """Reads a number of tokens, or OFF."""
    return OFF if text.lower() in (OFF, "none") else parse_uint(text, MAX_ISL_TOKENS)


def parse_level(text: str) -> str:
    if text.lower() not in LEVELS:
        raise ValueError(f"expected one of {', '.join(LEVELS)}")
    return text.lower()


def parse_list(text: str) -> tuple[str, ...]:
    """Splits at commas; blanks around and between do not count."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def parse_urls(text: str) -> tuple[str, ...]:
    """Splits, and counts each but once."""
    urls = tuple(dict.fromkeys(parse_list(text)))
    if len(urls) > MAX_PEERS:
        raise ValueError(f"more than {MAX_PEERS} peers")
    return urls


def parse_replica_port(text: str) -> int:
    if (port := parse_port(text)) == 0:
        raise ValueError("expected a port from 1 to 65535: replicas have to know it")
    return port


def parse_replica_peers(text: str) -> tuple[str, ...]:
    """Splits like parse_urls and checks every endpoint."""
    endpoints = parse_urls(text)
    for endpoint in endpoints:
        try:
            check_replica_endpoint(endpoint)
        except BadRequest as error:
            raise ValueError(str(error)) from None
    return endpoints


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table: how a text becomes a value, and what holds when nobody says.

    `borrowed` is the variable of a setting that other programs of the fleet read as well;
    `empty_is_wrong` if those refuse an empty one, which otherwise counts as unset. `live` if a
    reload changes it in a running daemon.
    """

    name: str
    parse: Callable[[str], Any]
    default: object
    metavar: str
    help: str
    borrowed: str | None = None
    empty_is_wrong: bool = False
    live: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def many(self) -> bool:
        """Whether it takes several values, which a flag separates by commas."""
        return self.metavar.endswith(",...")

    @property
    def variable(self) -> str:
        return self.borrowed or ENV_PREFIX + self.name.upper()


HTTP_DEFAULTS = HttpLimits()

WORKER_SETTINGS = (
    Setting("block_size", parse_u32, None, "TOKENS", "block size of the workers given here"),
    Setting("model_name", str, "default", "NAME", "model of the workers given here"),
    Setting("tenant_id", str, DEFAULT_TENANT, "NAME", "tenant of the workers given here"),
    Setting(
        "workers",
        parse_list,
        None,
        "ID[:RANK]=ENDPOINT,...",
        "engines to listen to from the start",
    ),
)

REPLICA_SETTINGS = (
    Setting(
        "replica_sync_port",
        parse_replica_port,
        None,
        "PORT",
        "where requests are told to replicas of this process",
    ),
    Setting(
        "replica_sync_host",
        str,
        "127.0.0.1",
        "HOST",
        "address of that port; 0.0.0.0 is every interface",
    ),
    Setting(
        "replica_sync_peers",
        parse_replica_peers,
        None,
        "ENDPOINT,...",
        "replicas to take requests from, as tcp://HOST:PORT",
    ),
)

ROUTER_SETTINGS = (
    Setting(
        "router_mode",
        parse_mode,
        RouterMode.KV,
        "|".join(RouterMode),
        "who is chosen among the workers that may serve a request",
        borrowed="DYN_ROUTER_MODE",
    ),
    Setting(
        "active_decode_blocks_threshold",
        parse_share_threshold,
        OFF,
        "SHARE",
        "of a worker's blocks in use, above which it gets no new work",
        borrowed="DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
    ),
    Setting(
        "active_prefill_tokens_threshold",
        parse_tokens_threshold,
        OFF,
        "TOKENS",
        "being prefilled, above which a worker gets no new work",
        borrowed="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
    ),
    Setting(
        "active_prefill_tokens_threshold_frac",
        parse_threshold,
        OFF,
        "BATCHES",
        "prefill tokens, in batches, above which a worker gets no new work",
        borrowed="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
    ),
    Setting(
        "router_kv_overlap_score_weight",
        parse_weight,
        1.0,
        "WEIGHT",
        "what a prompt block to compute costs, beside 1 for a block in use",
        borrowed="DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
        live=True,
    ),
    Setting(
        "router_host_cache_hit_weight",
        parse_share,
        0.75,
        "SHARE",
        "of a block that is saved when it is cached in host memory",
        borrowed="DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
        live=True,
    ),
    Setting(
        "router_disk_cache_hit_weight",
        parse_share,
        0.25,
        "SHARE",
        "of a block that is saved when it is cached on disk or beyond",
        borrowed="DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
        live=True,
    ),
    Setting(
        "router_temperature",
        parse_weight,
        0.0,
        "T",
        "0 takes the cheapest worker, more samples",
        borrowed="DYN_ROUTER_TEMPERATURE",
        live=True,
    ),
    Setting(
        "router_queue_threshold",
        parse_threshold,
        DEFAULT_QUEUE_THRESHOLD,
        "BATCHES",
        "prefill tokens, in batches, above which a worker is busy; off: none ever is",
        borrowed="DYN_ROUTER_QUEUE_THRESHOLD",
        live=True,
    ),
    Setting(
        "router_queue_policy",
        parse_policy,
        QueuePolicy.FCFS,
        "|".join(QueuePolicy),
        "who goes first when all workers were busy",
        borrowed="DYN_ROUTER_QUEUE_POLICY",
        live=True,
    ),
    Setting(
        "router_use_kv_events",
        parse_switch,
        True,
        "BOOL",
        "whether workers say what they cache",
        borrowed="DYN_ROUTER_USE_KV_EVENTS",
    ),
    Setting(
        "router_ttl_secs",
        parse_pause,
        DEFAULT_TTL_S,
        "SECONDS",
        "without events, how long a booked prompt is thought to be cached",
        borrowed="DYN_ROUTER_TTL_SECS",
    ),
    Setting(
        "router_max_tree_size",
        parse_positive,
        DEFAULT_MAX_TREE_SIZE,
        "BLOCKS",
        "without events, blocks of a model and tenant thought to be cached",
        borrowed="DYN_ROUTER_MAX_TREE_SIZE",
    ),
    Setting(
        "router_prune_target_ratio",
        parse_share,
        DEFAULT_PRUNE_TARGET_RATIO,
        "SHARE",
        "of these, how many stay when there are more",
        borrowed="DYN_ROUTER_PRUNE_TARGET_RATIO",
    ),
    Setting(
        "router_predicted_ttl_secs",
        parse_seconds,
        None,
        "SECONDS",
        "beside events, how long a booked prompt is thought to be cached (default: not)",
        borrowed="DYN_ROUTER_PREDICTED_TTL_SECS",
    ),
    Setting(
        "router_assume_kv_reuse",
        parse_switch,
        True,
        "BOOL",
        "whether requests with equal tokens share their blocks in use",
        borrowed="DYN_ROUTER_ASSUME_KV_REUSE",
    ),
    Setting(
        "router_track_active_blocks",
        parse_switch,
        True,
        "BOOL",
        "whether blocks in use count in the cost",
        borrowed="DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
        live=True,
    ),
    Setting(
        "router_track_output_blocks",
        parse_switch,
        False,
        "BOOL",
        "whether output blocks weigh less towards the expected end of a request",
        borrowed="DYN_ROUTER_TRACK_OUTPUT_BLOCKS",
    ),
    Setting(
        "session_affinity_ttl_secs",
        parse_affinity_ttl,
        None,
        "SECONDS",
        "how long a session is bound to its rank after its last request (default: not)",
    ),
    Setting(
        "router_track_prefill_tokens",
        parse_switch,
        True,
        "BOOL",
        "whether prompt tokens to compute count in the cost",
        borrowed="DYN_ROUTER_TRACK_PREFILL_TOKENS",
        live=True,
    ),
    Setting(
        "router_event_threads",
        parse_positive,
        4,
        "N",
        "without effect: one thread applies events and answers questions",
        borrowed="DYN_ROUTER_EVENT_THREADS",
    ),
)

CONDUCTOR_SETTINGS = (
    Setting(
        "hash_seed",
        parse_u64,
        DEFAULT_SEED,
        "SEED",
        "of the rolling sequence hashes that publishers and clients of the conductor use",
    ),
)

PEER_SETTINGS = (
    Setting("peers", parse_urls, None, "URL,...", "indexers to take the state from at the start"),
)

DAEMON_SETTINGS = (
    Setting(
        "min_initial_workers",
        parse_u32,
        0,
        "N",
        "instances that must be registered before any is listened to",
        borrowed="DYN_ROUTER_MIN_INITIAL_WORKERS",
        empty_is_wrong=True,
    ),
    Setting(
        "recovery_delay_s",
        parse_pause,
        1.0,  # as documented: past the moment in which a new subscription misses events
        "SECONDS",
        "pause between listening and asking a peer",
    ),
    Setting(
        "indexer_bind",
        parse_face_bind,
        DEFAULT_INDEXER_BIND,
        "HOST:PORT|unix:PATH|off",
        "where the KV indexer listens",
    ),
    Setting(
        "slot_tracker_bind",
        parse_face_bind,
        DEFAULT_SLOT_TRACKER_BIND,
        "HOST:PORT|unix:PATH|off",
        "where the slot tracker listens",
    ),
    Setting(
        "selection_bind",
        parse_face_bind,
        DEFAULT_SELECTION_BIND,
        "HOST:PORT|unix:PATH|off",
        "where the selection service listens",
    ),
    Setting(
        "conductor_bind",
        parse_face_bind,
        DEFAULT_CONDUCTOR_BIND,
        "HOST:PORT|unix:PATH|off",
        "where the conductor listens",
    ),
    Setting(
        "request_expiry_s",
        parse_positive,
        300,
        "SECONDS",
        "a request is forgotten when it is older than",
        borrowed="DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
        live=True,
    ),
    Setting(
        "metrics_ranks",
        parse_u32,
        1000,
        "N",
        "/metrics shows loads rank by rank while no more ranks are registered than",
        live=True,
    ),
    Setting("indexer_tls_bind", parse_tcp_bind, None, "HOST:PORT", "where it listens with TLS"),
    Setting("tls_certfile", Path, None, "FILE", "PEM certificate chain for TLS"),
    Setting("tls_keyfile", Path, None, "FILE", "PEM private key for TLS"),
    Setting(
        "http_connections",
        parse_positive,
        HTTP_DEFAULTS.connections,
        "N",
        "HTTP connections per listener",
        live=True,
    ),
    Setting(
        "http_idle_s",
        parse_seconds,
        HTTP_DEFAULTS.idle_seconds,
        "SECONDS",
        "idle HTTP connections close after",
        live=True,
    ),
    Setting(
        "http_graceful_s",
        parse_seconds,
        HTTP_DEFAULTS.graceful_seconds,
        "SECONDS",
        "time that open requests get at shutdown",
        live=True,
    ),
    Setting("engine_heartbeat_s", parse_seconds, 5.0, "SECONDS", "ping each engine every"),
    Setting(
        "engine_heartbeat_timeout_s",
        parse_seconds,
        15.0,
        "SECONDS",
        "a silent engine is lost after",
    ),
    Setting(
        "engine_queue_messages",
        parse_u32,
        100_000,  # ZMQ's 1,000 lost 93,500 of a burst of 100,001, this none
        "N",
        "batches queued per engine before ZMQ drops; 0 is unbounded",
    ),
    Setting("log_level", parse_level, "info", "LEVEL", f"one of {', '.join(LEVELS)}", live=True),
)

SETTINGS = (
    WORKER_SETTINGS
    + PEER_SETTINGS
    + REPLICA_SETTINGS
    + ROUTER_SETTINGS
    + CONDUCTOR_SETTINGS
    + DAEMON_SETTINGS
)
