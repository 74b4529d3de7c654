#!/usr/bin/python3
"""Installs kvd inside the machine that packaging/test has booted, and uses it step by step.

usage: probe.py FOLDER, which holds first.deb, second.deb, cert.pem and key.pem. This program writes
`log` there and, at the end, `result`.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import pwd
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

PORTS: dict[str, int] = {}  # of all faces, by name; known once kvd is installed
CONFIG = Path("/etc/kvd/kvd.toml")
MOST_EXPOSED = 1.2
LOADERS = 6  # threads that send requests
STEPS: list[Callable[[Path], str]] = []


def step(function: Callable[[Path], str]) -> Callable[[Path], str]:
    """Marks a step, which returns a remark for the log; steps run in the order of this file."""
    STEPS.append(function)
    return function


def run(*command: str, fails: bool = False) -> str:
    """Returns what a command prints; asserts that it succeeds, or that it `fails`."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    output = ended.stdout + ended.stderr
    assert (ended.returncode != 0) == fails, f"{' '.join(command)}: {ended.returncode}\n{output}"
    return output


def shown(name: str, unit: str = "kvd.service") -> str:
    return run("systemctl", "show", "--value", "-p", name, unit).strip()


def ask(
    port: int, method: str, path: str, body: Any = None, wait: float = 30, token: str = ""
) -> tuple[int, str]:
    """Makes one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=wait)
    try:
        headers = {} if body is None else {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def answer_of(port: int, method: str, path: str, body: Any = None) -> Any:
    status, text = ask(port, method, path, body)
    assert 200 <= status < 300, f"{method} {path}: {status} {text}"
    return json.loads(text)


def until(condition: Callable[[], bool], what: str, seconds: float = 30) -> float:
    """Waits for a condition; returns how long that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"not {what} after {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - begin


def answers(port: int) -> bool:
    try:
        return ask(port, "GET", "/health", wait=5)[0] == 200
    except OSError:
        return False


def journal(*narrowed: str) -> str:
    return run("journalctl", "-u", "kvd", "-o", "cat", "--no-pager", *narrowed)


def restart() -> None:
    run("systemctl", "reset-failed", "kvd")  # more starts here than the unit allows in a minute
    run("systemctl", "restart", "kvd")


def forget() -> None:
    """Restarts kvd without the state that it has kept."""
    run("systemctl", "stop", "kvd")
    for path in Path("/var/lib/kvd").iterdir():
        path.unlink()
    run("systemctl", "start", "kvd")


def reloaded() -> str:
    """Reloads kvd, which must succeed; returns what the journal says about it."""
    return last_reload(fails=False)


def refused() -> str:
    """Reloads kvd, which must refuse; returns what the journal says about it."""
    return last_reload(fails=True)


def last_reload(fails: bool) -> str:
    before = len(journal())
    run("systemctl", "reload", "kvd", fails=fails)
    beginning = "nothing has changed: " if fails else "reloaded: "
    until(lambda: beginning in journal()[before:], "in the journal")
    return journal()[before:]


def samples(port: int) -> dict[str, float]:
    lines = ask(port, "GET", "/metrics")[1].splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


class Load:
    """Clients that connect anew for every request, to every face."""

    def __init__(self) -> None:
        self.served = 0
        self.failures: list[str] = []
        self.slowest = 0.0
        self.stop = threading.Event()

    def work(self, number: int) -> None:
        ports = list(PORTS.values())
        while not self.stop.is_set():
            number += 1
            begin = time.monotonic()
            try:
                status, _ = ask(ports[number % len(ports)], "GET", "/health")
                assert status == 200, status
                self.served += 1
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.failures.append(repr(error))
            self.slowest = max(self.slowest, time.monotonic() - begin)

    def more(self) -> None:
        """Waits for requests that began after now."""
        before = self.served
        until(lambda: self.served > before + 50 * LOADERS, "served")


@contextmanager
def load() -> Iterator[Load]:
    """Sends requests while the block runs; every one must be answered."""
    asking = Load()
    threads = [threading.Thread(target=asking.work, args=(each,)) for each in range(LOADERS)]
    for thread in threads:
        thread.start()
    try:
        yield asking
    finally:
        asking.stop.set()
        for thread in threads:
            thread.join()
    failures = asking.failures
    assert not failures, f"{len(failures)} of {asking.served} failed: {failures[:5]}"


