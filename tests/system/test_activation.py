"""Sockets and messages of a service manager, whose part the test plays."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from kvd.cli import face_client
from kvd.cli.main import main
from kvd.platform import activation
from tests.support.forking import Forked, fork
from tests.support.ports import find_free_port
from tests.support.processes import POLL_S, START_DEADLINE_S, clean_environment

# Moves descriptors to the numbers that systemd uses, puts its own id in the environment, execs kvd.
EXEC = """
import fcntl, json, os, sys
descriptors, command = json.loads(sys.argv[1])
high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in descriptors]
for at, fd in enumerate(high, start=3):
    os.dup2(fd, at)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(high))}
os.execv(command[0], command)
"""


def listening(stack: ExitStack, family: int = socket.AF_INET, path: str = "") -> socket.socket:
    sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    sock.bind(path or ("127.0.0.1", 0))
    sock.listen(64)
    return sock


def port_of(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


class Manager:
    """Starts kvd again and again on the same sockets, and receives its messages."""

    def __init__(self, folder: Path, sockets: list[socket.socket], names: str | None) -> None:
        self._folder = folder
        self._sockets = sockets
        self._names = names
        self._messages = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._messages.bind(os.fspath(folder / "notify"))
        self._messages.settimeout(START_DEADLINE_S)

    def start(self, *arguments: str, **environ: str) -> Forked:
        descriptors = [sock.fileno() for sock in self._sockets]
        with open(os.devnull, "r+b") as null, (self._folder / "stderr").open("ab") as errors:
            return fork(
                ["kvd", *arguments],
                self._environ(environ),
                (null.fileno(), null.fileno(), errors.fileno()),
                *descriptors,
            )

    def execute(self, *arguments: str, **environ: str) -> subprocess.Popen[bytes]:
        """Executes the command, as a real manager does, rather than forking."""
        descriptors = [sock.fileno() for sock in self._sockets]
        command = [sys.executable, "-m", "kvd", *arguments]
        with (self._folder / "stderr").open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-c", EXEC, json.dumps([descriptors, command])],
                pass_fds=descriptors,
                env=self._environ(environ),
                stderr=errors,
            )

    def _environ(self, further: dict[str, str]) -> dict[str, str]:
        """Returns the environment, except the process id, which only the new process knows."""
        further["NOTIFY_SOCKET"] = os.fspath(self._folder / "notify")
        if self._names is not None:
            further["LISTEN_FDNAMES"] = self._names
        return clean_environment(**further)

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()

    def heard(self, message: bytes) -> bytes:
        """Waits for the next message that contains this text, and returns it."""
        deadline = time.monotonic() + START_DEADLINE_S
        while message not in (received := self._messages.recv(1000)):
            assert time.monotonic() < deadline, f"no {message!r}: {self.stderr}"
        return received

    def close(self) -> None:
        self._messages.close()


@contextmanager
def managed(
    folder: Path, sockets: list[socket.socket], names: str | None, *arguments: str, **environ: str
) -> Iterator[tuple[Manager, Forked]]:
    """Runs a kvd, yields once it is ready; it must end with exit code 0 on SIGTERM."""
    manager = Manager(folder, sockets, names)
    process = manager.start(*arguments, **environ)
    try:
        manager.heard(b"READY=1")
        yield manager, process
        process.terminate()
        manager.heard(b"STOPPING=1")
        assert process.wait(START_DEADLINE_S) == 0, manager.stderr
    finally:
        process.kill()
        process.wait()
        manager.close()


def get(port: int, path: str = "/health") -> int:
    """Makes a request on a connection of its own; an httpx client costs 30 ms to make."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_DEADLINE_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_sockets_go_to_the_faces_they_are_named_after(tmp_path: Path) -> None:
    with ExitStack() as stack:
        path = os.fspath(tmp_path / "kvd.sock")
        sockets = [listening(stack) for _ in range(3)]
        sockets.append(listening(stack, socket.AF_UNIX, path))
        names = "selection:slot-tracker:indexer:indexer"
        with managed(tmp_path, sockets, names, "serve", "--conductor-bind=off") as (manager, _):
            selection, slot_tracker, indexer = map(port_of, sockets[:3])
            assert get(selection, "/select") == 405
            assert get(slot_tracker, "/potential_loads") == 405
            assert get(indexer, "/query") == 405
            transport = httpx.HTTPTransport(uds=path, verify=False)
            with httpx.Client(transport=transport) as client:
                assert client.get("http://kvd/workers").status_code == 200
            assert f"127.0.0.1:{indexer} unix:{path}" in manager.stderr
        assert os.path.exists(path)  # the file is the manager's


