"""Turns flags, environment and file into one frozen, validated `Config`.

The command line wins over the environment, the environment over the file, the file over the
default; an empty variable counts as unset. What cannot be used is refused with one line that names
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import file_digest
from pathlib import Path
from stat import S_IROTH, S_IXOTH
from typing import Any, ClassVar, TypeVar, cast

from kvd.config import file as configfile
from kvd.config import tokens
from kvd.config.parsers import (
    ENV_PREFIX,
    OFF,
    U32_MAX,
    U64_MAX,
    Bind,
    Binds,
    Setting,
    parse_uint,
)
from kvd.config.settings import SETTINGS, WITHOUT_EFFECT
from kvd.errors import BadRequest
from kvd.http.auth import Policy, Token
from kvd.http.limits import HttpLimits
from kvd.http.options import TlsFiles, UnixRights
from kvd.model import PartitionKey, RankKey
from kvd.net.link import LinkOptions
from kvd.net.recovery import RecoveryLimits
from kvd.net.replay import ReplayOptions
from kvd.net.replication import REPLICA_LINK
from kvd.selection.options import THRESHOLDS, RouterOptions
from kvd.selection.worker_record import WorkerRecord
from kvd.wire.curve import MAX_KEYS_BYTES, parse_keys, parse_secret
from kvd.wire.egress import AllowedNetworks, EgressPolicy
from kvd.wire.urls import masked, parse_url
from kvd_core.selector.settings import Settings

# The original's name and spellings for what its own end-to-end tests switch on.
TEST_ENDPOINTS = "DYN_KV_INDEXER_TEST_ENDPOINTS"
Parsed = TypeVar("Parsed")

FACE_BINDS = ("indexer_bind", "slot_tracker_bind", "selection_bind", "conductor_bind")
YES = ("1", "true", "yes", "on")

# Files of TLS, by the names of their settings.
TLS_FILES = ("tls_certfile", "tls_keyfile", "tls_client_ca")

# Files of secrets, by the names of their settings.
SECRETS = ("tokens_file", "tls_keyfile", "curve_secret_key_file", "peers_token_file")

# The configuration file: what the command line calls it, and its variable.
CONFIG = "config"
DEFAULTS = "defaults"
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
SERVICE_FILE = Path("/etc/kvd/kvd.toml")  # that of systemd/kvd.service


class StartError(Exception):
    """kvd cannot start; the text is the one line that the operator reads."""

    exit_code: ClassVar[int] = os.EX_CONFIG  # it will not, unless somebody mends what it was told


class AddressError(StartError):
    """kvd cannot listen where it was told to; the next try may find the address free, or there."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """One part of a reload: read and checked, so that nothing can keep it from holding any more."""

    changed: tuple[str, ...]  # settings of which the value, or what is in the file, is another one
    commit: Callable[[], None]  # has it hold; neither waits nor fails


@dataclass(frozen=True, slots=True)
class ReplicaSync:
    """Where this process tells its replicas about requests, and where it hears of theirs."""

    host: str
    port: int
    peers: tuple[str, ...]  # ZMQ endpoints


@dataclass(frozen=True, slots=True)
class Curve:
    """Keys on ZMQ, as their files say."""

    secret: str | None = field(repr=False)  # our own; None makes one when it is needed
    # Public keys of who may subscribe; None is anybody, unencrypted.
    replicas: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class StaticWorker:
    """A registration made before the ports open."""

    key: RankKey
    endpoint: str
    block_size: int  # tokens per block
    replay_endpoint: str | None = None
    serves_at: str | None = None  # URL; with one it is in the selection service's catalog, too


@dataclass(frozen=True, slots=True)
class Config:
    """Everything the daemon is told; a reload makes another one."""

    indexer_bind: Binds | None  # None: not served
    slot_tracker_bind: Binds | None
    selection_bind: Binds | None
    conductor_bind: Binds | None
    tls: TlsFiles | None  # of all binds that want it
    unix_rights: UnixRights
    policy: Policy
    allow_unauthenticated: bool
    hash_seed: int  # of sequence hashes
    router: RouterOptions
    request_expiry_s: int
    max_requests: int  # live, of a model and tenant on each face
    max_request_blocks: int  # of these
    metrics_ranks: int  # shown one by one up to this number
    replica_sync: ReplicaSync | None
    workers: tuple[StaticWorker, ...]
    catalog: tuple[WorkerRecord, ...]  # those of the workers that say where they serve
    peers: tuple[str, ...]  # base URLs, to be asked in this order
    peers_token: bytes = field(repr=False)  # shown to them; empty: none
    recovery_delay_s: float
    min_initial_workers: int  # instances; 0 waits for none
    http: HttpLimits
    engine_link: LinkOptions
    replica_link: LinkOptions
    stale_after_s: float  # disconnected
    replays: ReplayOptions
    recovery: RecoveryLimits
    index_max_blocks: int  # of all partitions; 0 is no bound
    max_partitions: int  # of each face
    max_dumps: int
    queues_messages: int  # of all engines and replicas; 0 is no bound
    queues_bytes: int
    outgoing: AllowedNetworks
    lookup_s: float
    lookup_every_s: float
    fleet_file: Path | None
    curve: Curve
    log_level: str
    log_format: str
    access_log: bool
    test_endpoints: bool  # whether the indexer face can pause and resume listeners
    values: Mapping[str, Any]  # of all settings, by name: what this was made of


@dataclass(frozen=True, slots=True)
class Said:
    """What holds for one setting, and who says so."""

    value: Any  # typed by the table's own parse function
    source: str


def resolve(given: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, Said]:
    """Returns what holds for every setting; raises `StartError` with the one line that explains.

    `given` holds what the command line said, parsed already, by setting name; None is unsaid. A
    command has defaults of its own under DEFAULTS.
    """
    path, filed = _file(given, environ)
    return {each.name: _resolve(each, given, environ, path, filed) for each in SETTINGS}


def read(given: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the value of every setting; takes and raises what `resolve` does.

    Raises StartError also for files of TLS without an address that has it. Those that a flag names
    need one of this command's. Those of a file or of the environment, which commands share, may be
    for an address there that this command does not serve.
    """
    path, filed = _file(given, environ)
    values = {each.name: _resolve(each, given, environ, path, filed).value for each in SETTINGS}
    if any(values[name] is not None for name in TLS_FILES):
        binds = [values[name] for name in FACE_BINDS]
        if all(given.get(name) is None for name in TLS_FILES):
            faces = [each for each in SETTINGS if each.name in FACE_BINDS]
            binds += [_resolve(each, {}, environ, path, filed).value for each in faces]
        if not any(bind.tls for each in binds if each != OFF for bind in each.each):
            raise StartError(
                "TLS needs an address: --indexer-bind tls:HOST:PORT, or another face's"
            )
    return values


