"""The configuration file: what it accepts, what it refuses in one line, and that it round-trips."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.cli.main import load_config, main
from kvd.cli.settings_page import TITLE
from kvd.config import file as configfile
from kvd.config.binds import parse_face_binds
from kvd.config.errors import StartError
from kvd.config.load import load
from kvd.config.setting import Setting
from kvd.config.settings import SETTINGS
from kvd.config.sources import CONFIG, EffectiveSetting, resolve
from tests.support.budget import scaled
from tests.support.processes import REPOSITORY

WORKER = "1=tcp://127.0.0.1:5557"
TEXTS = (
    "some",
    "16",
    "127.0.0.1:8443",
    "tcp://127.0.0.1:5600",
    "http://10.0.0.9:8090",
    "m=http://h:1",
    "redis://h",
)


def write(path: Path, text: str) -> dict[str, object]:
    """Writes a file, and returns the flags of a command line that names it."""
    path.write_text(text)
    return {CONFIG: str(path)}


def values(held: dict[str, EffectiveSetting]) -> dict[str, object]:
    return {name: setting.value for name, setting in held.items()}


def example(setting: Setting) -> Any:
    """Returns a valid value of a setting."""
    if setting.default is not None:
        return setting.default
    for text in TEXTS:
        with suppress(ValueError):
            return setting.parse(text)
    raise AssertionError(f"none of {TEXTS} is a {setting.metavar}")


def test_every_setting_is_a_key_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    for setting in SETTINGS:
        value = example(setting)
        path.write_text(configfile.render({setting.name: (value, "somebody")}))
        assert configfile.read(path) == {setting.name: value}
        assert resolve({CONFIG: str(path)}, {})[setting.name] == EffectiveSetting(value, str(path))


@settings(max_examples=scaled(40))
@given(setting=st.sampled_from(SETTINGS), data=st.data())
def test_every_misspelling_is_refused(
    setting: Setting, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    at = data.draw(st.integers(0, len(setting.name) - 1))
    name = setting.name[:at] + "x" + setting.name[at + 1 :]
    if name == setting.name:
        return
    given_ = write(tmp_path_factory.getbasetemp() / "misspelt.toml", f"{name} = 1\n")
    with pytest.raises(StartError, match=rf"misspelt\.toml: {name}: no such setting"):
        load(given_, {})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("log_level = 'loud'", r"log_level: expected one of"),
        ("indexer_bind = 8090", r"indexer_bind: expected HOST:PORT"),
        ("http_connections = 0", r"http_connections: expected a number greater than 0"),
        ("http_idle_s = 'soon'", r"http_idle_s: expected seconds, from 0.001 to 86400$"),
        ("http_idle_s = '1_0'", r"http_idle_s: expected seconds, from 0.001 to 86400$"),
        ("http_idle_s = true", r"http_idle_s: expected SECONDS$"),
        ("router_temperature = 'hot'", r"router_temperature: expected a number from 0 to"),
        ("router_host_cache_hit_weight = '٣'", r"router_host_cache_hit_weight: expected a number"),
        ("model_name = true", r"model_name: expected NAME$"),
        ("model_name = 5", r"model_name: expected NAME$"),
        ("replica_sync_host = 127.1", r"replica_sync_host: expected HOST$"),
        ("tokens_file = false", r"tokens_file: expected FILE$"),
        ("tokens_file = 5", r"tokens_file: expected FILE$"),
        ("fleet_file = ''", r"fleet_file: expected the name of a file$"),
        ('tls_certfile = "a\\u0000"', r"tls_certfile: expected the name of a file$"),
        (
            "unix_socket_group = ''",
            r"unix_socket_group: expected the name or the number of a group",
        ),
        ("unix_socket_group = 4294967295", r"unix_socket_group: .* from 0 to 4294967294$"),
        ("http_connections = [1]", r"http_connections: expected N"),
        ("peers = 'http://10.0.0.9:8090'", r"peers: expected an array of URL texts"),
        ("peers = ['http://10.0.0.9:8090,']", r"peers: an entry of the array contains a comma"),
        (
            "peers = ['ftp://x']",
            r"peers: entry 1: the URL is not of http: or https:, expected http://HOST",
        ),
        (
            "peers = ['http://h', 'http://u:p@x']",
            r"peers: entry 2: the URL contains a user or a password",
        ),
        ("peers = ['http://h:0']", r"peers: entry 1: the port of the URL"),
        ("peers = ['http://h#x']", r"peers: entry 1: the URL contains a question mark or a #"),
        (
            'peers = ["http://h\\u0000"]',
            r"peers: entry 1: the URL contains blanks, control characters",
        ),
        (
            "replica_sync_peers = ['tcp://*:1']",
            r"replica_sync_peers: .*\* stands for every address of",
        ),
        (
            "replica_sync_peers = ['tcp://u:p@x:1']",
            r"replica_sync_peers: .*tcp://\*\*\*@x:1`: missing",
        ),
        ("replica_sync_host = 'a b'", r"replica_sync_host: a b is not a host name"),
        *(
            (f"upstream_tls_server_name = '{name}'", r"upstream_tls_server_name: .* is not a host")
            for name in ("", ".a.example", "a..example", "*.example", "\u00fc" * 64)
        ),
        ("indexer_bind = 'http://h:1'", r"indexer_bind: expected HOST:PORT"),
        ('indexer_bind = "h\\u0000:1"', r"indexer_bind: .* is not a host name"),
        ("indexer_bind = '[h]:1'", r"indexer_bind: .* h is not one"),
        (
            "indexer_bind = 'unix:" + "x" * 108 + "'",
            r"indexer_bind: the path .* longer than 107 bytes",
        ),
        ("allowed_origins = ['https://h:99999']", r"allowed_origins: the port of .* is not"),
        ("peers = [1]", r"peers: expected an array of URL texts"),
        ("indexer = {bind = 1}", r"indexer: no such setting"),
        ("indexer_bin = 'off'", r"indexer_bin: no such setting; did you mean indexer_bind\?"),
        ("log_level = 'info'\nlog_level = 'info'", r"log_level: Cannot overwrite a value"),
        ("log_level = 'info'\nlog_level = 'info'\n", r"log_level: Cannot .* \(at line 2, "),
        (
            "# \xe4\n\nlog_level = info",
            r"log_level: Expected .*at line 3, .*; a text needs quotes$",
        ),
        ("state_dir = /var/lib/kvd", r"state_dir: Invalid value .*; a text needs quotes$"),
        ("http_idle_s = 1 2", r"http_idle_s: Expected [^;]*\(at line 1, column 17\)$"),
        ("access_log = false 2", r"access_log: Expected [^;]*$"),
        ("log_level", r"Expected '='"),
        ("peers = ['x'\nhttp_idle_s = 1", r"Unclosed array \(at line 2, column 1\)$"),
        ("peers = ['x',\nlog_level = info", r"Invalid value \(at line 2, column 1\)$"),
        ("workers = " + "[" * 20_000, r"arrays or tables are nested too deeply$"),
        ("# " + "x" * configfile.MAX_BYTES, r"the file is longer than"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    with pytest.raises(StartError, match=rf"^{re.escape(str(path))}: {complaint}") as caught:
        load(write(path, text), {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["tokens_file", "peers_token_file", "fleet_file", "curve_secret_key_file", "tls_certfile"],
)
def test_who_names_a_file_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    text = f'{name} = "{tmp_path}"\ntls_keyfile = "nowhere"\nindexer_bind = "tls:127.0.0.1:0"\n'
    if name != "tls_certfile":
        text = f'{name} = "{tmp_path}"\n'
    with pytest.raises(StartError, match=rf"^{name}: cannot read {tmp_path}: Is a directory$"):
        load_config(write(path, text))


@pytest.mark.parametrize(
    "text", ['"a\\nb" = 1', 'tokens_file = "/\\u001b[31m\\n"', 'replica_sync_host = "a\\rb"']
)
def test_no_complaint_is_more_than_a_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "check", f"--config={write(tmp_path / 'kvd.toml', text)[CONFIG]}"]) == 1
    complaint = capsys.readouterr().err
    assert complaint.endswith("\n")
    assert complaint[:-1].isprintable(), complaint


def test_no_text_and_no_file(tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    path.write_bytes(b"log_level = 'info'\n# caf\xe9\n")
    with pytest.raises(StartError, match=r"kvd.toml: the file is not UTF-8 in line 2$"):
        load({CONFIG: str(path)}, {})
    with pytest.raises(StartError, match=r"cannot read .*nowhere: No such file"):
        load({CONFIG: str(tmp_path / "nowhere")}, {})


def test_what_editors_of_windows_add_is_no_mistake(tmp_path: Path) -> None:
    """A byte order mark at the beginning, and carriage returns at the ends of lines."""
    path = tmp_path / "kvd.toml"
    path.write_bytes(b"\xef\xbb\xbfhttp_connections = 7\r\nlog_level = 'error'\r\n")
    config = load({CONFIG: str(path)}, {})
    assert (config.http.connections, config.log_level) == (7, "error")


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    text = 'log_level = "error"\nindexer_bind = "127.0.0.1:1"\nhttp_connections = 7\n'
    in_file = write(tmp_path / "kvd.toml", text)
    environ = {"KVD_LOG_LEVEL": "warning", "KVD_INDEXER_BIND": "127.0.0.1:2"}
    third = parse_face_binds("127.0.0.1:3")
    held = resolve({**in_file, "indexer_bind": third}, environ)
    assert held["indexer_bind"] == EffectiveSetting(third, "--indexer-bind")
    assert held["log_level"] == EffectiveSetting("warning", "KVD_LOG_LEVEL")
    assert held["http_connections"] == EffectiveSetting(7, str(tmp_path / "kvd.toml"))
    assert held["http_idle_s"].source == "default"


# Texts of which every setting accepts at least two.
SPOKEN = [
    *("0", "1", "2", "0.5", "true", "off", "debug", "info", "json", "logfmt", "wspt", "fcfs"),
    *("random", "kv", "kvd", "dynamo", "127.0.0.1:1", "127.0.0.1:2", "unix:/x", "http://h:1"),
    *("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"),
    *("9000000", "9000001"),
    *("redis://h", "redis://h:2"),
    *("0660", "0600", "http://h:2", "private", "ipc", "m@t=http://h:1", "m=http://h:1"),
]


def spoken(setting: Setting) -> list[str]:
    """Returns texts that a setting accepts and that have different meanings."""
    found: dict[object, str] = {}
    for text in SPOKEN:
        with suppress(ValueError):
            found.setdefault(setting.parse(text), text)
    assert len(found) > 1, setting.name
    return list(found.values())


def in_toml(setting: Setting, text: str) -> str:
    return f"{setting.name} = {configfile.rendered(setting.parse(text))}\n"


GIVEN_VALUES = st.fixed_dictionaries(
    {},
    optional={
        each.name: st.dictionaries(
            st.sampled_from(("flag", "environment", "file")), st.sampled_from(spoken(each))
        )
        for each in SETTINGS
    },
)


@pytest.mark.slow("draws a value for every setting")
@settings(max_examples=scaled(8))
@given(given_values=GIVEN_VALUES)
def test_whatever_is_said_where_holds_by_one_rule(
    given_values: dict[str, dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any settings in file, environment and flags at once, against a short form of the rule."""
    path = tmp_path_factory.getbasetemp() / "said.toml"
    flags: dict[str, object] = {CONFIG: str(path)}
    environ, lines, expected = {}, "", {}
    for setting in SETTINGS:
        places = given_values.get(setting.name, {})
        if "file" in places:
            lines += in_toml(setting, places["file"])
        if "environment" in places:
            environ[setting.variable] = places["environment"]
        if "flag" in places:
            flags[setting.name] = setting.parse(places["flag"])
        for place, source in (
            ("flag", setting.flag),
            ("environment", setting.variable),
            ("file", str(path)),
        ):
            if place in places:
                expected[setting.name] = EffectiveSetting(setting.parse(places[place]), source)
                break
        else:
            expected[setting.name] = EffectiveSetting(setting.default, "default")
    path.write_text(lines)
    held = resolve(flags, environ)
    assert held == expected
    # The configuration is shown as a file that has the same values.
    path.write_text(configfile.render({name: (one.value, "") for name, one in held.items()}))
    assert values(resolve({CONFIG: str(path)}, {})) == values(held)


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    write(tmp_path / "kvd.toml", 'log_level = "error"')
    assert load({}, {"KVD_CONFIG": str(tmp_path / "kvd.toml")}).log_level == "error"


