"""Starts, watches and stops the servers under test."""

from __future__ import annotations

import ctypes
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from errors import BenchError

START_TIMEOUT = 30.0  # seconds; both servers answer /health in about one
STOP_TIMEOUT = 10.0  # seconds for a graceful end before SIGKILL
POLL_EVERY = 0.02  # seconds between two checks of a starting server
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
BYTECODE = Path(__file__).resolve().parent / "build" / "pycache"

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Contender:
    """A server to start: `command` gets `--port N` appended and runs in `directory`."""

    name: str
    command: tuple[str, ...]
    directory: Path


@dataclass(frozen=True)
class Server:
    """A running contender on 127.0.0.1:`port`."""

    name: str
    port: int
    pid: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


Pair = tuple[Server, Server]


def environment() -> dict[str, str]:
    """Returns this process's environment, with compiled modules for what is started in it.

    An installed server has its modules compiled. Where the environment forbids Python to write
    bytecode, as in many container images, a server would instead compile each module when it is
    first used, which holds it for up to 90 ms. So bytecode is written beside the load generator.
    """
    mine = dict(os.environ)
    if mine.pop("PYTHONDONTWRITEBYTECODE", None):
        mine["PYTHONPYCACHEPREFIX"] = str(BYTECODE)
    return mine


def die_with_parent() -> None:
    """Makes the kernel kill this child when its parent dies, however that happens."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end(process: subprocess.Popen[bytes]) -> None:
    """Stops a child and reaps it; returns soon after STOP_TIMEOUT at the latest."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    """Returns different ports that nobody listens on."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def _wait_healthy(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while not _healthy(port):
        if process.poll() is not None:
            raise BenchError(f"{name} does not start")
        if time.monotonic() > deadline:
            raise BenchError(f"{name} is not healthy after {START_TIMEOUT:.0f} s, see {log}")
        time.sleep(POLL_EVERY)


def _check_alone(server: Server) -> None:
    """Raises if a server has children: their CPU and RSS would not be counted."""
    for children in Path(f"/proc/{server.pid}/task").glob("*/children"):
        if children.read_text().strip():
            raise BenchError(f"{server.name} has child processes; its CPU is not all counted")


@contextmanager
def running(contender: Contender, log_directory: Path) -> Iterator[Server]:
    """Yields a healthy server; raises BenchError if it does not start or dies before the end."""
    (port,) = free_ports(1)
    on_port = replace(contender, command=(*contender.command, "--port", str(port)))
    with running_on(on_port, port, log_directory) as server:
        yield server


@contextmanager
def running_on(contender: Contender, port: int, log_directory: Path) -> Iterator[Server]:
    """Does the same as `running`, for a command that names its port itself."""
    log = log_directory / f"{contender.name}.log"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                contender.command,
                cwd=contender.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment(),
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise BenchError(f"cannot start {contender.name}: {error}") from error
    server = Server(contender.name, port, process.pid)
    try:
        _wait_healthy(contender.name, process, port, log)
        yield server
        if process.poll() is not None:
            raise BenchError(f"{contender.name} did not live to the end")
        _check_alone(server)
    except BenchError as error:
        # A server that died shows as a failed run first; add its log to the error.
        if process.poll() is None:
            raise
        died = f"{contender.name} ended with {process.returncode}:\n{_tail(log)}"
        raise BenchError(f"{error}\n{died}") from error
    finally:
        end(process)


@contextmanager
def running_pair(contenders: tuple[Contender, Contender], logs: Path) -> Iterator[Pair]:
    """Yields both servers, which live at the same time."""
    with ExitStack() as stack:
        first = stack.enter_context(running(contenders[0], logs))
        second = stack.enter_context(running(contenders[1], logs))
        yield first, second
