"""The command line as an operator meets it: exit codes, errors in one clear line, signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from kvd._version import VERSION
from kvd.cli.main import build_parser, main
from kvd.cli.serving import (
    conductor_settings,
    indexer_settings,
    select_service_settings,
    serve_settings,
    slot_tracker_settings,
)
from kvd.config.binds import parse_face_binds
from kvd.config.load import load
from kvd.config.parsers import OFF
from kvd.config.settings import COMMON, GROUPS, SELECT_SERVICE_SETTINGS, SETTINGS
from kvd.config.sources import DEFAULTS, FACE_BINDS
from kvd.platform.descriptors import LEAST
from tests.support import http_client
from tests.support.commands import Ended, run_command, run_each
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server, clean_environment
from tests.support.running import running, running_both

ENDPOINT = "tcp://127.0.0.1:5557"
OTHERS_OFF = (
    *("--slot-tracker-bind", "off"),
    *("--selection-bind", "off"),
    *("--conductor-bind", "off"),
)


def given(*arguments: str) -> dict[str, object]:
    """Returns the settings that a command line gives."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    settings: dict[str, object] = args.given(parser, args)
    return {name: value for name, value in settings.items() if value is not None}


def test_version_and_help_answer_and_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in [
        (["--version"], f"kvd {VERSION}\n"),
        (["--help"], "serve"),
        (["serve", "--help"], "--indexer-bind"),
        (["indexer", "--help"], "--workers"),
        (["slot-tracker", "--help"], "--replica-sync-port"),
    ]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["indexer", "--bogus"],
        ["indexer", "--port", "x"],
        ["indexer", "--port", "65536"],
        ["indexer", "--port", "-1"],
        ["indexer", "--threads", "four"],
        ["indexer", "--block-size", "4294967296"],
        ["indexer", "--work", "1=tcp://127.0.0.1:1"],
        ["indexer", "--tenant-id", "a", "--routing-group", "b"],
        ["serve", "--indexer-bind", "8090"],
        ["serve", "--log-level", "loud"],
        ["serve", "--slot-tracker-bind", "8091"],
        ["serve", "--metrics-ranks", "-1"],
        ["serve", "--request-expiry-s", "0"],
        ["slot-tracker", "--workers", "1=tcp://127.0.0.1:1"],
        ["slot-tracker", "--port", "65536"],
        ["slot-tracker", "--replica-sync-port", "0"],
        ["slot-tracker", "--replica-sync-port", "65536"],
        ["slot-tracker", "--replica-sync-port", "5600", "--replica-sync-peers", "foo"],
        ["slot-tracker", "--replica-sync-port", "5600", "--replica-sync-peers", "tcp://*:1"],
    ],
)
def test_a_wrong_command_line_ends_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert re.fullmatch(r"kvd.*: \S.*; see `kvd.* --help`\n", capsys.readouterr().err)


def test_a_wrong_command_line_names_the_command_and_no_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, beginning in (
        (
            "indexer --bogus",
            "kvd indexer: unrecognized arguments: --bogus; see `kvd indexer --help`",
        ),
        ("config check tcp://me:pw@h:1", "kvd config check: unrecognized arguments: tcp://***@h:1"),
        (
            "indexer --blok-size=4 --port 1",
            "kvd indexer: unrecognized arguments: --blok-size=4 (did you mean --block-size?); ",
        ),
        (
            "serve --port 1",
            "kvd serve: unrecognized arguments: --port 1; see `kvd serve --help`",
        ),
        (
            "--config kvd.toml serve",
            "kvd: unrecognized arguments: --config; options belong after the command; see `kvd",
        ),
        (
            "config --config=kvd.toml check",
            "kvd config: unrecognized arguments: --config=kvd.toml; options belong after the ",
        ),
        ("--verson", "kvd: unrecognized arguments: --verson (did you mean --version?); "),
        (
            "gateway --port 1 --gateway-bind 127.0.0.1:2",
            "kvd gateway: --gateway-bind says where to listen; --host and --port say it, too; "
            "see `kvd gateway --help`",
        ),
        ("status --client-keyfile x", "kvd status: --client-keyfile needs --client-certfile"),
    ):
        with pytest.raises(SystemExit):
            main(arguments.split())
        error = capsys.readouterr().err
        assert error.startswith(beginning) and error.count("\n") == 1


ALONE = ("indexer", "slot-tracker", "select-service", "conductor")


@pytest.mark.parametrize(
    ("limit", "commands"), [(10, ("serve",)), (20, ("serve",)), (LEAST - 1, ("serve", *ALONE))]
)
def test_too_few_descriptors_are_one_line(limit: int, commands: tuple[str, ...]) -> None:
    few = ["prlimit", f"--nofile={limit}:{limit}"]
    faces = [[command] for command in commands]
    message = f"kvd: {limit} descriptors are too few, kvd needs {LEAST} (ulimit -n)\n"
    assert run_each(faces, under=few) == [Ended(os.EX_CONFIG, "", message)] * len(faces)