# ---- steps


@step
def install(folder: Path) -> str:
    run("dpkg", "-i", str(folder / "first.deb"))
    assert shown("ActiveState") == "active", journal()
    assert run("kvd", "config", "check", "--config", str(CONFIG)) == "ok\n"
    settings = run("kvd", "config", "show", "--config", str(CONFIG))
    faces = re.findall(r'^(\w+)_bind = "127\.0\.0\.1:(\d+)"', settings, re.MULTILINE)
    PORTS.update({face: int(port) for face, port in faces})
    assert all(map(answers, PORTS.values())), PORTS
    user = pwd.getpwnam("kvd")
    state = Path("/var/lib/kvd").stat()
    assert (state.st_mode & 0o7777, state.st_uid) == (0o750, user.pw_uid)
    assert Path("/etc/kvd/credentials").stat().st_mode & 0o7777 == 0o700
    return f"{run('kvd', '--version').strip()} serves {', '.join(PORTS)}"


@step
def sandbox(folder: Path) -> str:
    status = Path(f"/proc/{shown('MainPID')}/status").read_text()
    found = dict(line.split(":\t", 1) for line in status.splitlines())
    assert found["NoNewPrivs"] == "1" and found["Seccomp"] == "2", status
    assert int(found["CapEff"], 16) == int(found["CapBnd"], 16) == 0, status
    assert found["Uid"].split()[0] == str(pwd.getpwnam("kvd").pw_uid)
    last = run("systemd-analyze", "security", "--no-pager", "kvd.service").strip().splitlines()[-1]
    score = float(re.findall(r"[0-9]+\.[0-9]", last)[0])
    assert score <= MOST_EXPOSED, last
    return f"systemd-analyze security: {score}"


def cache_and_find(tokens: list[int]) -> float:
    """Has an engine publish the blocks of a prompt; returns the seconds until two faces find them.

    The engine is registered on the indexer, and as a publisher of another model on the conductor.
    """
    import msgpack
    import zmq

    indexer, conductor = PORTS["indexer"], PORTS["conductor"]
    with zmq.Context() as context, context.socket(zmq.PUB) as engine:
        engine.linger = 0
        port = engine.bind_to_random_port("tcp://127.0.0.1")
        body = {
            "instance_id": 7,
            "endpoint": f"tcp://127.0.0.1:{port}",
            "model_name": "m",
            "block_size": 4,
        }
        answer_of(indexer, "POST", "/register", body)
        publisher = {
            "instance_id": "engine",
            "type": "vLLM",
            "endpoint": f"tcp://127.0.0.1:{port}",
            "model": "k",
            "block_size": 4,
            "dp_rank": 0,
        }
        answer_of(conductor, "POST", "/register", publisher)
        event = ["BlockStored", [11, 12, 13, 14], None, tokens, 4, None]
        batch = msgpack.packb([0.0, [event], 0])
        numbers = itertools.count()

        def found() -> bool:
            engine.send_multipart([b"", next(numbers).to_bytes(8, "big"), batch])
            answer = answer_of(indexer, "POST", "/query", {"model_name": "m", "token_ids": tokens})
            asked = {"model": "k", "block_size": 4, "token_ids": tokens}
            rows = answer_of(conductor, "POST", "/query", asked).get("default", {})
            (row,) = rows.values() or ({"GPU": 0},)
            return answer["scores"].get("7") == {"0": 16} and row["GPU"] == 16

        return until(found, "seen by the indexer and the conductor")


def book() -> None:
    """Adds a request at the slot tracker, which must count it."""
    tracker = PORTS["slot_tracker"]
    body = {"model_name": "m", "worker_id": 7, "block_size": 4, "dp_start": 0, "dp_size": 1}
    answer_of(tracker, "POST", "/register", body)
    body = {
        "model_name": "m",
        "request_id": "r",
        "worker_id": 7,
        "dp_rank": 0,
        "sequence_hashes": [1, 2, 3],
        "new_isl_tokens": 12,
    }
    answer_of(tracker, "POST", "/add", body)
    (row,) = answer_of(tracker, "GET", "/loads")
    assert "3" in json.dumps(row), row


