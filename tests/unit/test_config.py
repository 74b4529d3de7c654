"""Settings: precedence, the --workers grammar, and one clear line for every refusal."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cli.serving import GATEWAY_DEFAULTS
from kvd.config.binds import TcpBind, UnixBind, parse_bind, parse_face_binds
from kvd.config.errors import StartError
from kvd.config.load import Config, ReplicaSyncOptions, load
from kvd.config.parsers import OFF, parse_list, parse_uint
from kvd.config.sections.listening import (
    DEFAULT_INDEXER_BIND,
    DEFAULT_SLOT_TRACKER_BIND,
    HTTP_SETTINGS,
)
from kvd.config.settings import SETTINGS
from kvd.config.sources import CONFIG, DEFAULTS, FACE_BINDS
from kvd.config.workers import StaticWorker
from kvd.http.limits import HttpLimits
from kvd.http.options import TlsFiles, UnixRights
from kvd.index.peers import MAX_PEERS
from kvd.model import PartitionKey, RankKey

ENDPOINT = "tcp://127.0.0.1:5557"


def workers(text: str, **given: object) -> list[tuple[int, int, str]]:
    config = load({"workers": parse_list(text), "block_size": 16, **given}, {})
    return [(one.key.instance_id, one.key.dp_rank, one.endpoint) for one in config.workers]


def test_every_limit_of_http_can_be_said() -> None:
    settings = {setting.name: setting.default for setting in HTTP_SETTINGS}
    assert load({}, {}).http == HttpLimits()
    assert len(settings) == len(dataclasses.fields(HttpLimits))
    for number, name in enumerate(settings, 1):
        settings[name] = number if name == "http_busy_wait_us" else 2**22 + number
    http = load(settings, {}).http
    assert sorted(dataclasses.asdict(http).values()) == sorted(settings.values())
    for name, least in (("http_body_bytes", 2**21), ("http_head_bytes", 4096)):
        with pytest.raises(StartError, match=f"expected a number from {least}"):
            load({}, {f"KVD_{name.upper()}": str(least - 1)})


def test_defaults_are_local_and_quiet() -> None:
    config = load({}, {})
    assert config.indexer_bind == parse_face_binds("127.0.0.1:8090")
    assert config.tls is None
    assert config.unix_rights == UnixRights(0o660, None)
    assert not config.policy.tokens and not config.allow_unauthenticated
    assert config.slot_tracker_bind == parse_face_binds("127.0.0.1:8091")
    assert config.selection_bind == parse_face_binds("127.0.0.1:8092")
    assert config.conductor_bind == parse_face_binds("127.0.0.1:13333")
    assert config.hash_seed == 1337
    assert config.request_expiry_s == 300
    assert config.replica_sync is None
    assert config.workers == ()
    assert config.log_level == "info"


def test_the_command_line_wins_over_the_environment_and_that_over_the_default() -> None:
    environ = {
        "KVD_LOG_LEVEL": "error",
        "KVD_INDEXER_BIND": "0.0.0.0:9000",
        "KVD_HTTP_GRACEFUL_S": "",
    }
    config = load({"log_level": "debug", "indexer_bind": None}, environ)
    assert config.log_level == "debug"
    assert config.indexer_bind == parse_face_binds("0.0.0.0:9000")
    assert config.http == load({}, {}).http


def test_every_setting_reaches_the_configuration() -> None:
    """Each is a member of some options, a field of the configuration, or part of another value."""
    fields = {each.name for each in dataclasses.fields(Config)}
    bound = {each.name for each in SETTINGS if each.options_class is not None}
    assert all(each.options_class is not None for each in SETTINGS if each.field)
    assert {each.name for each in SETTINGS} - bound - fields == {
        *("block_size", "model_name", "tenant_id"),  # part of the workers
        *("replica_sync_port", "replica_sync_host", "replica_sync_peers"),
        "replica_sync_queue_messages",
        *("router_mode", "router_policy", "router_event_threads"),
        *("tls_certfile", "tls_keyfile", "tls_client_ca", "peers_token_file"),
        *("upstream_key_file", "gateway_kvd_token_file"),
        *("unix_socket_mode", "unix_socket_group"),
        *("tokens_file", "allowed_hosts", "allowed_origins"),
        *("curve_secret_key_file", "replica_sync_client_keys"),
        *("state_url", "state_prefix", "state_password_file", "state_ca_file"),
        *("state_advertise", "state_lease_s"),
    }


def test_every_default_is_what_its_own_parser_could_give() -> None:
    for setting in SETTINGS:
        if setting.default is not None:
            assert setting.parse(str(setting.default)) == setting.default, setting.name


def test_nothing_in_a_config_can_be_changed() -> None:
    config = load({}, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.log_level = "debug"  # type: ignore[misc]
    assert not hasattr(config, "__dict__")


@pytest.mark.parametrize(
    ("text", "bind"),
    [
        ("127.0.0.1:8090", TcpBind("127.0.0.1", 8090)),
        ("localhost:0", TcpBind("localhost", 0)),
        ("[::1]:65535", TcpBind("::1", 65535)),
        ("tls:[::1]:8443", TcpBind("::1", 8443, tls=True)),
        ("unix:/run/kvd.sock", UnixBind("/run/kvd.sock")),
    ],
)
def test_binds_are_read_and_written_alike(text: str, bind: TcpBind | UnixBind) -> None:
    assert parse_bind(text) == bind
    assert str(bind) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8090",
        ":8090",
        "host:",
        "host:65536",
        "host:-1",
        "::1:80",
        "unix:",
        "a:b:1",
        "tls:",
        "tls:unix:/x",
    ],
)
def test_bad_binds_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bind(text)


def test_a_face_has_a_list_of_binds() -> None:
    text = "127.0.0.1:1,tls:[::]:2,unix:/run/kvd.sock"
    assert str(parse_face_binds(text)) == text
    assert parse_face_binds(text.replace(",", " , ") + ",") == parse_face_binds(text)
    assert parse_face_binds(OFF) == OFF
    for bad in ("", ",", "127.0.0.1:1,off", "127.0.0.1:1,127.0.0.1:1"):
        with pytest.raises(ValueError):
            parse_face_binds(bad)


@given(st.text(max_size=30))
def test_any_text_is_a_number_in_range_or_refused(text: str) -> None:
    try:
        number = parse_uint(text, 2**64 - 1)
    except ValueError:
        return
    assert 0 <= number < 2**64
    assert text.lstrip("0") in (str(number), "")


def test_workers_are_split_as_documented() -> None:
    assert workers(f"1={ENDPOINT}, 2:1 = {ENDPOINT} ,,") == [(1, 0, ENDPOINT), (2, 1, ENDPOINT)]
    assert workers("") == []
    assert workers(f"18446744073709551615:4294967295={ENDPOINT}") == [
        (2**64 - 1, 2**32 - 1, ENDPOINT)
    ]


def test_workers_carry_what_a_registration_needs() -> None:
    given = {"workers": (f"7={ENDPOINT}",), "block_size": 64, "model_name": "m", "tenant_id": "t"}
    key = RankKey(PartitionKey("m", "t"), 7, 0)
    assert load(given, {}).workers == (StaticWorker(key, ENDPOINT, 64),)


def test_workers_may_say_where_replays_are_asked_from_and_where_they_serve() -> None:
    replay, url = "tcp://127.0.0.1:5558", "http://w:8000"
    text = f"1={ENDPOINT} ; {replay}, 2:3={ENDPOINT};{replay};{url}, 2:4={ENDPOINT};{url};{replay}"
    config = load({"workers": parse_list(text), "block_size": 16}, {})
    assert [(each.replay_endpoint, each.serves_at) for each in config.workers] == [
        (replay, None),
        (replay, url),
        (replay, url),
    ]
    (record,) = config.catalog
    assert (record.worker_id, record.endpoint, record.replay_endpoint) == (2, url, replay)
    assert record.ranks == range(3, 5) and not list(record.reasons(uses_events=True))
    assert record.kv_events_endpoints == {3: ENDPOINT, 4: ENDPOINT}
    with pytest.raises(StartError, match="needs the URL of instance 1"):
        load({"workers": parse_list(text), "block_size": 16, "indexer_bind": OFF}, {})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1", "expected the form"),
        ("x=tcp://127.0.0.1:1", "bad instance id"),
        ("=tcp://127.0.0.1:1", "bad instance id"),
        ("-1=tcp://127.0.0.1:1", "bad instance id"),
        ("18446744073709551616=tcp://127.0.0.1:1", "bad instance id"),
        ("1:=tcp://127.0.0.1:1", "bad dp_rank"),
        ("1:4294967296=tcp://127.0.0.1:1", "bad dp_rank"),
        ("1=", "missing scheme"),
        ("1=foo", "missing scheme"),
        ("1=http://127.0.0.1:1", "unsupported scheme"),
        ("1=tcp://127.0.0.1", "missing TCP port"),
        ("1=tcp://127.0.0.1:1,1:0=tcp://127.0.0.1:2", "twice"),
        ("1=tcp://127.0.0.1:1;tcp://127.0.0.1", "invalid replay endpoint"),
        ("1=tcp://127.0.0.1:1;", "invalid replay endpoint"),
        ("1=tcp://127.0.0.1:1;tcp://127.0.0.1:2;tcp://127.0.0.1:3", "more than one replay"),
        ("1=tcp://127.0.0.1:1;http://a;http://b", "or more than one URL"),
        ("1=tcp://127.0.0.1:1;http://", "has no host"),
        ("1=tcp://127.0.0.1:1;http://u:p@a", r"\*\*\*@a'"),
        ("1=tcp://127.0.0.1:1;http://a,1:1=tcp://127.0.0.1:1;http://b", "differ in their URL"),
        ("1=tcp://127.0.0.1:1;http://a,1:2=tcp://127.0.0.1:1;http://a", "are not consecutive"),
    ],
)
def test_bad_workers_are_refused_with_their_reason(text: str, complaint: str) -> None:
    with pytest.raises(StartError, match=complaint) as caught:
        workers(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", f"1={ENDPOINT}"])
def test_workers_need_a_block_size(text: str) -> None:
    with pytest.raises(StartError, match="--block-size"):
        load({"workers": parse_list(text)}, {})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("KVD_INDEXER_BIND", "nowhere"),
        ("KVD_LOG_LEVEL", "loud"),
        ("KVD_HTTP_CONNECTIONS", "0"),
        ("KVD_HTTP_IDLE_S", "nan"),
        ("KVD_HTTP_GRACEFUL_S", "-1"),
        ("KVD_ENGINE_QUEUE_MESSAGES", "many"),
        ("KVD_SLOT_TRACKER_BIND", "on"),
        ("KVD_METRICS_RANKS", "4294967296"),
        ("KVD_REPLICA_SYNC_PORT", "0"),
        ("KVD_REPLICA_SYNC_PEERS", "tcp://a"),
        ("STATE_DIRECTORY", ":"),
        ("DYN_ROUTER_MIN_INITIAL_WORKERS", ""),
        ("DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS", "0"),
        ("DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS", "5.0"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(StartError, match=f"{variable}='{text}'"):
        load({}, {variable: text})


def test_peers_are_bounded_and_each_is_asked_once() -> None:
    urls = [f"http://h:{n}" for n in range(1, MAX_PEERS + 1)]
    assert load({}, {"KVD_PEERS": ",".join([*urls, urls[0]])}).peers == tuple(urls)
    with pytest.raises(StartError, match=f"more than {MAX_PEERS} peers"):
        load({}, {"KVD_PEERS": ",".join([*urls, "http://another"])})


def test_either_face_can_be_off() -> None:
    config = load({}, {"KVD_SLOT_TRACKER_BIND": "off"})
    assert (config.indexer_bind, config.slot_tracker_bind) == (
        parse_face_binds("127.0.0.1:8090"),
        None,
    )
    config = load({"indexer_bind": OFF}, {})
    assert (config.indexer_bind, config.slot_tracker_bind) == (
        None,
        parse_face_binds("127.0.0.1:8091"),
    )
    with pytest.raises(StartError, match="every face is off"):
        load(dict.fromkeys(FACE_BINDS, OFF), {})


def test_two_faces_cannot_have_one_address() -> None:
    """The kernel would call it in use, and send the operator to look for another process."""
    with pytest.raises(
        StartError, match=r"^indexer_bind and slot_tracker_bind are both 127\.0\.0\.1"
    ):
        load({}, {"KVD_INDEXER_BIND": "127.0.0.1:8091"})
    both = "unix:/run/a.sock,tls:127.0.0.1:1"
    with pytest.raises(
        StartError, match=r"^slot_tracker_bind and conductor_bind are both unix:/run/a"
    ):
        load({}, {"KVD_SLOT_TRACKER_BIND": both, "KVD_CONDUCTOR_BIND": "unix:/run/a.sock"})
    with pytest.raises(StartError, match=r"are both 127.0.0.1:1: change one of them$"):
        load({}, {"KVD_SLOT_TRACKER_BIND": both, "KVD_CONDUCTOR_BIND": "127.0.0.1:1"})
    alike = dict.fromkeys((f"KVD_{name.upper()}" for name in FACE_BINDS), "127.0.0.1:0")
    assert load({}, alike).conductor_bind == parse_face_binds("127.0.0.1:0")
    assert load({}, {"KVD_INDEXER_BIND": "127.0.0.1:8091", "KVD_SLOT_TRACKER_BIND": "off"})


def test_a_name_is_utf8() -> None:
    """Python reads other bytes of an environment as surrogates, which no scrape could show."""
    with pytest.raises(StartError, match="control characters or is not UTF-8"):
        load({}, {"KVD_MODEL_NAME": "\udcff"})


def test_replicas_need_a_port() -> None:
    peers = "tcp://a:1,tcp://b:2, tcp://a:1"
    environ = {"KVD_REPLICA_SYNC_PEERS": peers}
    with pytest.raises(StartError, match="--replica-sync-peers needs --replica-sync-port"):
        load({}, environ)
    environ["KVD_REPLICA_SYNC_PORT"] = "5600"
    assert load({}, environ).replica_sync == ReplicaSyncOptions(
        "127.0.0.1", 5600, ("tcp://a:1", "tcp://b:2")
    )
    assert load({"replica_sync_port": 1, "replica_sync_host": "::1"}, {}).replica_sync == (
        ReplicaSyncOptions("::1", 1, ())
    )


def test_the_expiry_is_read_where_the_fleet_has_it() -> None:
    environ = {"DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": "5"}
    assert load({}, environ).request_expiry_s == 5
    assert load({"request_expiry_s": 6}, environ).request_expiry_s == 6
    assert load({}, {"DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": ""}).request_expiry_s == 300


def test_heartbeats_must_fit_their_timeout() -> None:
    with pytest.raises(StartError, match="shorter"):
        load({"engine_heartbeat_s": 20.0}, {})


def test_tls_is_all_or_nothing_and_its_files_are_readable(tmp_path: Path) -> None:
    present = tmp_path / "present.pem"
    present.write_bytes(b"")
    for face in FACE_BINDS:
        binds = parse_face_binds("127.0.0.1:1,tls:[::1]:2")
        whole = {face: binds, "tls_certfile": present, "tls_keyfile": present}
        assert load(whole, {}).tls == TlsFiles(present, present)
        assert load(whole | {"tls_client_ca": present}, {}).tls == TlsFiles(*[present] * 3)
        for missing in ("tls_certfile", "tls_keyfile"):
            with pytest.raises(StartError, match="needs both"):
                load(whole | {missing: None}, {})
        for name in ("tls_certfile", "tls_keyfile", "tls_client_ca"):
            with pytest.raises(StartError, match=r"cannot read .*absent\.pem: No such file"):
                load(whole | {name: tmp_path / "absent.pem"}, {})
            with pytest.raises(StartError, match="TLS needs an address"):
                load({name: present}, {})
        with pytest.raises(StartError, match="TLS needs an address"):
            load({**whole, face: OFF}, {})


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("EMPTY\n", b"EMPTY"),
        (" token-abc123", b"token-abc123"),
        ("a:b,c{d}" * 512, b"a:b,c{d}" * 512),
        ("", None),
        ("two words", None),
        ("caf\u00e9", None),
        ("a" * 4097, None),
        ("a" * 10_000, None),
    ],
)
def test_the_engines_key_has_any_form_that_a_header_can_carry(
    tmp_path: Path, text: str, key: bytes | None
) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    if key is not None:
        assert load({"upstream_key_file": path}, {}).upstream_key == key
        return
    with pytest.raises(StartError, match="a key must have 1 to 4096 visible"):
        load({"upstream_key_file": path}, {})


@pytest.mark.parametrize("shared", ["file", "environment"])
def test_files_of_tls_may_be_for_a_face_of_another_command(tmp_path: Path, shared: str) -> None:
    """The file and the environment are shared by all commands, a flag is for its command alone."""
    present = tmp_path / "present.pem"
    present.write_bytes(b"")
    settings = {
        "indexer_bind": "tls:[::1]:2",
        "tls_certfile": f"{present}",
        "tls_keyfile": f"{present}",
        "tls_client_ca": "/nobody/reads/it",
    }
    environ: dict[str, str] = {}
    given: dict[str, object] = {}
    if shared == "file":
        path = tmp_path / "kvd.toml"
        path.write_text("".join(f'{name} = "{value}"\n' for name, value in settings.items()))
        given[CONFIG] = str(path)
    else:
        environ = {f"KVD_{name.upper()}": value for name, value in settings.items()}
    tracker = {**dict.fromkeys(FACE_BINDS, OFF), "slot_tracker_bind": None, **given}
    config = load(tracker, environ)
    assert config.tls is None and config.indexer_bind is None
    with pytest.raises(StartError, match="TLS needs an address"):
        load({**tracker, "tls_certfile": present}, environ)
    with pytest.raises(StartError, match=r"cannot read /nobody"):
        load(given, environ)
    assert load({**given, "indexer_bind": parse_face_binds("[::1]:2")}, environ).tls is None


def test_the_default_bind_is_the_one_of_the_original_on_loopback() -> None:
    assert str(DEFAULT_INDEXER_BIND) == "127.0.0.1:8090"
    assert str(DEFAULT_SLOT_TRACKER_BIND) == "127.0.0.1:8091"


def test_behind_the_gateway_prompts_under_way_count() -> None:
    gateway = {"gateway_bind": parse_face_binds("[::1]:2")}
    assert load({}, {}).router.predicted_ttl_s is None
    router = load(gateway, {}).router
    assert (router.predicted_ttl_s, router.predicted_bound) == (5.0, 1.177)
    options = load(gateway, {"DYN_ROUTER_PREDICTED_TTL_SECS": "2.5"}).router
    assert (options.predicted_ttl_s, options.predicted_bound) == (2.5, math.inf)
    load(gateway, {"DYN_ROUTER_USE_KV_EVENTS": "false"})


def test_under_the_gateway_command_engines_without_events_can_be_chosen() -> None:
    assert load({}, {}).router.disconnected_s == 3
    gateway = load({DEFAULTS: GATEWAY_DEFAULTS}, {}).router
    assert gateway.disconnected_s == math.inf
    set_here = load({DEFAULTS: GATEWAY_DEFAULTS}, {"KVD_ROUTER_DISCONNECTED_S": "3"}).router
    assert set_here.disconnected_s == 3
    assert load({}, {"KVD_ROUTER_DISCONNECTED_S": "inf"}).router.disconnected_s == math.inf
    with pytest.raises(StartError, match="from 0 to 3600"):
        load({}, {"KVD_ROUTER_DISCONNECTED_S": "nan"})


def test_what_the_router_is_told() -> None:
    assert load({}, {}).router.session_affinity_ttl_s is None
    environ = {
        "DYN_ROUTER_PREDICTED_TTL_SECS": "2.5",
        "DYN_ROUTER_TRACK_OUTPUT_BLOCKS": "true",
        "KVD_SESSION_AFFINITY_TTL_SECS": "31536000",
    }
    router = load({}, environ).router
    assert (router.predicted_ttl_s, router.tracks_output_blocks) == (2.5, True)
    assert router.session_affinity_ttl_s == 31_536_000
    for seconds in ("0", "31536001", "1.5"):
        with pytest.raises(StartError, match="KVD_SESSION_AFFINITY_TTL_SECS"):
            load({}, environ | {"KVD_SESSION_AFFINITY_TTL_SECS": seconds})
    with pytest.raises(StartError, match="DYN_ROUTER_PREDICTED_TTL_SECS"):
        load({}, environ | {"DYN_ROUTER_USE_KV_EVENTS": "false"})
    with pytest.raises(StartError, match="DYN_ROUTER_TRACK_OUTPUT_BLOCKS"):
        load({}, environ | {"DYN_ROUTER_TRACK_ACTIVE_BLOCKS": "false"})
