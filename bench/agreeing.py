"""Measures how soon replicas learn of each other's bookings, and agree again after a failure."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from daemons import MODEL, Client, asks, is_there, p50_p99, started, until
from errors import BenchError
from servers import free_ports

from tests.support.state_servers import StateServer, sentinel_of

WORKER = {**MODEL, "worker_id": 1, "block_size": 16, "dp_start": 0, "dp_size": 8}
DELAYS = 300  # bookings whose delay is measured
AWAY_S = 10.0  # time for which the server, or a replica, stands still
AWAY_BOOKINGS = 1000  # bookings made meanwhile
FAILOVER = "kvd"  # the sentinel's name of the server

Command = Callable[..., list[str]]  # starts a slot tracker, by its port and further flags


def kvd_command(port: int, *flags: str) -> list[str]:
    off = [f"--{face}-bind=off" for face in ("indexer", "selection", "conductor")]
    bind = f"--slot-tracker-bind=127.0.0.1:{port}"
    return [sys.executable, "-m", "kvd", "serve", *off, bind, "--state-dir=off", *flags]


def syncing(mine: int, theirs: int) -> tuple[str, str]:
    """Returns the flags of a replica that exchanges its bookings with another one."""
    return f"--replica-sync-port={mine}", f"--replica-sync-peers=tcp://127.0.0.1:{theirs}"


@contextmanager
def serving(port: int, folder: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with started(command, folder / f"{port}.log") as process:
        until(lambda: is_there(port), "healthy")
        yield process


@contextmanager
def state_server(folder: Path, kind: str, *flags: str) -> Iterator[StateServer]:
    server = StateServer(folder, *flags, kind=kind)
    try:
        yield server
    finally:
        server.close()


def register(port: int) -> None:
    client = Client(port)
    with suppress(BenchError):  # fails if another replica has already announced the worker
        client.ask("POST", "/register", WORKER)
    client.close()


# ---- delays


def delays(kind: str, peer: str | None, folder: Path) -> None:
    print("\n| a booking is known on another replica | p50 | p99 |\n|---|---|---|")
    one, other, *sync = free_ports(4)
    with state_server(folder, kind) as server:
        flags = [f"--state-url={server.url}"]
        measure_delays("through the server", {one: flags, other: flags}, kvd_command, folder)
    flags_of = {one: syncing(*sync), other: syncing(*sync[::-1])}
    measure_delays("by replica sync", flags_of, kvd_command, folder)
    if peer is not None:

        def dynamo_command(port: int, *flags: str) -> list[str]:
            return [peer, "-m", "dynamo.slot_tracker", "--port", str(port), *flags]

        measure_delays("by Dynamo's slot tracker", flags_of, dynamo_command, folder)


def measure_delays(
    title: str, flags_of: Mapping[int, Sequence[str]], command: Command, folder: Path
) -> None:
    """Prints how soon a booking on the first of two replicas shows in the loads of the second."""
    with ExitStack() as stack:
        for port, flags in flags_of.items():
            stack.enter_context(serving(port, folder, command(port, *flags)))
            register(port)
        time.sleep(1)  # for them to connect: neither reports that it has
        booker, reader = map(Client, flags_of)
        p50, p99 = p50_p99([delay_of(number, booker, reader) for number in range(DELAYS)])
        print(f"| {title} | {p50 * 1e3:.1f} ms | {p99 * 1e3:.1f} ms |", flush=True)


def delay_of(number: int, booker: Client, reader: Client) -> float:
    request = {**MODEL, "request_id": f"delayed-{number}"}
    hashes = list(range(number * 128, number * 128 + 128))
    where = {"worker_id": 1, "dp_rank": number % 8}
    known = tokens_of(reader)
    booker.ask(
        "POST", "/add", request | where | {"sequence_hashes": hashes, "new_isl_tokens": 2048}
    )
    began = time.perf_counter()
    while tokens_of(reader) == known:
        if time.perf_counter() - began > 10:
            raise BenchError("a booking did not arrive in 10 s")
    took = time.perf_counter() - began
    booker.ask("POST", "/free", request)
    while tokens_of(reader) != known:
        pass
    return took


def tokens_of(client: Client) -> int:
    rows = client.ask("GET", "/loads")
    assert isinstance(rows, list)
    return sum(row["active_prefill_tokens"] for row in rows)


# ---- healing


class Fleet:
    """Three replicas that share state through the server at a URL."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.ports = free_ports(3)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._flags = f"--state-url={url}"
        self._folder, self._stack = folder, stack
        self._booked = 0
        for port in self.ports:
            self.start(port)
        register(self.ports[0])
        until(lambda: all(asks(port, "/workers") for port in self.ports), "told of the worker")
        self.book(*self.ports)
        until(self.agree, "agreed")

    def start(self, port: int) -> None:
        command = kvd_command(port, self._flags)
        self.processes.append(self._stack.enter_context(serving(port, self._folder, command)))

    def book(self, *ports: int) -> None:
        """Books AWAY_BOOKINGS requests, by turns on each of the replicas at `ports`."""
        clients = [Client(port) for port in ports]
        for number in range(self._booked, self._booked + AWAY_BOOKINGS):
            body = {**MODEL, "request_id": f"r{number}", "worker_id": 1, "dp_rank": number % 8}
            body |= {"sequence_hashes": list(range(number, number + 32)), "new_isl_tokens": 512}
            clients[number % len(clients)].ask("POST", "/add", body)
        self._booked += AWAY_BOOKINGS
        for client in clients:
            client.close()

    def agree(self) -> bool:
        """Returns whether all replicas know all bookings."""
        loads = [asks(port, "/loads") for port in self.ports]
        tokens = sum(row["active_prefill_tokens"] for row in loads[0])
        return tokens == 512 * self._booked and loads == [loads[0]] * len(loads)

    def report(self, what: str, began: float | None = None) -> None:
        began = time.perf_counter() if began is None else began
        until(self.agree, "agreed")
        print(f"| {what} | {time.perf_counter() - began:.2f} s |", flush=True)