def _file(
    given: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[Path | None, dict[str, Any]]:
    """Returns the file of settings and what it says, if there is one."""
    name = given.get(CONFIG) or environ.get(CONFIG_VARIABLE)
    if not name:
        return None, {}
    path = Path(str(name))
    with reading(path):
        return path, configfile.read(path)


@contextmanager
def reading(path: Path, name: str | None = None) -> Iterator[None]:
    """Names the file in what is wrong with it, and the setting of a file that is not there."""
    try:
        yield
    except OSError as error:
        by = "" if name is None else f"{name}: "
        raise StartError(f"{by}cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise StartError(f"{path}: {error}") from None


def _resolve(
    setting: Setting,
    given: Mapping[str, object],
    environ: Mapping[str, str],
    path: Path | None,
    filed: Mapping[str, Any],
) -> Said:
    if (said := given.get(setting.name)) is not None:
        return Said(said, setting.flag)
    texts = {
        name: text
        for name in setting.variables
        if (text := environ.get(name)) is not None and (text or setting.empty_is_wrong)
    }
    if len(set(texts.values())) > 1:
        raise StartError(f"{' and '.join(texts)} are one setting and differ")
    for variable, text in texts.items():
        try:
            return Said(setting.parse(text), variable)
        except ValueError as error:
            said, why = masked(text), masked(str(error))
            raise StartError(f"{variable}={said!r}: {why}") from None
    if setting.name in filed:
        return Said(filed[setting.name], str(path))
    own = cast("Mapping[str, object]", given.get(DEFAULTS, {}))
    return Said(own.get(setting.name, setting.default), "default")


def without_effect(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields variables of Dynamo's router that change nothing here, each with the reason."""
    known = {variable for setting in SETTINGS for variable in setting.variables}
    reasons = {"DYN_" + flag.upper().replace("-", "_"): why for flag, why in WITHOUT_EFFECT.items()}
    for name in environ:
        if name in reasons:
            yield name, reasons[name]
        elif name.startswith("DYN_ROUTER_") and name not in known:
            yield name, "kvd does not know it"


def load(given: Mapping[str, object], environ: Mapping[str, str]) -> Config:
    """Returns the daemon's configuration; takes and raises what `read` does."""
    return build(read(given, environ), environ)


def build(values: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Returns the configuration of these values, one for every setting; raises `StartError`."""
    outgoing = EgressPolicy(values["outgoing_allow"])
    binds = {name: None if values[name] == OFF else values[name] for name in FACE_BINDS}
    if not any(binds.values()):
        raise StartError("every face is off")
    policy = _policy(values, environ)
    link = _link(values)
    workers = _workers(values, outgoing)
    if binds["indexer_bind"] is None and binds["selection_bind"] is not None:
        for one in workers:
            if one.serves_at is None:  # nobody would have it
                raise StartError(
                    "--workers: the selection service needs to know where instance "
                    f"{one.key.instance_id} serves: ID=ENDPOINT;http://HOST:PORT"
                )
    return Config(
        **binds,
        hash_seed=values["hash_seed"],
        tls=_tls(values, [bind for each in binds.values() if each for bind in each.each]),
        unix_rights=UnixRights(int(values["unix_socket_mode"], 8), values["unix_socket_group"]),
        policy=policy,
        allow_unauthenticated=values["allow_unauthenticated"],
        router=_router(values),
        request_expiry_s=values["request_expiry_s"],
        max_requests=values["max_requests"],
        max_request_blocks=values["max_request_blocks"],
        metrics_ranks=values["metrics_ranks"],
        replica_sync=_replica_sync(values, outgoing),
        workers=workers,
        catalog=_catalog(workers),
        peers=_peers(values, outgoing),
        peers_token=read_token("peers_token_file", values["peers_token_file"]),
        recovery_delay_s=values["recovery_delay_s"],
        min_initial_workers=values["min_initial_workers"],
        http=HttpLimits(
            head_bytes=values["http_head_bytes"],
            headers=values["http_headers"],
            url_bytes=values["http_url_bytes"],
            connections=values["http_connections"],
            body_bytes=values["http_body_bytes"],
            bodies_bytes=values["http_bodies_bytes"],
            head_seconds=values["http_head_s"],
            body_seconds=values["http_body_s"],
            handler_seconds=values["http_handler_s"],
            send_seconds=values["http_send_s"],
            idle_seconds=values["http_idle_s"],
            linger_seconds=values["http_linger_s"],
            graceful_seconds=values["http_graceful_s"],
        ),
        engine_link=link,
        replica_link=replace(
            link,
            queue_messages=values["replica_sync_queue_messages"],
            max_message_bytes=REPLICA_LINK.max_message_bytes,
        ),
        stale_after_s=values["engine_stale_s"],
        replays=_replays(values),
        recovery=RecoveryLimits(
            connect_s=values["recovery_connect_s"],
            stall_s=values["recovery_stall_s"],
            total_s=values["recovery_total_s"],
            body_bytes=values["recovery_bytes"],
            blocks=values["recovery_blocks"],
        ),
        index_max_blocks=values["index_max_blocks"],
        max_partitions=values["max_partitions"],
        max_dumps=values["max_dumps"],
        queues_messages=values["queues_messages"],
        queues_bytes=values["queues_bytes"],
        outgoing=outgoing.allowed,
        lookup_s=values["outgoing_lookup_s"],
        lookup_every_s=values["outgoing_lookup_every_s"],
        fleet_file=values["fleet_file"],
        curve=_curve(values),
        log_level=values["log_level"],
        log_format=values["log_format"],
        access_log=values["access_log"],
        test_endpoints=environ.get(TEST_ENDPOINTS, "").lower() in YES,
        values=values,
    )


def _tls(values: Mapping[str, Any], binds: list[Bind]) -> TlsFiles | None:
    if not any(bind.tls for bind in binds):
        return None
    certfile, keyfile, client_ca = (values[name] for name in TLS_FILES)
    if certfile is None or keyfile is None:
        raise StartError("TLS needs both --tls-certfile and --tls-keyfile")
    digests = {}
    for name in TLS_FILES:
        if (path := values[name]) is not None:
            with reading(path, name), path.open("rb") as file:
                digests[name] = file_digest(file, "sha256").digest()
    return TlsFiles(certfile, keyfile, client_ca, digests)


def _policy(values: Mapping[str, Any], environ: Mapping[str, str]) -> Policy:
    path = values["tokens_file"] or tokens.credential(environ)
    known: tuple[Token, ...] = ()
    if path is not None:
        with reading(path, "tokens_file"):
            known = tokens.read(path)
    return Policy(known, values["allowed_hosts"] or (), values["allowed_origins"] or ())


def read_token(name: str, path: Path | None) -> bytes:
    """Returns the token that is alone in a file, none without one; raises `StartError`."""
    if path is None:
        return b""
    with reading(path, name):
        return tokens.read_one(path)


def exposed_secrets(config: Config) -> list[Path]:
    """Returns the files of secrets that everybody on this machine may read."""
    return [path for name in SECRETS if (path := config.values[name]) and _readable_by_all(path)]


def _readable_by_all(path: Path) -> bool:
    try:
        whole = path.resolve()
        folders = [each.stat().st_mode for each in whole.parents]
        return bool(whole.stat().st_mode & S_IROTH) and all(each & S_IXOTH for each in folders)
    except OSError:
        return False  # gone since it was read, or closed to us: reading it says so


def _unless_off(value: Any) -> Any:
    return None if value == OFF else value


def _router(values: Mapping[str, Any]) -> RouterOptions:
    if values["router_predicted_ttl_secs"] is not None and not values["router_use_kv_events"]:
        raise StartError("predictions beside KV events need these: DYN_ROUTER_PREDICTED_TTL_SECS")
    if values["router_track_output_blocks"] and not values["router_track_active_blocks"]:
        raise StartError(
            "output blocks are tracked with active ones: DYN_ROUTER_TRACK_OUTPUT_BLOCKS"
        )
    thresholds: dict[str, Any] = {
        name: _unless_off(values[name]) for name in ("router_queue_threshold", *THRESHOLDS)
    }
    return RouterOptions(
        Settings(
            mode=values["router_mode"].core,
            overlap_weight=values["router_kv_overlap_score_weight"],
            device_credit=values["router_kv_overlap_score_credit"],
            credit_decay=values["router_kv_overlap_score_credit_decay"],
            active_request_weight=values["router_decode_active_request_weight"],
            host_credit=values["router_host_cache_hit_weight"],
            disk_credit=values["router_disk_cache_hit_weight"],
            temperature=values["router_temperature"],
            track_prefill=values["router_track_prefill_tokens"],
            track_active_blocks=values["router_track_active_blocks"],
            last_token=values["router_last_token"],
            queue_threshold=thresholds.pop("router_queue_threshold"),
            decode_busy_threshold=_unless_off(
                values["router_conditional_disagg_decode_busy_threshold"]
            ),
            **thresholds,
        ),
        values["router_queue_policy"],
        values["router_use_kv_events"],
        values["router_assume_kv_reuse"],
        values["router_ttl_secs"],
        values["router_max_tree_size"],
        values["router_prune_target_ratio"],
        predicted_ttl_s=values["router_predicted_ttl_secs"],
        tracks_output_blocks=values["router_track_output_blocks"],
        session_affinity_ttl_s=values["session_affinity_ttl_secs"],
        disconnected_s=_unless_off(values["router_disconnected_s"]),
        unconnected_s=_unless_off(values["router_unconnected_s"]),
        prefill_busy=_unless_off(values["router_conditional_disagg_prefill_busy_threshold"]),
        max_held=values["router_queue_requests"],
        max_wait_s=values["router_queue_s"],
        max_fleets=values["max_partitions"],
        max_sessions=values["session_affinity_sessions"],
        max_retries=values["router_retries"],
    )


def _peers(values: Mapping[str, Any], outgoing: EgressPolicy) -> tuple[str, ...]:
    peers: tuple[str, ...] = values["peers"] or ()
    for url in peers:
        try:
            outgoing.check_url(url)
        except BadRequest as error:
            raise StartError(f"--peers: {error}") from None
    return peers


def _curve(values: Mapping[str, Any]) -> Curve:
    secret = _key_file("curve_secret_key_file", values, parse_secret)
    replicas = _key_file("replica_sync_client_keys", values, parse_keys)
    if replicas is not None and secret is None:
        raise StartError("--replica-sync-client-keys needs --curve-secret-key-file")
    return Curve(secret, replicas)


def _key_file(
    name: str, values: Mapping[str, Any], parse: Callable[[str], Parsed]
) -> Parsed | None:
    path: Path | None = values[name]
    if path is None:
        return None
    with reading(path, name), path.open("rb") as file:
        return parse(file.read(MAX_KEYS_BYTES).decode("ascii", "replace"))


def _replica_sync(values: Mapping[str, Any], outgoing: EgressPolicy) -> ReplicaSync | None:
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
    return ReplicaSync(values["replica_sync_host"], port, peers or ())


def _link(values: Mapping[str, Any]) -> LinkOptions:
    link = LinkOptions(
        heartbeat_s=values["engine_heartbeat_s"],
        heartbeat_timeout_s=values["engine_heartbeat_timeout_s"],
        connect_timeout_s=values["engine_connect_timeout_s"],
        handshake_timeout_s=values["engine_handshake_timeout_s"],
        reconnect_s=values["engine_reconnect_s"],
        reconnect_max_s=values["engine_reconnect_max_s"],
        queue_messages=values["engine_queue_messages"],
        queue_bytes=values["engine_queue_bytes"],
        max_message_bytes=values["engine_message_bytes"],
    )
    if link.heartbeat_timeout_s < link.heartbeat_s:
        raise StartError("the engine heartbeat timeout is shorter than the time between pings")
    if link.reconnect_max_s < link.reconnect_s:
        raise StartError("the longest pause before an engine is tried again is below the first")
    return link


def _replays(values: Mapping[str, Any]) -> ReplayOptions:
    return ReplayOptions(
        idle_s=values["replay_idle_s"],
        total_s=values["replay_total_s"],
        spare_s=values["replay_spare_s"],
        max_messages=values["replay_messages"],
        max_bytes=values["replay_bytes"],
        at_once=values["replay_at_once"],
    )


def _workers(values: Mapping[str, Any], outgoing: EgressPolicy) -> tuple[StaticWorker, ...]:
    entries: tuple[str, ...] | None = values["workers"]
    if entries is None:
        return ()
    block_size: int | None = values["block_size"]
    if block_size is None:
        raise StartError("--workers needs --block-size")
    partition = PartitionKey(values["model_name"], values["tenant_id"])
    workers: dict[RankKey, StaticWorker] = {}
    for entry in entries:
        instance_id, dp_rank, addresses = _worker_entry(entry, outgoing)
        key = RankKey(partition, instance_id, dp_rank)
        if key in workers:
            raise StartError(f"--workers names instance {instance_id} dp_rank {dp_rank} twice")
        endpoint, replay_endpoint, serves_at = addresses
        workers[key] = StaticWorker(key, endpoint, block_size, replay_endpoint, serves_at)
    return tuple(workers.values())


def _catalog(workers: tuple[StaticWorker, ...]) -> tuple[WorkerRecord, ...]:
    """Returns the workers that say where they serve as the selection service describes them."""
    ranks: dict[int, dict[int, StaticWorker]] = {}
    for one in workers:
        assert isinstance(one.key.instance_id, int)
        ranks.setdefault(one.key.instance_id, {})[one.key.dp_rank] = one
    return tuple(
        _record(worker_id, dict(sorted(each.items())))
        for worker_id, each in ranks.items()
        if any(one.serves_at for one in each.values())
    )


def _record(worker_id: int, ranks: dict[int, StaticWorker]) -> WorkerRecord:
    first, *others = ranks.values()
    for what in ("replay_endpoint", "serves_at"):
        if any(getattr(one, what) != getattr(first, what) for one in others):
            name = what.replace("_", " ")
            raise StartError(f"--workers: the ranks of instance {worker_id} differ in {name}")
    start = min(ranks)
    if max(ranks) - start + 1 != len(ranks):
        raise StartError(f"--workers: the ranks of instance {worker_id} do not follow each other")
    return WorkerRecord(
        worker_id,
        *first.key.partition,
        endpoint=first.serves_at,
        kv_events_endpoints={dp_rank: one.endpoint for dp_rank, one in ranks.items()},
        replay_endpoint=first.replay_endpoint,
        block_size=first.block_size,
        data_parallel_start_rank=start,
        data_parallel_size=len(ranks),
    )


def _worker_entry(
    entry: str, outgoing: EgressPolicy
) -> tuple[int, int, tuple[str, str | None, str | None]]:
    """Splits `id[:rank]=endpoint[;replay endpoint][;URL]`; blanks around the parts do not count.

    No address has a semicolon in it.
    """
    name, equals, addresses = (part.strip() for part in entry.partition("="))
    if not equals:
        said = masked(entry)
        raise StartError(f"--workers entry {said!r} is not of the form id[:rank]=endpoint")
    endpoint, *others = (part.strip() for part in addresses.split(";"))
    urls = [each for each in others if each.startswith(("http://", "https://"))]
    replays = [each for each in others if each not in urls]
    identity, colon, rank = name.partition(":")
    instance_id = _number(entry, "instance id", identity, U64_MAX)
    dp_rank = _number(entry, "dp_rank", rank, U32_MAX) if colon else 0
    try:
        if len(urls) > 1 or len(replays) > 1:
            raise BadRequest("more than one replay endpoint, or more than one URL")
        outgoing.check_replica_endpoint(endpoint)
        for each in replays:
            outgoing.check_replay_endpoint(each)
        for each in urls:
            parse_url(each)
    except (BadRequest, ValueError) as error:
        said, why = masked(entry), masked(str(error))
        raise StartError(f"--workers entry {said!r}: {why}") from None
    return instance_id, dp_rank, (endpoint, next(iter(replays), None), next(iter(urls), None))


def _number(entry: str, what: str, text: str, maximum: int) -> int:
    try:
        return parse_uint(text, maximum)
    except ValueError as error:
        said = masked(entry)
        raise StartError(f"--workers entry {said!r}: bad {what}: {error}") from None