@pytest.mark.parametrize("names", ["kvd.socket:kvd.socket", None])
def test_other_names_go_by_the_address(tmp_path: Path, names: str | None) -> None:
    with ExitStack() as stack:
        first, second = sockets = [listening(stack), listening(stack)]
        binds = [
            f"--indexer-bind=127.0.0.1:{port_of(second)}",
            f"--slot-tracker-bind=127.0.0.1:{port_of(first)}",
            "--selection-bind=off",
            "--conductor-bind=off",
        ]
        with managed(tmp_path, sockets, names, "serve", *binds):
            assert get(port_of(second), "/query") == 405
            assert get(port_of(first), "/potential_loads") == 405


def test_a_restart_refuses_nobody(tmp_path: Path) -> None:
    """Clients that connect anew for each request are always answered, across two restarts."""
    with ExitStack() as stack:
        sock = listening(stack)
        stop, served, failures = Event(), [0], list[BaseException]()

        def ask() -> None:
            while not stop.is_set():
                try:
                    assert get(port_of(sock)) == 200
                    served[0] += 1
                except Exception as error:
                    failures.append(error)
                time.sleep(POLL_S)  # leaves the CPU to the kvd that starts

        arguments = ("indexer",)
        manager = Manager(tmp_path, [sock], "indexer")
        process: Forked | subprocess.Popen[bytes] = manager.execute(*arguments)
        clients = [Thread(target=ask) for _ in range(4)]
        try:
            manager.heard(b"READY=1")
            for client in clients:
                client.start()
            for _ in range(2):
                before = served[0]
                process.terminate()
                assert process.wait(START_DEADLINE_S) == 0, manager.stderr
                process = manager.start(*arguments)
                manager.heard(b"READY=1")
                while served[0] < before + 50 and not failures:
                    time.sleep(POLL_S)
        finally:
            stop.set()
            for client in clients:
                client.join()
            process.terminate()
            process.wait(START_DEADLINE_S)
            manager.close()
        assert not failures


def refused(folder: Path, sockets: list[socket.socket], names: str, *arguments: str) -> str:
    """Starts a kvd that must refuse these sockets; returns its error output."""
    manager = Manager(folder, sockets, names)
    process = manager.start("serve", *arguments)
    assert process.wait(START_DEADLINE_S) == os.EX_CONFIG, manager.stderr
    manager.close()
    return manager.stderr


def test_a_socket_of_no_face_is_refused(tmp_path: Path) -> None:
    with ExitStack() as stack:
        sock = listening(stack)
        binds = [f"--{face}-bind=127.0.0.1:0" for face in ("indexer", "slot-tracker", "selection")]
        error = refused(tmp_path, [sock], "indexr", *binds, "--conductor-bind=off")
        assert f"belong to no face: indexr (127.0.0.1:{port_of(sock)});" in error


def test_an_address_of_two_faces_is_refused(tmp_path: Path) -> None:
    """Each of them would answer some of the other's clients."""
    with ExitStack() as stack:
        sock = listening(stack)
        error = refused(tmp_path, [sock, sock], "indexer:selection")
        assert f"passes 127.0.0.1:{port_of(sock)} as indexer and as selection" in error


def test_a_unix_socket_without_a_file_goes_by_its_name(tmp_path: Path) -> None:
    with ExitStack() as stack:
        path = f"\0kvd-{os.getpid()}"
        sock = listening(stack, socket.AF_UNIX, path)
        others = [f"--{face}-bind=off" for face in ("slot-tracker", "selection", "conductor")]
        with managed(tmp_path, [sock], "indexer", "serve", *others) as (manager, _):
            with httpx.Client(transport=httpx.HTTPTransport(uds=path, verify=False)) as client:
                assert client.get("http://kvd/workers").status_code == 200
            assert f"bind=unix:@{path[1:]}" in manager.stderr


def test_sockets_of_which_nobody_knows_who_may_come_are_refused(tmp_path: Path) -> None:
    with ExitStack() as stack:
        try:
            sock = stack.enter_context(socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))
            sock.bind((socket.VMADDR_CID_ANY, socket.VMADDR_PORT_ANY))
            sock.listen()
        except OSError as error:
            pytest.skip(f"no sockets between machines: {error}")
        assert "not a listening stream socket of TCP" in refused(tmp_path, [sock], "indexer")


def test_what_does_not_listen_is_refused(tmp_path: Path) -> None:
    with socket.socket() as sock:
        assert "(indexer) of the service manager is not a listening" in refused(
            tmp_path, [sock], "indexer"
        )


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LISTEN_PID": "1", "LISTEN_FDS": "3", "LISTEN_FDNAMES": "a:b:c"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "-1"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "x"},
        {"LISTEN_PID": str(os.getpid())},
    ],
)
def test_what_is_meant_for_others_is_left_alone(environ: dict[str, str]) -> None:
    passed: Any = activation.receive(environ)
    assert not passed.left()
    assert not environ