def healing(kind: str, folder: Path) -> None:
    print(f"\n| after {AWAY_BOOKINGS} bookings meanwhile | all agree after |\n|---|---|")
    with ExitStack() as stack:
        server = stack.enter_context(state_server(folder, kind))
        fleet = Fleet(server.url, folder, stack)

        server.freeze()
        fleet.book(*fleet.ports)
        time.sleep(AWAY_S)
        server.thaw()
        fleet.report(f"the server stood still for {AWAY_S:.0f} s")

        server.ask(b"FLUSHALL")
        fleet.book(*fleet.ports)
        fleet.report("the server was emptied")

        server.kill()
        fleet.book(*fleet.ports)
        server.start()
        fleet.report("the server was killed and came back empty")

        fleet.processes[2].send_signal(signal.SIGSTOP)
        fleet.book(*fleet.ports[:2])
        time.sleep(AWAY_S)
        fleet.processes[2].send_signal(signal.SIGCONT)
        fleet.report(f"a replica stood still for {AWAY_S:.0f} s")

        fleet.processes[2].kill()
        fleet.processes[2].wait()
        fleet.book(*fleet.ports[:2])
        began = time.perf_counter()
        fleet.start(fleet.ports[2])
        fleet.report("a replica was killed and came back with nothing, from its start", began)
    failing_over(kind, folder)


def failing_over(kind: str, folder: Path) -> None:
    """Measures how soon replicas agree after a sentinel has replaced a killed server."""
    with ExitStack() as stack:
        server = stack.enter_context(state_server(folder, kind))
        copy = stack.enter_context(
            state_server(folder, kind, "--replicaof", "127.0.0.1", str(server.port))
        )
        until(lambda: b"master_link_status:up" in copy.ask(b"INFO replication"), "copied")
        sentinel = sentinel_of(folder, server, FAILOVER, kind)
        stack.callback(sentinel.close)
        known = f":{copy.port}".encode()
        until(lambda: known in sentinel.ask(b"SENTINEL REPLICAS " + FAILOVER.encode()), "watched")
        fleet = Fleet(f"redis+sentinel://127.0.0.1:{sentinel.port}/{FAILOVER}", folder, stack)
        began = time.perf_counter()
        server.kill()
        fleet.book(*fleet.ports)
        fleet.report("the server was killed, a copy took its place, from the kill", began)