def test_a_bad_value_says_what_would_be_good(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["indexer", "--port", "65536"])
    assert "argument --port: '65536': expected a whole number from 0 to 65535" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--block-size", "4", "--workers", "1"], "id[:rank]=endpoint"),
        (["--block-size", "4", "--workers", "x=tcp://127.0.0.1:1"], "bad instance id"),
        (["--block-size", "4", "--workers", "1:y=tcp://127.0.0.1:1"], "bad dp_rank"),
        (["--block-size", "4", "--workers", "1=foo"], "invalid ZMQ endpoint `foo`"),
        (["--block-size", "4", "--workers", "1=tcp://h:1,1=tcp://h:2"], "twice"),
        (["--workers", f"1={ENDPOINT}"], "--block-size"),
        (["--workers", ""], "--block-size"),
    ],
)
def test_a_start_error_is_one_line_and_ends_with_78(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_start_error(["indexer", *flags], complaint, capsys)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            "serve --indexer-bind off --slot-tracker-bind off --selection-bind off "
            "--conductor-bind off",
            "every face is off",
        ),
        ("slot-tracker --replica-sync-peers tcp://127.0.0.1:1", "--replica-sync-port"),
        ("serve --replica-sync-peers tcp://127.0.0.1:1", "--replica-sync-port"),
    ],
)
def test_so_is_one_about_several_faces(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_start_error(arguments.split(), complaint, capsys)


def check_start_error(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == os.EX_CONFIG
    error = capsys.readouterr().err
    assert complaint in error
    assert error.startswith("kvd: ")
    assert error.count("\n") == 1


def all_off_but(bind: str) -> dict[str, object]:
    return {name: OFF for name in FACE_BINDS if name != bind}


def test_the_documented_flags_mean_what_they_say() -> None:
    alone = all_off_but("indexer_bind")
    assert given("indexer") == alone
    assert given("indexer", "--port", "8091", "--threads", "4") == alone | {
        "indexer_bind": parse_face_binds("127.0.0.1:8091")
    }
    assert given("indexer", "--host", "::1") == alone | {
        "indexer_bind": parse_face_binds("[::1]:8090")
    }
    of_tenant = alone | {"tenant_id": "a"}
    assert given("indexer", "--routing-group", "a", "--tenant-id", "a") == of_tenant
    assert given("indexer", "--routing-group", "a") == of_tenant


def test_the_flags_of_the_slot_tracker_mean_what_they_say() -> None:
    alone = all_off_but("slot_tracker_bind")
    assert given("slot-tracker") == alone
    assert given("slot-tracker", "--port", "1", "--replica-sync-port", "5600") == alone | {
        "slot_tracker_bind": parse_face_binds("127.0.0.1:1"),
        "replica_sync_port": 5600,
    }
    elsewhere = alone | {"slot_tracker_bind": parse_face_binds("[::1]:8091")}
    assert given("slot-tracker", "--host", "::1") == elsewhere
    peers = "tcp://a:1, tcp://b:2,,tcp://a:1"
    assert given("slot-tracker", "--replica-sync-peers", peers) == alone | {
        "replica_sync_peers": ("tcp://a:1", "tcp://b:2")
    }


def test_the_flags_of_the_select_service_mean_what_they_say() -> None:
    alone = all_off_but("selection_bind")
    alone[DEFAULTS] = {setting.name: setting.default for setting in SELECT_SERVICE_SETTINGS}
    assert given("select-service") == alone
    assert given("select-service", "--port", "1", "--threads", "4") == alone | {
        "selection_bind": parse_face_binds("127.0.0.1:1")
    }
    peers = given("select-service", "--indexer-peers", "http://a:1,http://b:2")
    assert peers == alone | {"peers": ("http://a:1", "http://b:2")}
    reuse = given("select-service", "--no-router-assume-kv-reuse")
    assert reuse == alone | {"router_assume_kv_reuse": False}


def test_the_flags_of_the_conductor_mean_what_they_say() -> None:
    alone = all_off_but("conductor_bind")
    assert given("conductor") == alone
    assert given("conductor", "--port", "1", "--hash-seed", "42") == alone | {
        "conductor_bind": parse_face_binds("127.0.0.1:1"),
        "hash_seed": 42,
    }


def test_the_select_service_computes_what_the_original_does() -> None:
    """Engines recompute a prompt's last token; the drop-in command counts that only if told to."""

    def holds(*flags: str, **environ: str) -> object:
        args = build_parser().parse_args(flags)
        return load(args.given(build_parser(), args), environ).router.settings.members["last_token"]

    assert holds("serve") is True and holds("select-service") is False
    assert holds("select-service", "--router-last-token") is True
    assert holds("select-service", KVD_ROUTER_LAST_TOKEN="1") is True
    assert holds("serve", "--no-router-last-token") is False


@pytest.mark.parametrize("command", ["select-service", "serve"])
def test_switches_stand_alone_or_say_it(command: str) -> None:
    alone = given(command)
    for flags, value in (
        (["--router-track-active-blocks"], True),
        (["--no-router-track-active-blocks"], False),
        (["--router-track-active-blocks", "off"], False),
        (["--router-track-active-blocks=true", "--router-mode", "kv"], True),
    ):
        assert given(command, *flags)["router_track_active_blocks"] is value
    for flag in ("--no-router-kv-events", "--no-router-use-kv-events"):
        assert given(command, flag) == alone | {"router_use_kv_events": False}


def test_every_setting_of_the_router_is_a_flag_of_the_select_service() -> None:
    known = vars(build_parser().parse_args(["select-service"])).keys()
    of_routers = [each for each in SETTINGS if each.variable.startswith("DYN_")]
    assert len(of_routers) > 20
    assert {each.name for each in of_routers} <= known
    assert given("select-service", "--router-temperature", "0.5")["router_temperature"] == 0.5


def test_every_setting_is_a_flag_of_serve() -> None:
    parser = build_parser()
    settings = serve_settings(parser, parser.parse_args(["serve"]))
    assert settings == {setting.name: None for setting in SETTINGS}
    assert given("serve", "--indexer-bind", "[::1]:1") == {
        "indexer_bind": parse_face_binds("[::1]:1")
    }
    for command, alone in (
        ("indexer", indexer_settings),
        ("slot-tracker", slot_tracker_settings),
        ("select-service", select_service_settings),
        ("conductor", conductor_settings),
    ):
        assert alone(parser, parser.parse_args([command])).keys() <= {*settings, DEFAULTS}


def test_a_port_in_use_is_a_start_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        commands = [
            f"indexer --port {port}",
            f"serve --indexer-bind 127.0.0.1:0 --slot-tracker-bind 127.0.0.1:{port} "
            "--selection-bind off --conductor-bind off",
            "serve --indexer-bind 127.0.0.1:0 --slot-tracker-bind off "
            f"--selection-bind 127.0.0.1:{port} --conductor-bind off",
            "serve --indexer-bind off --slot-tracker-bind off --selection-bind off "
            f"--conductor-bind 127.0.0.1:{port}",
            f"slot-tracker --port 0 --replica-sync-port {port}",
        ]
        for ended in (run_command(*command.split()) for command in commands):
            assert ended.code == 1  # not 78, as the port may be free in a moment
            assert f"127.0.0.1:{port}" in ended.stderr
            assert ended.stderr.count("\n") == 1, ended.stderr


def test_a_port_in_use_for_tls_is_one_line_too(certificate: Path) -> None:
    cert, key = (str(certificate / f"{name}.pem") for name in ("cert", "key"))

    def start(bind: str, cert: str) -> list[str]:
        binds = ("--indexer-bind", f"127.0.0.1:0,tls:{bind}", *OTHERS_OFF)
        return ["serve", *binds, "--tls-certfile", cert, "--tls-keyfile", key]

    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        in_use = run_command(*start(bind, cert))
        bad = run_command(*start("127.0.0.1:0", key))
    assert in_use.code == 1 and f"cannot listen on {bind}" in in_use.stderr
    assert bad.code == os.EX_CONFIG and "cannot use" in bad.stderr  # the file has no certificate
    for ended in (in_use, bad):
        assert ended.stderr.count("\n") == 1, ended.stderr


def show_help(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit):
        main(list(arguments))
    return capsys.readouterr().out


def flags_in(text: str) -> set[str]:
    """Returns the options that a help lists."""
    return set(re.findall(r"^  (?:-\w, )?(--[a-z][a-z-]+)", text, re.MULTILINE))


@pytest.mark.parametrize(
    "command", ["serve", "indexer", "slot-tracker", "select-service", "conductor", "config check"]
)
def test_help_is_a_page_of_common_flags_and_names_the_help_with_all(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    text = show_help(capsys, *command.split(), "--help")
    assert {"--help", "--help-all", "--config", "--tokens-file"} <= flags_in(text)
    assert len(text.splitlines()) <= 50
    everything = show_help(capsys, *command.split(), "--help-all")
    assert flags_in(text) < flags_in(everything)


def test_the_help_with_all_has_every_setting_by_subject(
    capsys: pytest.CaptureFixture[str],
) -> None:
    common, _, others = show_help(capsys, "serve", "--help-all").partition("\nRecovery:\n")
    for setting in SETTINGS:
        section = common if setting in GROUPS[COMMON] else others
        assert f"\n  {setting.flag}" in section, setting.name
    titles = re.findall(r"^(\S.*):$", others, re.MULTILINE)
    assert titles == [title for title in GROUPS if title not in (COMMON, "Recovery")]


def test_every_flag_is_said_to_have_the_variable_and_default_it_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "".join(show_help(capsys, "serve", "--help-all").split())  # lines break anywhere
    for setting in SETTINGS:
        usual = f"KVD_{setting.name.upper()}"
        assert setting.variable == usual or f"variable{setting.variable})" in text
    assert "(defaulttrue" in text and "(defaultfalse" in text  # as the file and --flag take it


def test_workers_of_the_command_line_are_registered(
    kvd_process: Callable[..., Server],
) -> None:
    flags = ("--block-size", "16", "--model-name", "m", "--workers", f"1={ENDPOINT},1:1={ENDPOINT}")
    server = kvd_process(*flags, "--threads", "4")
    (worker,) = http_client.get(f"{server.base_url}/workers").json()
    assert worker["instance_id"] == 1
    assert worker["endpoints"] == {"0": ENDPOINT, "1": ENDPOINT}


def test_an_interrupt_ends_it_well_as_a_sigterm_does(kvd_process: Callable[..., Server]) -> None:
    assert kvd_process().stop(signal.SIGINT) == 0  # all other daemons here end on SIGTERM


def test_who_reads_what_a_command_says_may_leave(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as unread, open("/dev/full", "wb") as full:
        for stdout, message in (
            (unread, ""),
            (full, "kvd: cannot write: No space left on device\n"),
        ):
            for command in (
                *(["config", "docs"], ["state", "export", str(tmp_path)]),
                *(["--help"], ["serve", "--help-all"], ["--version"]),
            ):
                assert run_command(*command, stdout=stdout) == Ended(1, "", message)


def test_an_error_that_cannot_be_written_leaves_the_exit_code() -> None:
    for option, code in (("--no-such-option", 2), ("--indexer-bind=tls:127.0.0.1:0", 78)):
        with open("/dev/full", "wb") as full:
            command = [sys.executable, "-m", "kvd", "serve", option]
            ended = subprocess.run(command, env=clean_environment(), stderr=full, check=False)
        assert ended.returncode == code


def test_a_command_without_standard_output_says_so() -> None:
    command = ["sh", "-c", '"$0" -m kvd config docs >&-', sys.executable]
    ended = subprocess.run(
        command, env=clean_environment(), stderr=subprocess.PIPE, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr == "kvd: cannot write: standard output is closed\n"


def test_a_daemon_without_standard_streams_serves(tmp_path: Path) -> None:
    port = find_free_port()
    command = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-m", "kvd", "indexer"]
    server = Server([*command, "--port", str(port)], tmp_path, port, clean_environment())
    try:
        server.wait_healthy()
        folder = Path(f"/proc/{server.process.pid}/fd")
        # No other file or socket has the number that log lines are written to.
        assert {str((folder / number).readlink()) for number in "012"} == {os.devnull}
    finally:
        code = server.stop()
    assert code == 0


def test_both_faces_are_one_process(tmp_path: Path) -> None:
    with (
        running_both(tmp_path) as (server, slot_tracker),
        Client() as client,
    ):
        worker = {"worker_id": 7, "model_name": "m", "block_size": 16, "dp_start": 0, "dp_size": 1}
        assert client.post(f"{slot_tracker}/register", json=worker).status_code == 201
        assert client.get(f"{server.base_url}/workers").json() == []  # lists engines only
        assert len(client.get(f"{slot_tracker}/loads").json()) == 1
        for url, own, other in (
            (server.base_url, "dynamo_kvindexer_listeners", "kvd_slots_workers"),
            (slot_tracker, "kvd_slots_workers", "dynamo_kvindexer_listeners"),
        ):
            metrics = client.get(f"{url}/metrics").text
            assert own in metrics and other not in metrics
            assert client.get(f"{url}/health").status_code == 200
        assert client.get(f"{server.base_url}/loads").status_code == 404
        assert client.post(f"{slot_tracker}/query", json={}).status_code == 404
    for url in (server.base_url, slot_tracker):
        with pytest.raises(httpx.ConnectError):
            http_client.get(f"{url}/health")
    assert server.stderr.count("event=serving") == 2
    assert server.stderr.count("event=stopped") == 1


def test_a_face_can_be_off(tmp_path: Path) -> None:
    port = find_free_port()
    binds = ("--indexer-bind=off", "--selection-bind=off", "--conductor-bind=off")
    binds = (*binds, "--slot-tracker-bind", f"127.0.0.1:{port}")
    with running(tmp_path, port, "serve", *binds, "--request-expiry-s", "5") as server:
        assert server.stderr.count("event=serving") == 1
        assert "face=slot-tracker" in server.stderr