def select(tokens: list[int]) -> None:
    """Has the selection service choose its only worker."""
    selection = PORTS["selection"]
    body = {
        "worker_id": 7,
        "model_name": "n",
        "endpoint": "http://127.0.0.1:9",
        "kv_events_endpoint": "tcp://127.0.0.1:9",
        "block_size": 4,
        "max_num_batched_tokens": 8192,
        "total_kv_blocks": 1000,
    }
    answer_of(selection, "POST", "/workers", body)
    body = {"model_name": "n", "token_ids": tokens}
    assert answer_of(selection, "POST", "/select", body)["worker_id"] == 7


@step
def query_every_face(folder: Path) -> str:
    """An engine publishes four blocks; each face answers about them, or about its bookings."""
    sys.path.insert(0, "/usr/lib/kvd")  # msgpack and zmq
    tokens = list(range(16))
    seen = cache_and_find(tokens)
    book()
    select(tokens)
    for port in PORTS.values():
        assert samples(port)
    return f"an engine's blocks after {seen:.2f} s"


@step
def credentials(folder: Path) -> str:
    secret = Path("/etc/kvd/credentials/token")
    secret.write_text("precious")
    secret.chmod(0o600)
    restart()
    passed = Path("/run/credentials/kvd.service/kvd_token")
    assert passed.read_text() == "precious"
    reading = ["setpriv", "--reuid=kvd", "--clear-groups", "cat"]
    assert run(*reading, str(passed)) == "precious"
    run(*reading, str(secret), fails=True)
    run("setpriv", "--reuid=nobody", "--clear-groups", "cat", str(passed), fails=True)
    return "kvd alone reads them"


def opened(token: str) -> int:
    """Returns the status of a request that needs a token if kvd has any."""
    return ask(8090, "GET", "/workers", token=token)[0]


@step
def tokens(folder: Path) -> str:
    """Tokens in a credential change at a start; tokens in a file of their own at a reload."""
    first, second, third = (f"{letter}" * 32 for letter in "abc")
    credential = Path("/etc/kvd/credentials/tokens")
    credential.write_text(f"operator read,lifecycle,admin {first}\n")
    credential.chmod(0o600)
    restart()
    assert answers(8090)  # probes need none
    assert (opened(""), opened(second), opened(first)) == (401, 401, 200)
    credential.write_text(f"operator read,lifecycle,admin {second}\n")
    run("systemctl", "reload", "kvd")
    assert (opened(first), opened(second)) == (200, 401)  # systemd passes it on only at a start
    restart()
    assert (opened(first), opened(second)) == (401, 200)

    kept = CONFIG.read_text()
    filed = Path("/etc/kvd/tokens")
    filed.write_text(f"operator read,lifecycle,admin {second}\n")
    filed.chmod(0o640)
    shutil.chown(filed, "root", "kvd")
    CONFIG.write_text(kept + f'\ntokens_file = "{filed}"\n')
    assert "reloaded: tokens_file" in reloaded()
    pid = shown("MainPID")
    filed.write_text(f"operator read,lifecycle,admin {third}\n")
    reloaded()
    assert (opened(third), opened(second), opened("")) == (200, 401, 401)
    assert shown("MainPID") == pid
    filed.write_text("operator read short\n")
    assert "line 1, operator: a token must" in refused()
    shutil.chown(filed, "root", "root")  # the command, run by root, could read it; kvd cannot
    assert f"cannot read {filed}: Permission denied" in refused()
    assert opened(third) == 200
    CONFIG.write_text(kept)
    credential.unlink()
    filed.unlink()
    restart()
    assert opened("") == 200
    return "401 without, 200 with; a changed file holds after a reload, or that fails"


RANK = """
[[indexer]]
instance_id = {0}
model_name = "fleet"
block_size = 16
endpoint = "tcp://127.0.0.1:{0}"
"""