def test_a_shown_configuration_is_the_same_as_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--log-level", "debug", "--block-size", "16", "--workers", WORKER]
    assert main(["config", "show", *arguments]) == 0
    shown = capsys.readouterr().out
    assert 'log_level = "debug"  # --log-level' in shown
    flags = {"log_level": "debug", "block_size": 16, "workers": (WORKER,)}
    filed = resolve(write(tmp_path / "kvd.toml", shown), {})
    assert values(filed) == values(resolve(flags, {}))


def test_check_says_ok_or_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kvd.toml"
    write(path, 'log_level = "error"')
    assert main(["config", "check", "--config", str(path)]) == 0
    assert capsys.readouterr().out == "ok\n"
    write(path, "engine_heartbeat_s = 60")
    assert main(["config", "check", "--config", str(path)]) == 1
    assert "engine_heartbeat_timeout_s is shorter" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["peers", "replica_sync_peers", "workers"])
def test_nobody_reads_a_password_in_an_address(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "1=tcp://u:precious@h:1" if name == "workers" else "http://u:precious@h:1"
    more = "block_size = 16\nreplica_sync_port = 5600\n"
    path = tmp_path / "kvd.toml"
    write(path, f'{more}{name} = ["{url}"]')
    for action in ("check", "show"):
        assert main(["config", action, "--config", str(path)]) == 1
        flag = f"--{name.replace('_', '-')}={url}"
        given_ = ["config", action, "--block-size=16", "--replica-sync-port=5600"]
        with suppress(SystemExit):
            assert main([*given_, flag]) == 1
        with monkeypatch.context() as environ:
            environ.setenv(f"KVD_{name.upper()}", url)
            assert main(given_) == 1
    shown = capsys.readouterr()
    assert "precious" not in shown.out + shown.err
    assert shown.err.lower().replace("-", "_").count(name) >= 6


def test_check_reads_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cert.pem").write_text("none")
    files = [f"--tls-{name}file={tmp_path}/cert.pem" for name in ("cert", "key")]
    assert main(["config", "check", "--indexer-bind=tls:127.0.0.1:8443", *files]) == 1
    assert f"tls_certfile: cannot use {tmp_path}/cert.pem with " in capsys.readouterr().err
    pair = [f"--upstream-{each.removeprefix('--')}" for each in files]
    ca, gone = f"--upstream-tls-ca={tmp_path}/cert.pem", f"--upstream-tls-ca={tmp_path}/gone.pem"
    for flags, complaint in (
        ([gone], f"upstream_tls_ca: cannot read {tmp_path}/gone.pem: No such file"),
        ([ca], f"upstream_tls_ca: cannot use {tmp_path}/cert.pem: "),
        (pair, f"{tmp_path}/cert.pem: {tmp_path}/cert.pem contains no certificate"),
        (files, "tls_certfile, tls_keyfile: TLS needs an address of a face"),
    ):
        assert main(["config", "check", *flags]) == 1
        assert complaint in capsys.readouterr().err


def test_the_page_of_all_settings_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "docs"]) == 0
    written = capsys.readouterr().out
    page = (REPOSITORY / "docs/configuration.md").read_text()
    assert page[page.index(f"{TITLE}\n") :] == written, "see its section on this page"
    for setting in SETTINGS:
        others = [*setting.flags[1:], *setting.variables]
        named = [each for each in others if each != f"KVD_{setting.name.upper()}"]
        assert f"| {', '.join(f'`{each}`' for each in (setting.name, *named))} | " in written


def test_what_the_page_says_of_combining_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "docs/configuration.md").read_text()
    _, file, _, session, *_ = page.split("```\n")
    write(tmp_path / "kvd.toml", file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVD_LOG_LEVEL", "debug")
    assert main(["config", "show", "--config", "kvd.toml"]) == 0
    shown = capsys.readouterr().out
    assert all(line in shown.splitlines() for line in session.splitlines()[1:])
