"""Makes the values of all settings, which `sources` finds, one frozen, validated `Config`.

A setting that cannot be used is refused with one line that names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from kvd.config import tokens
from kvd.config.binds import Bind, Binds
from kvd.config.errors import StartError
from kvd.config.parsers import OFF, owner_of, served_key
from kvd.config.secret_files import read_keys, read_password, read_token
from kvd.config.settings import SETTINGS
from kvd.config.sources import (
    FACE_BINDS,
    GATEWAYS_OWN,
    TLS_FILES,
    UPSTREAM_TLS_FILES,
    read,
    reading,
)
from kvd.config.workers import StaticWorker, catalog_of, parse_workers
from kvd.errors import BadRequest
from kvd.gateway.exchanges import RelayLimits
from kvd.gateway.tunnels import UpstreamTls
from kvd.http.auth import AccessPolicy, Token
from kvd.http.limits import HttpLimits
from kvd.http.options import TlsFiles, UnixRights
from kvd.index.served_models import ServedKey
from kvd.model import PartitionKey
from kvd.net.link import LinkOptions
from kvd.net.recovery import RecoveryLimits
from kvd.net.replay import ReplayOptions
from kvd.net.replication import REPLICA_LINK
from kvd.selection.options import UNDER_WAY_BOUND, UNDER_WAY_S, RouterOptions
from kvd.selection.policies import DYNAMO_WEIGHTS, RouterPolicy
from kvd.selection.worker_record import WorkerRecord
from kvd.wire.curve import parse_keys, parse_secret
from kvd.wire.egress import AllowedNetworks, EgressPolicy
from kvd.wire.state_address import StateServer, parse_address
from kvd.wire.urls import masked
from kvd_core.selector.settings import Settings

# The original's variable, which its own end-to-end tests set to one of YES.
TEST_ENDPOINTS = "DYN_KV_INDEXER_TEST_ENDPOINTS"
Made = TypeVar("Made")

YES = ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True)
class Prepared:
    """One part of a reload: read and checked, so that nothing can keep it from taking effect."""

    changed: tuple[str, ...]  # settings whose value has changed, or the content of their file
    commit: Callable[[], None]  # makes it take effect; neither waits nor fails


@dataclass(frozen=True, slots=True)
class ReplicaSyncOptions:
    """The port that publishes this process's requests to replicas, and the replicas' endpoints."""

    host: str
    port: int
    peers: tuple[str, ...]  # ZMQ endpoints


@dataclass(frozen=True, slots=True)
class Curve:
    """The keys for ZMQ, from their files."""

    secret: str | None = field(repr=False)  # our own; None: one is made when it is needed
    # Public keys of replicas that may subscribe; None: any may, unencrypted.
    replicas: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of the daemon; a reload makes another `Config`.

    A field with the name of a setting has its value, None if it is off; `build` makes the others.
    """

    indexer_bind: Binds | None
    slot_tracker_bind: Binds | None
    selection_bind: Binds | None
    conductor_bind: Binds | None
    gateway_bind: Binds | None
    upstreams: tuple[str, ...] | None  # URLs of the engines behind the gateway
    prefills: tuple[str, ...] | None  # URLs of engines that compute prompts for those
    gateway_canary: bool  # whether engines are tested for KV events that match their tokens
    upstream_key: bytes = field(repr=False)  # shown to all engines; empty: none
    upstream_tls: UpstreamTls  # for engines with https: URLs
    gateway_remote_prefill_tokens: int
    gateway_processes: int
    gateway_kvd: tuple[str, ...] | None  # URLs of the kvds that choose; None: this process does
    gateway_kvd_s: float
    gateway_kvd_token: bytes = field(repr=False)  # shown to those kvds; empty: none
    gateway_body_bytes: int
    gateway_memory_bytes: int
    gateway_tokenize_s: float
    gateway_decision_headers: bool
    relay: RelayLimits
    tls: TlsFiles | None  # for all addresses with TLS
    unix_rights: UnixRights
    policy: AccessPolicy
    allow_unauthenticated: bool
    hash_seed: int
    router: RouterOptions
    request_expiry_s: int
    max_requests: int
    max_request_blocks: int
    metrics_ranks: int
    replica_sync: ReplicaSyncOptions | None
    workers: tuple[StaticWorker, ...]
    catalog: tuple[WorkerRecord, ...]  # those of the workers that have a URL
    peers: tuple[str, ...]  # base URLs, to be asked in this order
    peers_token: bytes = field(repr=False)  # shown to the peers; empty: none
    recovery_delay_s: float
    min_initial_workers: int
    http: HttpLimits
    engine_link: LinkOptions
    replica_link: LinkOptions
    engine_stale_s: float
    replays: ReplayOptions
    recovery: RecoveryLimits
    index_max_blocks: int
    index_chronicle: int
    max_partitions: int
    max_dumps: int
    queues_messages: int
    queues_bytes: int
    outgoing_allow: AllowedNetworks
    outgoing_lookup_s: float
    outgoing_lookup_every_s: float
    fleet_file: Path | None
    curve: Curve
    log_level: str
    log_format: str
    serve: tuple[ServedKey, ...]  # empty: everything
    owners: Mapping[ServedKey, str]
    state_dir: Path | None
    snapshot_s: float
    state_server: StateServer | None  # None: nothing is shared
    decision_log: Path | None
    decision_log_bytes: int
    decision_log_files: int
    access_log: bool
    test_endpoints: bool  # whether the indexer face can pause and resume listeners
    values: Mapping[str, Any]  # of all settings, by name, from which this was made