@step
def fleet(folder: Path) -> str:
    kept = CONFIG.read_text()
    path = Path("/etc/kvd/fleet.toml")

    def write(*numbers: int) -> None:
        new = path.with_suffix(".new")
        new.write_text("".join(map(RANK.format, numbers)))
        new.rename(path)

    def listed() -> list[int]:
        workers = answer_of(8090, "GET", "/workers")
        return sorted(each["instance_id"] for each in workers if each["model_name"] == "fleet")

    write(1)
    CONFIG.write_text(kept + f'\nfleet_file = "{path}"\n')
    restart()
    assert listed() == [1]  # kvd is ready only once it has read the file
    write(1, 2)
    seconds = until(lambda: listed() == [1, 2], "followed")
    CONFIG.write_text(CONFIG.read_text() + 'log_level = "debug"\n')
    write(1, 2, 70_000)
    assert "fleet.toml: indexer, entry 3: " in refused()
    write(2)
    assert "reloaded: log_level" in reloaded()  # kvd may have noticed the fleet file by itself
    until(lambda: listed() == [2], "as the file says")
    CONFIG.write_text(kept)
    path.unlink()
    restart()
    return f"followed after {seconds:.1f} s without a word; one reload for settings and fleet"


KEYED = """
[[indexer]]
instance_id = 7
model_name = "all"
block_size = 4
endpoint = "tcp://127.0.0.1:{engine}"
curve_server_key = {engine_key}

[[slot_tracker]]
worker_id = 7
model_name = "all"
block_size = 4
dp_start = 0
dp_size = 1

[[replica]]
endpoint = "tcp://127.0.0.1:5601"
curve_server_key = {replica_key}
"""

EVERYTHING = """
indexer_bind = ["127.0.0.1:8090", "tls:127.0.0.1:9443", "unix:/run/kvd/indexer"]
tls_certfile = "/etc/kvd/cert.pem"
tls_keyfile = "/run/credentials/kvd.service/kvd_tls.key"
unix_socket_group = "kvd"
peers = ["http://127.0.0.1:9090"]
peers_token_file = "/run/credentials/kvd.service/kvd_peer"
fleet_file = "/etc/kvd/fleet.toml"
replica_sync_port = 5600
curve_secret_key_file = "/run/credentials/kvd.service/kvd_curve"
replica_sync_client_keys = "/etc/kvd/replicas"
"""


