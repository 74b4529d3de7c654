"""What it costs replicas to share state through a Redis server, and how soon they agree.

    python bench/shared_state.py [--server redis-server] [--peer-python /path/to/venv/bin/python]

Cost: the life of a request (/add of 2,048 tokens in blocks of 16, /prefill_complete, /free) on four
slot trackers, alone, with a state directory (a snapshot each second), sharing, and with both, in
turns: CPU of the process, all threads, wall time p50 and p99; commands and bytes a life. And /query
of 512 tokens on four such daemons, while a client books there all the time.

Delay: from the answer to /add on one replica until another one's /loads has it: through the server,
by replica sync, and with a peer's Python by that of Dynamo's slot tracker.

Healing: time until all three replicas agree after the server stood still for 10 s under bookings,
was emptied, was killed and came back empty; and after a replica that was killed has come back.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from statistics import median

from errors import BenchError
from restart import LIVES, MODEL, ROUNDS, Client, asks, cpu_s, is_there, lives, started, until
from servers import free_ports

WORKER = {**MODEL, "worker_id": 1, "block_size": 16, "dp_start": 0, "dp_size": 8}
DELAYS = 300  # bookings of which the delay is measured
AWAY_S = 10.0  # that the server stands still
AWAY_BOOKINGS = 1000  # made on three replicas while it is away
QUESTIONS = 3000


def redis_command(server: str, port: int, folder: Path) -> list[str]:
    where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    return [server, *where, "--save", "", "--appendonly", "no"]


def kvd_command(port: int, *flags: str) -> list[str]:
    off = [f"--{face}-bind=off" for face in ("indexer", "selection", "conductor")]
    bind = f"--slot-tracker-bind=127.0.0.1:{port}"
    return [sys.executable, "-m", "kvd", "serve", bind, *off, "--state-dir=off", *flags]


def variants(redis: int, folder: Path) -> dict[str, list[str]]:
    """Returns the flags of each kvd that is compared."""
    shared = f"--state-url=redis://127.0.0.1:{redis}"

    def kept(name: str) -> list[str]:
        return [f"--state-dir={folder / name}", "--snapshot-s=1"]

    # Two that share would each pay for what the other one says.
    both = [*kept("both"), shared, "--state-prefix=both"]
    return {"alone": [], "kept": kept("kept"), "shared": [shared], "both": both}


@contextmanager
def serving(port: int, log: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with started(command, log) as process:
        until(lambda: is_there(port), "healthy")
        yield process


def register(port: int) -> Client:
    client = Client(port)
    client.ask("POST", "/register", WORKER)
    return client


def costs(server: str, folder: Path) -> None:
    """What sharing costs a slot tracker."""
    redis, *ports = free_ports(5)
    with ExitStack() as stack:
        stack.enter_context(started(redis_command(server, redis, folder), folder / "redis.log"))
        compared = variants(redis, folder / "costs")
        pids, clients = [], []
        for port, each in zip(ports, compared.values(), strict=True):
            log = folder / f"{port}.log"
            pids.append(stack.enter_context(serving(port, log, kvd_command(port, *each))).pid)
            clients.append(register(port))
        took: list[list[float]] = [[] for _ in compared]
        cpu: list[list[float]] = [[] for _ in compared]
        before = commands(redis)
        for turn in range(ROUNDS):
            for which in range(len(compared)):
                at = cpu_s(pids[which])
                took[which] += lives(clients[which], turn * LIVES)
                cpu[which].append((cpu_s(pids[which]) - at) / LIVES * 1e6)
        for which, name in enumerate(compared):
            ordered = sorted(took[which])
            p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
            print(
                f"life of a request, {name:6}: {median(cpu[which]):6.1f} us CPU, "
                f"p50 {p50 * 1e6:6.0f} us, p99 {p99 * 1e6:6.0f} us"
            )
        count, size = (after - at for after, at in zip(commands(redis), before, strict=True))
        every = 2 * ROUNDS * LIVES  # of those that share
        print(f"the server: {count / every:.2f} commands and {size / every:.0f} bytes in a life")


def questions(server: str, folder: Path) -> None:
    """What /query of 512 tokens takes beside bookings that are shared, and that are not."""
    redis, *ports = free_ports(9)
    with ExitStack() as stack:
        stack.enter_context(started(redis_command(server, redis, folder), folder / "redis.log"))
        compared = variants(redis, folder / "questions")
        askers: list[Client] = []
        for slots, index, each in zip(ports[::2], ports[1::2], compared.values(), strict=True):
            command = kvd_command(slots, f"--indexer-bind=127.0.0.1:{index}", *each)
            stack.enter_context(serving(slots, folder / f"{slots}.log", command))
            register(slots).close()
            asker = Client(index)
            worker = {"instance_id": 1, "endpoint": "tcp://127.0.0.1:1", "block_size": 16}
            asker.ask("POST", "/register", MODEL | worker)
            askers.append(asker)
        took: list[list[float]] = [[] for _ in compared]
        question = MODEL | {"token_ids": list(range(512))}
        for _ in range(ROUNDS):
            for which in range(len(compared)):
                booking = [sys.executable, __file__, "--book", str(ports[2 * which])]
                with started(booking, folder / "book.log"):
                    for _ in range(QUESTIONS // ROUNDS):
                        began = time.perf_counter()
                        askers[which].ask("POST", "/query", question)
                        took[which].append(time.perf_counter() - began)
        for which, name in enumerate(compared):
            ordered = sorted(took[which])
            p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
            print(
                f"/query beside bookings {name:6}: p50 {p50 * 1e6:6.0f} us, p99 {p99 * 1e6:6.0f} us"
            )


def book_on(port: int) -> None:
    """Books and frees until the process is ended."""
    client = Client(port)
    for first in count(time.time_ns() // 1000, LIVES):  # the last one may have left requests
        lives(client, first)


def commands(port: int) -> tuple[int, int]:
    """Returns how many commands a server has had, and how many bytes."""

    with socket.create_connection(("127.0.0.1", port), 5) as stream:
        stream.sendall(b"INFO stats\r\n")
        text = stream.recv(65536).decode()
    found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(found["total_commands_processed"]), int(found["total_net_input_bytes"])


def delays(name: str, one: int, other: int) -> None:
    """How soon another replica has a booking."""
    booker, reader = Client(one), Client(other)
    took = []
    for number in range(DELAYS):
        request = {**MODEL, "request_id": f"{name}{number}"}
        hashes = list(range(number * 128, number * 128 + 128))
        where = {"worker_id": 1, "dp_rank": number % 8}
        known = tokens_of(reader)
        booker.ask(
            "POST", "/add", request | where | {"sequence_hashes": hashes, "new_isl_tokens": 2048}
        )
        began = time.perf_counter()
        while tokens_of(reader) == known:
            if time.perf_counter() - began > 10:
                raise BenchError(f"{name}: a booking did not arrive in 10 s")
        took.append(time.perf_counter() - began)
        booker.ask("POST", "/free", request)
        while tokens_of(reader) != known:
            pass
    took.sort()
    p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
    print(
        f"a booking is known elsewhere, {name:12}: p50 {p50 * 1e3:5.1f} ms, p99 {p99 * 1e3:5.1f} ms"
    )


def tokens_of(client: Client) -> int:
    rows = client.ask("GET", "/loads")
    assert isinstance(rows, list)
    return sum(row["active_prefill_tokens"] for row in rows)


def delays_of_all(server: str, peer: str | None, folder: Path) -> None:
    redis, *ports = free_ports(3)
    with ExitStack() as stack:
        stack.enter_context(started(redis_command(server, redis, folder), folder / "redis.log"))
        for port in ports:
            command = kvd_command(port, f"--state-url=redis://127.0.0.1:{redis}")
            stack.enter_context(serving(port, folder / f"{port}.log", command))
            register_at(port)
        delays("shared state", *ports)
    one, other, *sync = free_ports(4)
    contenders = {"replica sync": kvd_command}
    if peer is not None:
        contenders["Dynamo"] = lambda port, *flags: dynamo_command(peer, port, *flags)
    for name, command_of in contenders.items():
        with ExitStack() as stack:
            for port, mine, theirs in ((one, *sync), (other, *sync[::-1])):
                flags = (
                    f"--replica-sync-port={mine}",
                    f"--replica-sync-peers=tcp://127.0.0.1:{theirs}",
                )
                command = command_of(port, *flags)
                stack.enter_context(serving(port, folder / f"{port}.log", command))
                register_at(port)
            time.sleep(1)  # until they have connected: neither says so
            delays(name, one, other)


def dynamo_command(peer: str, port: int, *flags: str) -> list[str]:
    return [peer, "-m", "dynamo.slot_tracker", "--port", str(port), *flags]


def register_at(port: int) -> None:
    with suppress(BenchError):  # the catalog has told it already
        register(port).close()


def healing(server: str, folder: Path) -> None:
    """How soon all agree again."""
    redis, *ports = free_ports(4)
    command = redis_command(server, redis, folder)
    with ExitStack() as stack:
        store = stack.enter_context(started(command, folder / "redis.log"))
        flags = [f"--state-url=redis://127.0.0.1:{redis}"]
        processes = [
            stack.enter_context(serving(port, folder / f"{port}.log", kvd_command(port, *flags)))
            for port in ports
        ]
        register(ports[0]).close()
        until(lambda: all(asks(port, "/workers") for port in ports), "told of the worker")
        book(ports, "first")
        until(lambda: agree(ports), "agreed")

        store.send_signal(signal.SIGSTOP)
        book(ports, "frozen")
        time.sleep(AWAY_S)
        store.send_signal(signal.SIGCONT)
        report(f"the server stood still for {AWAY_S:.0f} s", ports)

        subprocess.run(["redis-cli", "-p", str(redis), "FLUSHALL"], check=True, capture_output=True)
        book(ports, "emptied")
        report("the server was emptied", ports)

        store.kill()
        store.wait()
        book(ports, "killed")
        stack.enter_context(started(command, folder / "redis.log"))
        report("the server was killed and came back empty", ports)

        processes[2].kill()
        processes[2].wait()
        book(ports[:2], "away")
        again = kvd_command(ports[2], *flags)
        began = time.perf_counter()
        stack.enter_context(serving(ports[2], folder / "again.log", again))
        report("a replica was killed and came back with nothing", ports, began)


def book(ports: list[int], name: str) -> None:
    clients = [Client(port) for port in ports]
    for number in range(AWAY_BOOKINGS):
        body = {**MODEL, "request_id": f"{name}{number}", "worker_id": 1, "dp_rank": number % 8}
        body |= {"sequence_hashes": list(range(number, number + 32)), "new_isl_tokens": 512}
        clients[number % len(clients)].ask("POST", "/add", body)
    for client in clients:
        client.close()


def agree(ports: list[int]) -> bool:
    first, *others = (asks(port, "/loads") for port in ports)
    return bool(first) and all(each == first for each in others)


def report(what: str, ports: list[int], began: float | None = None) -> None:
    began = time.perf_counter() if began is None else began
    until(lambda: agree(ports), "agreed")
    print(f"{what}: all agree after {time.perf_counter() - began:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server", default="redis-server", help="a Redis or Valkey server")
    parser.add_argument("--peer-python", help="Python with ai-dynamo, to be measured beside")
    parser.add_argument("--book", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.book is not None:
        book_on(options.book)
    if shutil.which(options.server) is None:
        sys.exit(f"{options.server} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        try:
            costs(options.server, Path(folder))
            questions(options.server, Path(folder))
            delays_of_all(options.server, options.peer_python, Path(folder))
            healing(options.server, Path(folder))
        except BenchError as error:
            logs = "".join(path.read_text()[-800:] for path in Path(folder).glob("*.log"))
            sys.exit(f"{error}\n{logs}")


if __name__ == "__main__":
    main()
