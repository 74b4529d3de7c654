"""Reading the configuration file again: what a running daemon applies, refuses and puts off."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvd.config.errors import StartError
from kvd.config.load import load
from kvd.config.reload import ConfigReader
from kvd.config.setting import Setting
from kvd.config.settings import SETTINGS
from kvd.config.sources import CONFIG, TLS_FILES, UPSTREAM_TLS_FILES
from kvd.selection.queue import QueuePolicy, SelectionQueue, Urgency
from tests.support import exposition, http_client
from tests.support.asking import make_client_certificates
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import STOP_DEADLINE_S, reads
from tests.support.reloading import Daemon, daemon, starting
from tests.support.running import running, running_kvd

OTHERS = {  # values that differ from the default and go with all other defaults
    "log_level": '"error"',
    "replay_bytes": "70000",
    "log_format": '"json"',
    "router_queue_policy": '"wspt"',
    "router_mode": '"random"',
    "router_policy": '"lmetric"',
    "router_queue_threshold": '"off"',
    "router_track_active_blocks": "false",
    "router_last_token": "false",
    "router_track_prefill_tokens": "false",
    "outgoing_allow": '["10.0.0.0/8"]',
    "model_name": '"llama"',
    "indexer_bind": '"127.0.0.1:1"',
    "router_use_kv_events": "false",
    "peers": '["http://10.0.0.9:8090"]',
    "allowed_hosts": '["kvd.example"]',
    "allowed_origins": '["https://kvd.example"]',
}


def other(setting: Setting) -> str:
    """Returns the text of a value that a live setting does not have by default."""
    return OTHERS.get(setting.name, "1" if setting.default != 1 else "0.5")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvd.toml"


def reader(path: Path, text: str = "", **given_: object) -> ConfigReader:
    path.write_text(text)
    return ConfigReader({CONFIG: os.fspath(path), **given_}, {})


@pytest.mark.parametrize(
    "name", sorted({each.name for each in SETTINGS if each.live} - {*TLS_FILES} | OTHERS.keys())
)
def test_a_live_setting_is_taken_over_and_another_one_put_off(path: Path, name: str) -> None:
    (setting,) = (each for each in SETTINGS if each.name == name)
    tokens = path.parent / "tokens"
    tokens.write_text("operator admin 0123456789abcdef\n")
    again = reader(path)
    before = load(again.given, {})
    value = f'"{tokens}"' if name == "tokens_file" else other(setting)
    path.write_text(f"{name} = {value}\n")
    wanted = load(again.given, {})
    assert wanted.values != before.values
    reloaded = again.again(before)
    if setting.live:
        assert reloaded.changed == (name,) and not reloaded.waiting
        assert reloaded.config.values == wanted.values
    else:
        assert reloaded.waiting == (name,) and not reloaded.changed
        assert reloaded.config.values == before.values


def test_files_of_tls_are_taken_over_where_there_is_tls(path: Path) -> None:
    files = {name: path.parent / name for name in ("one", "other")}
    for name, file in files.items():
        file.write_text(name)

    def text(file: str) -> str:
        lines = "".join(f'{name} = "{files[file]}"\n' for name in TLS_FILES)
        return lines + 'indexer_bind = "tls:127.0.0.1:0"\n'

    again = reader(path, text("one"))
    before = load(again.given, {})
    assert again.again(before).changed == ()
    path.write_text(text("other"))
    reloaded = again.again(before)
    assert reloaded.changed == TLS_FILES and not reloaded.waiting
    assert reloaded.config.tls == load(again.given, {}).tls != before.tls
    path.write_text(text("one"))
    files["one"].write_text("something else")
    reloaded = again.again(before)
    assert reloaded.changed == TLS_FILES and not reloaded.waiting
    path.write_text("")  # without TLS; its addresses stay until a restart
    reloaded = again.again(before)
    assert set(reloaded.waiting) == {"indexer_bind", *TLS_FILES}
    assert reloaded.config.tls == before.tls
    path.write_text("")
    plain = load(again.given, {})
    path.write_text(text("one"))  # files without addresses yet
    assert again.again(plain).waiting == ("indexer_bind",)
    assert again.again(plain).config.tls is None


def test_other_content_of_a_secret_that_is_read_once_waits_for_a_restart(path: Path) -> None:
    keys = ("upstream_key_file", "gateway_kvd_token_file", "state_password_file")
    names = ("curve_secret_key_file", keys[0], *UPSTREAM_TLS_FILES, *keys[1:])
    files = {name: path.parent / name for name in names}
    pems = (path.parent / name for name in ("ca.pem", "one.pem", "one.key"))
    files |= zip(UPSTREAM_TLS_FILES, pems, strict=True)

    def write(key: str) -> None:
        files["curve_secret_key_file"].write_bytes(zmq.curve_keypair()[1])
        make_client_certificates(path.parent, "one")
        for name in keys:
            files[name].write_text(key)

    write("0123456789abcdef")
    text = "".join(f'{name} = "{file}"\n' for name, file in files.items())
    text += 'gateway_bind = "127.0.0.1:0"\ngateway_kvd = ["http://127.0.0.1:1"]\n'
    again = reader(path, text + 'state_url = "redis://127.0.0.1:6379"\n')
    before = load(again.given, {})
    assert again.again(before).waiting == ()
    write("fedcba9876543210")
    for _ in range(2):  # named at each reload until the restart
        reloaded = again.again(before)
        assert (reloaded.changed, reloaded.waiting) == ((), names)
        before = reloaded.config
    assert before.gateway_kvd_token == before.upstream_key == b"0123456789abcdef"
    assert "0123456789abcdef" not in repr(before)


def test_a_file_that_is_read_once_may_be_replaced_by_another(path: Path) -> None:
    names = ("upstream_key_file", "gateway_kvd_token_file", "peers_token_file")
    certificates = UPSTREAM_TLS_FILES[1:]
    for folder in ("old", "new"):
        (path.parent / folder).mkdir()
        make_client_certificates(path.parent / folder, "one")
        for name in names:
            (path.parent / folder / name).write_text("0123456789abcdef")

    def text(folder: str) -> str:
        files = {name: name for name in names}
        files |= zip(certificates, ("one.pem", "one.key"), strict=True)
        lines = (f'{name} = "{path.parent}/{folder}/{file}"\n' for name, file in files.items())
        return "".join(lines)

    again = reader(path, text("old"))
    before = load(again.given, {})
    path.write_text(text("new") + 'log_level = "debug"\n')
    shutil.rmtree(path.parent / "old")
    for _ in range(2):
        reloaded = again.again(before)
        assert set(reloaded.waiting) == {*names, *certificates}
        assert reloaded.config.log_level == "debug"
        before = reloaded.config
    path.write_text('upstream_tls_insecure = true\nlog_level = "debug"\n')
    waiting = {*names, *certificates, "upstream_tls_insecure"}
    assert set(again.again(before).waiting) == waiting


def test_keys_of_curve_may_come_from_other_files(path: Path) -> None:
    first, second = zmq.curve_keypair(), zmq.curve_keypair()
    for name, (public, secret) in {"old": first, "new": second}.items():
        (path.parent / f"{name}.secret").write_bytes(secret)
        (path.parent / f"{name}.clients").write_bytes(public)

    def text(name: str) -> str:
        files = {"curve_secret_key_file": "secret", "replica_sync_client_keys": "clients"}
        return "".join(f'{each} = "{path.parent}/{name}.{end}"\n' for each, end in files.items())

    again = reader(path, text("old"))
    before = load(again.given, {})
    path.write_text(text("new"))
    (path.parent / "old.secret").unlink()
    (path.parent / "old.clients").unlink()
    reloaded = again.again(before)
    assert reloaded.waiting == ("curve_secret_key_file",)
    assert reloaded.changed == ("replica_sync_client_keys",)
    assert reloaded.config.curve.secret == first[1].decode()
    assert reloaded.config.curve.replicas == {second[0].decode()}
    assert again.again(reloaded.config).changed == ()
    path.write_text("")  # without keys; they stay until a restart
    for _ in range(2):
        emptied = again.again(reloaded.config)
        assert set(emptied.waiting) == {"curve_secret_key_file", "replica_sync_client_keys"}
        assert (emptied.changed, emptied.config.curve) == ((), reloaded.config.curve)
        reloaded = emptied


def test_settings_that_wait_do_not_keep_live_ones_from_changing(path: Path) -> None:
    old = 'block_size = 16\nworkers = ["1=tcp://10.0.0.1:5557"]\n'
    old += 'peers = ["http://10.0.0.2:8090"]\n'
    old += 'replica_sync_port = 5600\nreplica_sync_peers = ["tcp://10.0.0.3:5600"]\n'
    again = reader(path, old)
    before = load(again.given, {})
    new = old.replace("10.0.0.", "127.0.0.") + 'outgoing_allow = ["127.0.0.0/8"]\n'
    path.write_text(new)
    for changed in (("outgoing_allow",), ()):
        reloaded = again.again(before)
        assert reloaded.changed == changed
        assert set(reloaded.waiting) == {"workers", "peers", "replica_sync_peers"}
        assert reloaded.config.outgoing_allow == ("127.0.0.0/8",)
        assert reloaded.config.workers == before.workers != ()
        assert reloaded.config.peers == before.peers != ()
        assert reloaded.config.replica_sync == before.replica_sync is not None
        before = reloaded.config
    path.write_text(new.replace("127.0.0.1:", "10.0.0.1:"))
    with pytest.raises(StartError, match="not in outgoing_allow"):
        again.again(before)


def test_a_live_setting_waits_with_one_that_needs_its_value(path: Path) -> None:
    again = reader(path, "router_track_output_blocks = true\n")
    before = load(again.given, {})
    path.write_text('router_track_active_blocks = false\nlog_level = "debug"\n')
    for changed in (("log_level",), ()):
        reloaded = again.again(before)
        assert reloaded.changed == changed
        waiting = {"router_track_output_blocks", "router_track_active_blocks"}
        assert set(reloaded.waiting) == waiting
        before = reloaded.config


def test_what_a_flag_says_stays(path: Path) -> None:
    again = reader(path, log_level="debug")
    before = load(again.given, {})
    path.write_text('log_level = "error"\nhttp_connections = 5\n')
    reloaded = again.again(before)
    assert reloaded.changed == ("http_connections",)
    assert (reloaded.config.log_level, reloaded.config.http.connections) == ("debug", 5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("log_levle = 'info'", "log_levle: no such setting; did you mean log_level"),
        ("http_connections = 0", "http_connections: expected a number greater than 0"),
        # A bad value counts even if its setting is put off.
        ("http_connections = 5\nengine_heartbeat_s = 99", "engine_heartbeat_timeout_s is shorter"),
        ("tls_keyfile = 'nowhere'", "TLS needs an address"),
        ("[", "Invalid|Expected"),
        ("workers = " + "[" * 20_000, "nested too deeply"),
        (
            'indexer_bind = "tls:[::1]:0"\ntls_certfile = "\\u0000"\ntls_keyfile = "x"',
            "tls_certfile: expected the name of a file",
        ),
    ],
)
def test_a_file_that_no_daemon_would_start_with_is_refused(
    path: Path, text: str, complaint: str
) -> None:
    again = reader(path)
    before = load(again.given, {})
    path.write_text(text)
    with pytest.raises(StartError, match=complaint):
        again.again(before)
    path.unlink()
    with pytest.raises(StartError, match=r"cannot read .*No such file"):
        again.again(before)


@pytest.mark.parametrize(
    ("given_", "environ", "has_file"),
    [({CONFIG: "x"}, {}, True), ({CONFIG: None}, {"KVD_CONFIG": "x"}, True), ({}, {}, False)],
)
def test_whether_there_is_a_file(
    given_: dict[str, Any], environ: dict[str, str], has_file: bool
) -> None:
    assert ConfigReader(given_, environ).has_file == has_file


URGENCIES = st.builds(Urgency, st.integers(0, 2), st.floats(0, 9), st.integers(0, 99))


@given(st.lists(st.tuples(st.sampled_from("ab"), URGENCIES), max_size=12), st.data())
def test_another_policy_orders_those_that_wait_as_if_it_had_been_the_first(
    arriving: list[tuple[str, Urgency]], data: st.DataObject
) -> None:
    old, new = data.draw(st.permutations(list(QueuePolicy)))
    gone = data.draw(st.sets(st.integers(0, 11)))
    orders = []
    for policy in (old, new):
        queue: SelectionQueue[int] = SelectionQueue(policy)
        for number, (lane, urgency) in enumerate(arriving):
            waiting = queue.push(lane, number, urgency, float(number))
            if number in gone:
                queue.remove(waiting)
        queue.reorder(new)
        orders.append(list(queue.release(lambda _: True)))
    assert orders[0] == orders[1]


# ---- a daemon


def test_sighup_takes_over_levels_and_limits(tmp_path: Path) -> None:
    with daemon(tmp_path) as kvd:
        kvd.reload('log_level = "warning"\nhttp_connections = 1\nengine_queue_messages = 9\n')
        stderr = kvd.server.stderr
        assert "event=restart_needed settings=engine_queue_messages" in stderr
        assert displaced_by_another(kvd) == 1
        kvd.reload("http_connections = 7\n")
        assert displaced_by_another(kvd) == 0
        kvd.server.wait_logged('event=reloaded changed="log_level http_connections"')


def displaced_by_another(kvd: Daemon) -> float:
    """Returns how many connections give way if one more comes beside that of `kvd.http`."""
    counter = "kvd_http_connections_displaced_total"
    before = kvd.samples()[counter]
    with Client(kvd.server.base_url) as another:
        # A connection that was just answered gives way once kvd waits for its next request.
        kvd.server.wait_until(lambda: another.get("/health").status_code == 200, "another's turn")
        found = exposition.parse(another.get("/metrics").text)
    # With room for one alone, kvd refuses the next one until it notices that this one has closed.
    kvd.server.wait_until(lambda: kvd.http.get("/health").status_code == 200, "there is room again")
    return found[counter] - before


NO_EVENTS = "router_use_kv_events = false\n"


def test_a_reload_before_the_faces_serve_holds(tmp_path: Path) -> None:
    tokens, fleet = tmp_path / "tokens", tmp_path / "fleet.toml"
    worker = '[[slot_tracker]]\nworker_id = {}\nmodel_name = "m"\nblock_size = 16\n'
    worker += "dp_start = 0\ndp_size = 1\n"
    fleet.write_text("".join(map(worker.format, range(1000))))  # before the faces serve
    tokens.write_text("operator read 0123456789abcdef\n")
    text = f'fleet_file = "{fleet}"\ntokens_file = "{tokens}"\n'
    with starting(tmp_path, "slot-tracker", text) as server:
        server.wait_until(lambda: reads(server.process.pid, signal.SIGHUP), "ready for signals")
        tokens.write_text("operator read fedcba9876543210\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_logged("event=reloaded")
        server.wait_logged("event=serving")

        def status(token: str) -> int:
            headers = {"authorization": f"Bearer {token}"}
            url = f"{server.base_url}/loads"
            return http_client.get(url, headers=headers).status_code

        assert status("0123456789abcdef") == 401
        assert status("fedcba9876543210") == 200


def test_a_storm_of_sighups_ends_neither_start_nor_service_nor_stop(tmp_path: Path) -> None:
    with starting(tmp_path) as server:
        server.wait_until(lambda: reads(server.process.pid, signal.SIGHUP), "ready for signals")

        def answers() -> bool:
            server.process.send_signal(signal.SIGHUP)
            return "event=serving" in server.stderr

        server.wait_until(answers, "serving")
        for _ in range(20_000):  # faster than kvd handles them
            server.process.send_signal(signal.SIGHUP)
        server.wait_healthy()
        server.wait_logged("event=reloaded")
        server.process.send_signal(signal.SIGTERM)
        while server.process.poll() is None:
            server.process.send_signal(signal.SIGHUP)
        assert server.process.returncode == 0, server.stderr
        assert "event=stopped" in server.stderr


def test_a_storm_of_sighups_ends_none_of_several_processes_that_start(tmp_path: Path) -> None:
    settings = 'upstreams = ["http://127.0.0.1:1"]\ngateway_processes = 4\n'
    with starting(tmp_path, "gateway", settings) as server:
        server.wait_until(lambda: reads(server.process.pid, signal.SIGHUP), "ready for signals")

        def serve() -> bool:
            for _ in range(10_000):  # so that some come right behind each fork
                server.process.send_signal(signal.SIGHUP)
            return server.stderr.count("event=serving") == 5  # four gateways and the kvd

        server.wait_until(serve, "serving")
        assert "event=process_ended" not in server.stderr
        assert server.stop() == 0, server.stderr


def test_a_reload_while_requests_end_is_refused_and_ends_none(tmp_path: Path) -> None:
    body = b'{"instance_id": 1, "model_name": "m"}'
    head = "POST /unregister HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    with starting(tmp_path) as server:
        server.wait_healthy()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head.encode() + body[:1])
            server.wait_healthy()  # then the other request has been read
            server.process.send_signal(signal.SIGTERM)
            server.wait_logged("event=stopping")
            server.process.send_signal(signal.SIGHUP)
            server.wait_logged("kvd is stopping")
            client.sendall(body[1:])
            assert client.recv(1000).startswith(b"HTTP/1.1 404 ")
        assert server.process.wait(STOP_DEADLINE_S) == 0, server.stderr


def test_metrics_of_both_faces_follow_the_number_of_ranks_shown(tmp_path: Path) -> None:
    faces = {
        "slot-tracker": ("/register", {"dp_start": 0, "dp_size": 1}),
        "select-service": (
            "/workers",
            {"endpoint": "http://127.0.0.1:1", "max_num_batched_tokens": 8192},
        ),
    }
    for face, (route, members) in faces.items():
        with daemon(tmp_path, face, NO_EVENTS + "metrics_ranks = 0\n") as kvd:
            body = {"worker_id": 1, "model_name": "m", "block_size": 4, **members}
            assert kvd.http.post(route, json=body).status_code == 201

            def shown(kvd: Daemon = kvd) -> bool:
                return any("worker_id=" in name for name in kvd.samples())

            assert not shown()
            kvd.reload(NO_EVENTS + "metrics_ranks = 1\n")
            assert shown(), face


def test_a_narrower_list_of_addresses_ends_connections(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as engine, daemon(tmp_path) as kvd:
        engine.linger = 0
        port = engine.bind_to_random_port("tcp://127.0.0.1")
        rank = {"instance_id": 1, "model_name": "m", "block_size": 16}
        body = {**rank, "endpoint": f"tcp://127.0.0.1:{port}"}
        assert kvd.http.post("/register", json=body).status_code == 201

        def listener() -> Any:
            return kvd.http.get("/workers").json()[0]["listeners"]["0"]

        kvd.server.wait_until(lambda: listener()["status"] == "active", "connected")
        kvd.reload('outgoing_allow = ["10.0.0.0/8"]\n')
        kvd.server.wait_until(lambda: listener()["status"] == "failed", "cut off")
        assert "127.0.0.1 is not in outgoing_allow" in listener().get("last_error", "")
        again = kvd.http.post("/register", json={**body, "instance_id": 2})
        assert again.status_code == 400
        kvd.reload('outgoing_allow = ["127.0.0.1"]\n')
        kvd.server.wait_until(lambda: listener()["status"] == "active", "connected again")


def test_a_bad_file_is_refused_and_the_old_one_kept(tmp_path: Path) -> None:
    with daemon(tmp_path) as kvd:
        kvd.reload("http_connections = 2\n")
        kvd.reload("http_connections = 3\nhttp_idle = 1\n", outcome="refused")
        kvd.server.wait_logged("level=error logger=kvd.app.reloading event=reload_refused")
        kvd.server.wait_logged("kvd.toml: http_idle: no such setting")
        with Client(kvd.server.base_url) as second:
            assert second.get("/health").status_code == 200
            assert displaced_by_another(kvd) == 1


def test_without_a_file_sighup_ends_the_process(tmp_path: Path) -> None:
    port = find_free_port()
    with (
        pytest.raises(AssertionError),
        running(tmp_path, port, "indexer", "--port", str(port)) as server,
    ):
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(5) == -signal.SIGHUP


def test_with_keys_of_replicas_alone_sighup_reads_them_again(tmp_path: Path) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    (tmp_path / "secret").write_text(secret)
    (tmp_path / "clients").write_text(public)
    flags = [
        f"--replica-sync-port={find_free_port()}",
        f"--curve-secret-key-file={tmp_path}/secret",
        f"--replica-sync-client-keys={tmp_path}/clients",
    ]
    with running_kvd(tmp_path, *flags, face="slot-tracker") as server:
        server.process.send_signal(signal.SIGHUP)
        server.wait_logged('event=reloaded changed=""')
        (tmp_path / "clients").write_text(zmq.curve_keypair()[0].decode())
        (tmp_path / "secret").write_text(zmq.curve_keypair()[1].decode())
        server.process.send_signal(signal.SIGHUP)
        keys = "changed=replica_sync_client_keys"
        server.wait_logged(f"event=reloaded {keys}")
        waits = "event=restart_needed settings=curve_secret_key_file"
        server.wait_logged(waits)
        (tmp_path / "clients").write_text("no key")
        server.process.send_signal(signal.SIGHUP)
        server.wait_logged("event=reload_refused")


def test_other_weights_choose_another_worker(tmp_path: Path) -> None:
    """Both the fast path, for plain requests, and the handler use the new weights."""
    text = "router_use_kv_events = false\nrouter_kv_overlap_score_weight = {}\n"
    prompt = list(range(64))
    with daemon(tmp_path, "select-service", text.format(1)) as kvd:
        http = kvd.http
        for worker_id in (1, 2):
            body = {
                "worker_id": worker_id,
                "model_name": "m",
                "endpoint": f"http://127.0.0.1:{worker_id}",
                "block_size": 4,
                "max_num_batched_tokens": 8192,
                "total_kv_blocks": 1000,
            }
            assert http.post("/workers", json=body).status_code == 201, body

        def reserve(name: str, tokens: list[int], worker_id: int) -> None:
            pinned = {"worker_id": worker_id, "dp_rank": 0}
            body = {
                "model_name": "m",
                "token_ids": tokens,
                "reservation_id": name,
                "pinned_worker": pinned,
            }
            answer = http.post("/select_and_reserve", json=body)
            assert answer.is_success and answer.json()["worker_id"] == worker_id

        reserve("gone", prompt, 1)  # predicted to be cached from now on
        assert http.delete("/reservations/gone").is_success
        reserve("stays", [1, 2, 3, 4], 1)

        def chosen() -> set[int]:
            plain = {"model_name": "m", "token_ids": prompt}
            bodies = plain, {**plain, "allowed_worker_ids": [1, 2]}
            return {http.post("/select", json=body).json()["worker_id"] for body in bodies}

        assert chosen() == {1}
        kvd.reload(text.format(0))
        assert chosen() == {2}
        kvd.reload(text.format(1))
        assert chosen() == {1}


def test_reloads_under_load_lose_no_request(tmp_path: Path) -> None:
    with daemon(tmp_path) as kvd:
        stop, outcomes = Event(), list[int]()

        def ask() -> None:
            with Client(kvd.server.base_url) as kept:
                while not stop.is_set():
                    outcomes.append(kept.get("/health").status_code)
                    anew = http_client.get(f"{kvd.server.base_url}/workers")
                    outcomes.append(anew.status_code)

        clients = [Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        number = 0
        # On a machine with one core, the clients may be slow to begin.
        while number < 20 or (len(outcomes) <= 20 and any(each.is_alive() for each in clients)):
            if number % 3 == 2:
                kvd.reload("http_idle_s = -1\n", outcome="refused")
            else:
                kvd.reload(f"http_idle_s = {50 + number}\nrouter_temperature = 0.{number}\n")
            number += 1
        stop.set()
        for client in clients:
            client.join()
        assert set(outcomes) == {200} and len(outcomes) > 20


RANK = (
    '[[indexer]]\ninstance_id = {0}\nmodel_name = "m"\nblock_size = 16\n'
    'endpoint = "tcp://127.0.0.1:{0}"\n'
)


def test_one_sighup_is_all_or_nothing(tmp_path: Path) -> None:
    """Changes of settings, tokens and the fleet are applied together, or none of them is."""
    fleet, tokens = tmp_path / "fleet.toml", tmp_path / "tokens"
    text = f'fleet_file = "{fleet}"\ntokens_file = "{tokens}"\nhttp_idle_s = {{}}\n'
    fleet.write_text(RANK.format(1))
    tokens.write_text("operator admin,read 0123456789abcdef\n")
    with daemon(tmp_path, text=text.format(50)) as kvd:
        kvd.http.headers["authorization"] = "Bearer 0123456789abcdef"

        def listed() -> list[int]:
            answer = kvd.http.get("/workers").raise_for_status().json()
            return sorted(each["instance_id"] for each in answer)

        def change(idle: str, token: str, *numbers: int, outcome: str = "applied") -> None:
            fleet.write_text("".join(map(RANK.format, numbers)))
            tokens.write_text(f"operator admin,read {token}\n")
            kvd.reload(text.format(idle), outcome)

        change("51", "fedcba9876543210", 1, 70_000, outcome="refused")
        kvd.server.wait_logged(f'reason="{fleet}: indexer, entry 2: ')
        change("-1", "fedcba9876543210", 1, 2, outcome="refused")
        kvd.server.wait_logged("http_idle_s: expected seconds")
        change("51", "short", 1, 2, outcome="refused")
        kvd.server.wait_logged(f"{tokens}")
        assert "event=reloaded" not in kvd.server.stderr
        assert listed() == [1]
        # Only the new token can read the metrics that show this reload, so wait for its line.
        fleet.write_text(RANK.format(1) + RANK.format(2))
        tokens.write_text("operator admin,read fedcba9876543210\n")
        kvd.path.write_text(text.format(51))
        kvd.server.process.send_signal(signal.SIGHUP)
        kvd.server.wait_logged('event=reloaded changed="http_idle_s tokens_file fleet_file"')
        assert kvd.http.get("/workers").status_code == 401
        kvd.http.headers["authorization"] = "Bearer fedcba9876543210"
        kvd.server.wait_until(lambda: listed() == [1, 2], "registered")
        change("51", "fedcba9876543210", 2)
        kvd.server.wait_logged("event=reloaded changed=fleet_file")