class AllScopes:
    """A client with the token of `everything_that_opens`, of the faces of either kvd, by port."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._requests = itertools.count()

    def call(self, port: int, method: str, path: str, body: Any = None) -> Any:
        status, text = ask(port, method, path, body, token=self._token)
        assert 200 <= status < 300, f"{method} {path}: {status} {text}"
        return json.loads(text)

    def finds(self, port: int, *tokens: int) -> bool:
        """Returns whether an indexer has all these tokens."""
        answer = self.call(port, "POST", "/query", {"model_name": "all", "token_ids": list(tokens)})
        return bool(answer["scores"].get("7") == {"0": len(tokens)})

    def blocks(self, port: int) -> float:
        """Returns the blocks that a slot tracker counts."""
        rows: list[dict[str, Any]] = self.call(port, "GET", "/loads")
        loads = [row["active_decode_blocks"] for row in rows if row["model_name"] == "all"]
        return float(sum(loads))

    def passes_on(self, port: int, other: int, before: float) -> bool:
        """Adds a request at one slot tracker; returns whether another counts more than before."""
        number = next(self._requests)
        body = {
            "model_name": "all",
            "request_id": f"r{number}",
            "worker_id": 7,
            "dp_rank": 0,
            "sequence_hashes": [2 * number, 2 * number + 1],
            "new_isl_tokens": 8,
        }
        self.call(port, "POST", "/add", body)
        return self.blocks(other) > before


class CurveEngine:
    """An engine that speaks CURVE."""

    def __init__(self, context: Any, secret: str) -> None:
        import zmq

        self._socket = context.socket(zmq.PUB)
        self._socket.linger, self._socket.curve_server = 0, True
        self._socket.curve_secretkey = secret.encode()
        self._numbers = itertools.count()
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")

    def publish(self, hash: int, *tokens: int) -> None:
        import msgpack

        batch = msgpack.packb([0.0, [["BlockStored", [hash], None, tokens, 4, None]], 0])
        self._socket.send_multipart([b"", next(self._numbers).to_bytes(8, "big"), batch])

    def close(self) -> None:
        self._socket.close()


@contextmanager
def second_kvd(settings: dict[str, object]) -> Iterator[None]:
    """Runs a kvd beside the service, until the block ends; it must end well then."""
    flags = [f"--{name}={value}" for name, value in settings.items()]
    with subprocess.Popen(["kvd", "serve", *flags]) as second:
        try:
            until(lambda: answers(9090), "serving beside")
            yield
        finally:
            second.terminate()
    assert second.returncode == 0


def recover_and_replicate(
    client: AllScopes, engine: CurveEngine, fleet: str, own_key: str, configuration: str
) -> None:
    """Starts the service, with this configuration, beside a second kvd that the fleet knows.

    It recovers the engine's blocks from the second kvd, receives more, and exchanges requests.
    """
    (worker,), (slots,) = (tomllib.loads(fleet)[table] for table in ("indexer", "slot_tracker"))
    client.call(9090, "POST", "/register", worker)
    client.call(9091, "POST", "/register", slots)
    body = {"endpoint": "tcp://127.0.0.1:5600", "curve_server_key": own_key}
    client.call(9091, "POST", "/replica_sync/register_peer", body)

    # Messages published before a subscriber is connected are lost, so publish again.
    def received(port: int, hash: int, *tokens: int) -> bool:
        engine.publish(hash, *tokens)
        return client.finds(port, *tokens)

    until(lambda: received(9090, 11, 1, 2, 3, 4), "heard beside")
    CONFIG.write_text(configuration)
    forget()  # a fresh snapshot would go before the peer
    assert all(map(answers, PORTS.values())), journal()
    assert client.finds(8090, 1, 2, 3, 4), "not recovered"  # published before the start
    until(lambda: received(8090, 12, 5, 6, 7, 8), "heard")
    until(lambda: client.passes_on(8091, 9091, 0), "told to the replica")
    own = client.blocks(8091)
    until(lambda: client.passes_on(9091, 8091, own), "told by the replica")


def connect_by_tls_and_unix(certificate: Path) -> None:
    """Asks over TLS and the Unix socket, which only members of its group may use."""
    sock = Path("/run/kvd/indexer")
    assert (sock.stat().st_mode & 0o777, sock.group()) == (0o660, "kvd")
    connect = f"import socket; socket.socket(socket.AF_UNIX).connect('{sock}')"
    other_user = ["setpriv", "--reuid=nobody", "--regid=nogroup"]
    run(*other_user, "--groups=kvd", "python3", "-c", connect)
    run(*other_user, "--clear-groups", "python3", "-c", connect, fails=True)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with (
        socket.create_connection(("127.0.0.1", 9443)) as tcp,
        trusting.wrap_socket(tcp, server_hostname="127.0.0.1") as tls,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.connect(str(sock))
        for each in (tls, unix):
            each.sendall(b"GET /health HTTP/1.0\r\nhost: localhost\r\n\r\n")
            assert each.recv(4096).startswith(b"HTTP/1.1 200 ")


@step
def everything_that_opens(folder: Path) -> str:
    """Every face, TLS, a Unix socket with a group, tokens, CURVE, replica sync, a peer, a fleet.

    A second kvd, not a service, is the peer from which the service recovers, and its replica. Both
    receive the events of an engine that speaks CURVE.
    """
    import zmq

    kept, token = CONFIG.read_text(), "t" * 32
    pairs = [tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(3)]
    (own_key, own_secret), (replica_key, replica_secret), (engine_key, engine_secret) = pairs
    written: list[Path] = []

    def write(path: Path, text: str) -> str:
        path.write_text(text)
        path.chmod(0o640)
        shutil.chown(path, "root", "kvd")
        written.append(path)
        return str(path)

    settings, secrets = CONFIG.parent, CONFIG.parent / "credentials"
    tokens = write(secrets / "tokens", f"all read,lifecycle,admin {token}\n")
    write(secrets / "peer", token)
    write(secrets / "curve", own_secret)
    write(secrets / "tls.key", (folder / "key.pem").read_text())
    write(settings / "cert.pem", (folder / "cert.pem").read_text())
    write(settings / "replicas", replica_key)
    beside = {
        "indexer-bind": "127.0.0.1:9090",
        "slot-tracker-bind": "127.0.0.1:9091",
        "selection-bind": "off",
        "conductor-bind": "off",
        "tokens-file": tokens,
        "replica-sync-port": 5601,
        "curve-secret-key-file": write(folder / "secret", replica_secret),
        "replica-sync-client-keys": write(folder / "keys", own_key),
    }
    with zmq.Context() as context, closing(CurveEngine(context, engine_secret)) as engine:
        keys = {"engine": engine.port, "engine_key": engine_key, "replica_key": replica_key}
        fleet = KEYED.format(**{name: json.dumps(value) for name, value in keys.items()})
        write(settings / "fleet.toml", fleet)
        with second_kvd(beside):
            recover_and_replicate(AllScopes(token), engine, fleet, own_key, kept + EVERYTHING)
    connect_by_tls_and_unix(folder / "cert.pem")
    asked = ["kvd", "status", "--json", "--interval=0.1", "--token-file", str(secrets / "peer")]
    shown = json.loads(run(*asked, fails=True))  # the engine has gone: its stream is not exact
    assert shown["indexer"]["instances"] == 1 and shown["slot_tracker"]["requests"] >= 2, shown
    CONFIG.write_text(kept)
    for path in written:
        path.unlink()
    restart()
    return "recovered from a peer, heard by CURVE, told to a replica and by it; TLS, Unix, tokens"


@step
def status(folder: Path) -> str:
    shown = json.loads(run("kvd", "status", "--json", "--interval", "0.1"))
    assert len(shown["faces"]) == len(PORTS) and shown["resident_bytes"], shown
    run("kvd", "status", "--indexer-bind", "127.0.0.1:1", fails=True)
    return f"{shown['resident_bytes'] / 2**20:.0f} MiB resident"


@step
def reload(folder: Path) -> str:
    applied = 'kvd_config_reloads_total{outcome="applied"}'
    outcome = 'kvd_config_reloads_total{outcome="refused"}'
    kept = CONFIG.read_text()
    pid = shown("MainPID")
    CONFIG.write_text(kept + '\nlog_level = "debug"\nhttp_connections = 900\n')
    assert "reloaded: log_level http_connections" in reloaded()
    assert samples(8090)[applied] == 1
    CONFIG.write_text(kept + "\nlog_levle = 1\n")
    assert "log_levle: no such setting; did you mean log_level?" in refused()
    assert samples(8090)[outcome] == 1
    os.kill(int(pid), signal.SIGHUP)
    until(lambda: samples(8090)[outcome] == 2, "refused")
    until(lambda: "event=reload_refused" in journal("-p", "err"), "told the journal as an error")
    assert "event=reloaded" not in journal("-p", "err")
    CONFIG.write_text(kept + '\nlog_level = "info"\n# edited\n')
    reloaded()
    assert samples(8090)[applied] == 2
    assert shown("MainPID") == pid and shown("ActiveState") == "active"
    return "applied, and a bad file refused, by the command with the reason"


@step
def watchdog(folder: Path) -> str:
    """A process that hangs is killed, logs where it was, and is started again."""
    drop_in = Path("/etc/systemd/system/kvd.service.d/probe.conf")
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nWatchdogSec=2\n")
    run("systemctl", "daemon-reload")
    restart()
    pid = int(shown("MainPID"))
    begin = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    until(lambda: shown("NRestarts") == "1", "restarted")
    until(lambda: answers(8090), "serving again")
    seconds = time.monotonic() - begin
    assert "Watchdog timeout" in journal()
    assert "Fatal Python error: Aborted" in journal()
    assert int(shown("MainPID")) != pid
    drop_in.unlink()
    run("systemctl", "daemon-reload")
    restart()
    return f"serving again {seconds:.1f} s after it stood still, limit 2 s"


@step
def what_comes_back(folder: Path) -> str:
    """kvd is started again after any number of crashes, but not with a wrong configuration."""
    restart()
    kills = 6
    for number in range(kills):
        pid = shown("MainPID")
        os.kill(int(pid), signal.SIGKILL)
        until(lambda: shown("MainPID") not in (pid, "0"), "started")  # noqa: B023
        until(lambda: answers(8090), f"serving after {number + 1} crashes")
    kept = CONFIG.read_text()
    CONFIG.write_text(kept + "\nlog_levle = 1\n")
    run("systemctl", "restart", "kvd", fails=True)
    assert (shown("ActiveState"), shown("Result")) == ("failed", "exit-code"), journal()
    assert shown("ExecMainStatus") == "78"
    CONFIG.write_text(kept)
    run("systemctl", "start", "kvd")
    assert answers(8090)
    return f"{kills} crashes in a row, each followed by a start; none tried with a bad file"


@step
def restarts_under_load(folder: Path) -> str:
    run("systemctl", "stop", "kvd")
    run("systemctl", "enable", "--now", "kvd.socket")
    with load() as asking:  # the first request starts kvd
        asking.more()
        for _ in range(3):
            restart()
            asking.more()
    assert shown("ActiveState") == "active"
    return (
        f"3 restarts, {asking.served} of {asking.served} answered, slowest {asking.slowest:.2f} s"
    )


@step
def upgrade_under_load(folder: Path) -> str:
    """No request is refused, and registrations and bookings outlive the upgrade."""
    pid = shown("MainPID")
    tracker = PORTS["slot_tracker"]
    place = {"model_name": "kept", "worker_id": 7}
    answer_of(tracker, "POST", "/register", place | {"block_size": 4, "dp_start": 0, "dp_size": 1})
    prompt = {"dp_rank": 0, "sequence_hashes": [1, 2, 3], "new_isl_tokens": 12}
    answer_of(tracker, "POST", "/add", place | prompt | {"request_id": "r"})
    loads = answer_of(tracker, "GET", "/loads?model_name=kept")
    with load() as asking:
        asking.more()
        run("dpkg", "-i", "--force-confold", str(folder / "second.deb"))
        asking.more()
    assert answer_of(tracker, "GET", "/loads?model_name=kept") == loads != []
    answer_of(tracker, "POST", "/free", {"model_name": "kept", "request_id": "r"})
    assert "ok" in run("kvd", "state", "verify", "/var/lib/kvd")
    assert shown("MainPID") != pid and shown("ActiveState") == "active"
    assert CONFIG.read_text().endswith("# edited\n")
    version = run("dpkg-query", "-Wf", "${Version}", "kvd")
    count = asking.served
    return f"{version}, {count} of {count} answered, slowest {asking.slowest:.2f} s, file kept"


@step
def downgrade(folder: Path) -> str:
    """The earlier version takes the file of the later one, and refuses a setting that it lacks."""
    run("dpkg", "-i", "--force-confold", str(folder / "first.deb"))
    assert shown("ActiveState") == "active" and all(map(answers, PORTS.values()))
    kept = CONFIG.read_text()
    CONFIG.write_text(kept + "\nof_a_later_version = 1\n")
    assert "of_a_later_version: no such setting" in refused()
    assert all(map(answers, PORTS.values()))
    CONFIG.write_text(kept)
    return "the file kept, a setting of a later version refused"


@step
def remove(folder: Path) -> str:
    run("dpkg", "-r", "kvd")
    assert shown("ActiveState") == "inactive" and not any(map(answers, PORTS.values()))
    assert not Path("/usr/lib/kvd").exists(), run("find", "/usr/lib/kvd")
    assert CONFIG.exists() and Path("/var/lib/kvd").exists()
    return "configuration and state stay"


@step
def purge(folder: Path) -> str:
    run("dpkg", "-P", "kvd")
    found = run("find", "/etc", "/usr", "/var", "/run", "-xdev", "-iname", "*kvd*").splitlines()
    # Records of systemd and Debian about everything that was ever installed stay.
    left = [line for line in found if not line.startswith(("/var/lib/systemd/", "/run/systemd/"))]
    assert not left, left
    assert pwd.getpwnam("kvd")
    return "nothing left but the user"


def main(folder: Path) -> int:
    failed = False
    with (folder / "log").open("w", buffering=1) as log:
        for each in STEPS:
            begin = time.monotonic()
            try:
                remark = each(folder)
            except Exception as error:
                failed, remark = True, f"FAILED: {error!r}"
            seconds = time.monotonic() - begin
            print(f"{seconds:6.1f} s  {each.__name__.replace('_', ' '):22} {remark}", file=log)
            if failed:
                print(journal()[-6000:], file=log)
                break
    (folder / "result").write_text("failed" if failed else "passed")
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