def test_the_watchdog_is_fed_and_reloads_are_announced(tmp_path: Path) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text('log_level = "info"\n')
    with ExitStack() as stack:
        sock = listening(stack)
        arguments = ["serve", "--config", os.fspath(config)]
        arguments += ["--slot-tracker-bind=off", "--selection-bind=off", "--conductor-bind=off"]
        with managed(tmp_path, [sock], "indexer", *arguments, WATCHDOG_USEC="200000") as (
            manager,
            process,
        ):
            for _ in range(3):
                assert manager.heard(b"WATCHDOG=1") == b"WATCHDOG=1"
            process.send_signal(signal.SIGHUP)
            assert b"\nMONOTONIC_USEC=" in manager.heard(b"RELOADING=1")
            assert manager.heard(b"READY=1") == b"READY=1"


def test_ready_means_that_recovery_is_over(tmp_path: Path) -> None:
    """While a peer does not answer, kvd holds READY back and asks for time, until it gives up."""
    with ExitStack() as stack:
        sock, peer = listening(stack), listening(stack)
        manager = Manager(tmp_path, [sock], "indexer")
        process = manager.start(
            "indexer",
            f"--peers=http://127.0.0.1:{port_of(peer)}",
            WATCHDOG_USEC="200000",
            KVD_RECOVERY_DELAY_S="0",
        )
        try:
            assert b"EXTEND_TIMEOUT_USEC=" in manager.heard(b"WATCHDOG=1")
            connection, _ = peer.accept()
            assert get(port_of(sock)) == 200
            assert b"READY" not in manager.heard(b"WATCHDOG=1")
            connection.close()
            manager.heard(b"READY=1")
        finally:
            process.terminate()
            assert process.wait(START_DEADLINE_S) == 0, manager.stderr
            manager.close()


def test_status_finds_sockets_of_the_manager(
    tmp_path: Path,
    certificate: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the addresses of the settings file; sockets elsewhere need flags of `kvd status`."""
    with ExitStack() as stack:
        path = os.fspath(tmp_path / "kvd.sock")
        plain, secured, elsewhere = (listening(stack) for _ in range(3))
        sockets = [plain, listening(stack, socket.AF_UNIX, path), secured, elsewhere]
        settings = {
            "indexer_bind": f"127.0.0.1:{port_of(plain)}",
            "slot_tracker_bind": f"unix:{path}",
            "selection_bind": f"tls:127.0.0.1:{port_of(secured)}",
            "conductor_bind": f"127.0.0.1:{find_free_port()}",
            "tls_certfile": f"{certificate}/cert.pem",
            "tls_keyfile": f"{certificate}/key.pem",
        }
        config = tmp_path / "kvd.toml"
        config.write_text("".join(f'{name} = "{value}"\n' for name, value in settings.items()))
        file = f"--config={config}"

        def shown(*flags: str) -> tuple[int, dict[str, Any]]:
            code = main(["status", "--json", "--interval=0", file, *flags])
            return code, json.loads(capsys.readouterr().out)["faces"]

        conductor = f"--conductor-bind=127.0.0.1:{port_of(elsewhere)}"
        with managed(tmp_path, sockets, "x:x:x:conductor", "serve", file) as (manager, _):
            assert f"bind=127.0.0.1:{port_of(elsewhere)}" in manager.stderr
            code, faces = shown()
            assert code == 2 and "refused" in faces["conductor"].pop("error")
            assert not any("error" in face for face in faces.values())
            assert shown(conductor)[0] == 0
        monkeypatch.setattr(face_client, "TIMEOUT_S", 0.1)
        code, faces = shown(conductor)  # the manager's sockets are open, but no kvd answers
        assert code == 2 and all("timed out" in face["error"] for face in faces.values())


def test_several_processes_share_a_passed_socket_and_one_that_hangs_is_replaced(
    tmp_path: Path,
) -> None:
    """Only the parent reports to the manager; it supervises the other processes itself."""
    started = re.compile(r"process=gateway-0 pid=(\d+) restarts=(\d)")
    with ExitStack() as stack:
        sockets = [listening(stack)]
        flags = ("gateway", "--processes", "2")
        watched = {"WATCHDOG_USEC": "1000000"}
        with managed(tmp_path, sockets, "gateway", *flags, **watched) as (manager, _):
            assert get(port_of(sockets[0])) == 200
            manager.heard(b"WATCHDOG=1")
            [(pid, _)] = started.findall(manager.stderr)
            os.kill(int(pid), signal.SIGSTOP)
            while len(started.findall(manager.stderr)) < 2:
                manager.heard(b"WATCHDOG=1")
            assert "event=process_hangs process=gateway-0" in manager.stderr