def unused(config: Config) -> Iterator[tuple[str, str]]:
    """Yields settings that have no effect here, each with the reason.

    They are engines where no gateway runs, and weights of Dynamo's cost function that the policy
    ignores.
    """
    for name in GATEWAYS_OWN if config.gateway_bind is None else ():
        if config.values[name]:
            yield name, "no gateway runs here: set gateway_bind, or run `kvd gateway`"
    policy = config.values["router_policy"]
    if policy.preset is RouterPolicy.DYNAMO or config.selection_bind is None:
        return
    for setting in SETTINGS:
        weighs = setting.options_class is Settings and setting.field in DYNAMO_WEIGHTS
        if weighs and config.values[setting.name] != setting.default:
            yield setting.name, f"the policy is {policy}; it weighs in dynamo only"


def load(given: Mapping[str, object], environ: Mapping[str, str]) -> Config:
    """Returns the daemon's configuration; takes and raises what `read` does."""
    return build(read(given, environ), environ)


def build(values: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Returns the configuration of these values, one for every setting; raises `StartError`."""
    plain = {each.name: _unless_off(values.get(each.name)) for each in fields(Config)}
    faces = [plain[name] for name in FACE_BINDS]
    _check_faces(plain, faces)
    outgoing = EgressPolicy(values["outgoing_allow"])
    policy = _policy(values, environ)
    link = _link(values)
    workers = _workers(values, outgoing)
    _check_used(workers, plain)
    made = {
        "tls": _tls(values, [bind for each in faces if each for bind in each.each]),
        "unix_rights": UnixRights(int(values["unix_socket_mode"], 8), values["unix_socket_group"]),
        "policy": policy,
        "router": _router(values),
        "replica_sync": _replica_sync(values, outgoing),
        "workers": workers,
        "catalog": _catalog(workers),
        "peers": _peers(values, outgoing),
        "peers_token": read_token("peers_token_file", values["peers_token_file"]),
        "gateway_kvd_token": read_token("gateway_kvd_token_file", values["gateway_kvd_token_file"]),
        "upstream_key": read_token(
            "upstream_key_file", values["upstream_key_file"], tokens.read_key
        ),
        "upstream_tls": _upstream_tls(values),
        "relay": _options(RelayLimits, values),
        "http": _options(HttpLimits, values),
        "engine_link": link,
        "replica_link": replace(
            link,
            queue_messages=values["replica_sync_queue_messages"],
            max_message_bytes=REPLICA_LINK.max_message_bytes,
        ),
        "replays": _options(ReplayOptions, values),
        "recovery": _options(RecoveryLimits, values),
        "curve": _curve(values),
        "serve": tuple(map(served_key, values["serve"] or ())),
        "owners": dict(map(owner_of, values["owners"] or ())),
        "state_server": _state_server(values),
        "test_endpoints": environ.get(TEST_ENDPOINTS, "").lower() in YES,
        "values": values,
    }
    return Config(**plain | made)


def _check_faces(plain: Mapping[str, Any], faces: list[Any]) -> None:
    """Raises `StartError` for no face, two at one address, or an engine of two kinds."""
    if not any(faces):
        raise StartError("every face is off: set an address, such as --indexer-bind 127.0.0.1:8090")
    taken: dict[str, str] = {}
    for name in FACE_BINDS:
        for bind in plain[name].each if plain[name] else ():
            other = taken.setdefault(bind.address, name)
            if other != name and not bind.address.endswith(":0"):  # the system chooses a port for 0
                raise StartError(f"{other} and {name} are both {bind.address}: change one of them")
    both = set(plain["upstreams"] or ()).intersection(plain["prefills"] or ())
    if both:
        raise StartError(f"{min(both)} is both an upstream and a prefill engine")


def _check_used(workers: Iterable[StaticWorker], plain: Mapping[str, Any]) -> None:
    """Raises `StartError` for a worker that no face would use."""
    if plain["indexer_bind"] is not None or plain["selection_bind"] is None:
        return
    for one in workers:
        if one.serves_at is None:
            raise StartError(
                "--workers: the selection service needs the URL of instance "
                f"{one.key.instance_id}: ID=ENDPOINT;http://HOST:PORT"
            )


def _options(of: Callable[..., Made], values: Mapping[str, Any], **others: Any) -> Made:
    """Returns options of a class, from the settings that are its members and from `others`."""
    own = {
        each.field: _unless_off(values[each.name]) for each in SETTINGS if each.options_class is of
    }
    return of(**own | others)


def _unless_off(value: Any) -> Any:
    return None if value is OFF else value


def _tls(values: Mapping[str, Any], binds: list[Bind]) -> TlsFiles | None:
    if not any(bind.tls for bind in binds):
        return None
    certfile, keyfile, client_ca = (values[name] for name in TLS_FILES)
    if certfile is None or keyfile is None:
        raise StartError("TLS needs both --tls-certfile and --tls-keyfile")
    return TlsFiles(certfile, keyfile, client_ca, _digests(values, TLS_FILES))


def _digests(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, bytes]:
    """Returns the digests of the files that these settings name; raises `StartError`."""
    digests = {}
    for name in names:
        if (path := values[name]) is not None:
            with reading(path, name), path.open("rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").digest()
    return digests


def _upstream_tls(values: Mapping[str, Any]) -> UpstreamTls:
    tls = _options(UpstreamTls, values)
    if (tls.certfile is None) != (tls.keyfile is None):
        raise StartError("engines need both --upstream-tls-certfile and --upstream-tls-keyfile")
    if tls.insecure and tls.ca_file is not None:
        raise StartError("--upstream-tls-insecure and --upstream-tls-ca exclude each other")
    if tls.ca_file is not None or tls.certfile is not None:
        tls = replace(tls, digests=_digests(values, UPSTREAM_TLS_FILES))
        try:
            tls.context()
        except ValueError as error:
            raise StartError(str(error)) from None
    return tls


def _policy(values: Mapping[str, Any], environ: Mapping[str, str]) -> AccessPolicy:
    path = values["tokens_file"] or tokens.credential(environ)
    known: tuple[Token, ...] = ()
    if path is not None:
        with reading(path, "tokens_file"):
            known = tokens.read(path)
    return AccessPolicy(known, values["allowed_hosts"] or (), values["allowed_origins"] or ())


def _router(values: Mapping[str, Any]) -> RouterOptions:
    if values["router_predicted_ttl_secs"] is not None and not values["router_use_kv_events"]:
        raise StartError("DYN_ROUTER_PREDICTED_TTL_SECS needs DYN_ROUTER_USE_KV_EVENTS=true")
    if values["router_track_output_blocks"] and not values["router_track_active_blocks"]:
        raise StartError("DYN_ROUTER_TRACK_OUTPUT_BLOCKS needs DYN_ROUTER_TRACK_ACTIVE_BLOCKS=true")
    policy = values["router_policy"].row
    settings = _options(Settings, values, mode=values["router_mode"].core, **policy)
    others = {"settings": settings, "max_partitions": values["max_partitions"]}
    if values["gateway_bind"] not in (None, OFF) and values["router_predicted_ttl_secs"] is None:
        others |= {"predicted_ttl_s": UNDER_WAY_S, "predicted_bound": UNDER_WAY_BOUND}
    return _options(RouterOptions, values, **others)


def _peers(values: Mapping[str, Any], outgoing: EgressPolicy) -> tuple[str, ...]:
    peers: tuple[str, ...] = values["peers"] or ()
    for url in peers:
        try:
            outgoing.check_url(url)
        except BadRequest as error:
            raise StartError(f"--peers: {error}") from None
    return peers


def _curve(values: Mapping[str, Any]) -> Curve:
    secret = read_keys("curve_secret_key_file", values["curve_secret_key_file"], parse_secret)
    name = "replica_sync_client_keys"
    replicas = read_keys(name, values[name], parse_keys)
    if replicas is not None and secret is None:
        raise StartError("--replica-sync-client-keys needs --curve-secret-key-file")
    return Curve(secret, replicas)


def _replica_sync(values: Mapping[str, Any], outgoing: EgressPolicy) -> ReplicaSyncOptions | None:
    port, peers = values["replica_sync_port"], values["replica_sync_peers"]
    if port is None:
        if peers:
            raise StartError("--replica-sync-peers needs --replica-sync-port")
        return None
    for endpoint in peers or ():
        try:
            outgoing.check_endpoint(endpoint)
        except BadRequest as error:
            raise StartError(f"--replica-sync-peers: {masked(str(error))}") from None
    return ReplicaSyncOptions(values["replica_sync_host"], port, peers or ())


def _state_server(values: Mapping[str, Any]) -> StateServer | None:
    if values["state_url"] is None:
        return None
    password = read_password("state_password_file", values["state_password_file"])
    names = "state_prefix", "state_ca_file", "state_advertise", "state_lease_s"
    prefix, ca_file, advertised, lease_s = (values[name] for name in names)
    address = parse_address(values["state_url"])
    return StateServer(address, prefix, password, ca_file, advertised, lease_s)


def _link(values: Mapping[str, Any]) -> LinkOptions:
    link = _options(LinkOptions, values)
    if link.heartbeat_timeout_s < link.heartbeat_s:
        raise StartError("engine_heartbeat_timeout_s is shorter than engine_heartbeat_s")
    if link.reconnect_max_s < link.reconnect_s:
        raise StartError("engine_reconnect_max_s is shorter than engine_reconnect_s")
    return link


def _workers(values: Mapping[str, Any], outgoing: EgressPolicy) -> tuple[StaticWorker, ...]:
    if values["workers"] is None:
        return ()
    if values["block_size"] is None:
        raise StartError("--workers needs --block-size")
    partition = PartitionKey(values["model_name"], values["tenant_id"])
    try:
        return parse_workers(values["workers"], partition, values["block_size"], outgoing)
    except ValueError as error:
        raise StartError(f"--workers: {error}") from None


def _catalog(workers: tuple[StaticWorker, ...]) -> tuple[WorkerRecord, ...]:
    try:
        return catalog_of(workers)
    except ValueError as error:
        raise StartError(f"--workers: {error}") from None
