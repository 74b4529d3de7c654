"""How soon a kvd that was stopped or killed is back, and what it costs to be able to.

    python bench/restart.py [--blocks 1000000] [--peer-python /path/to/venv/bin/python]

Restart: 16 engines with replay servers hold the blocks, in batches of 64 blocks of 16 tokens. A kvd
with a state directory hears all of it, is ended by SIGTERM or SIGKILL, and started again; meanwhile
each engine publishes one batch more. Measured from exec: the first correct answer to /query, and
all streams `exact`. Beside it a kvd without state, which replays everything; with a peer's Python
also Dynamo's indexer that recovers from a kvd which has heard the same.

Cost: the life of a request (/add of 2,048 tokens in blocks of 16, /prefill_complete, /free) on two
slot trackers, with a state directory and without, in turns over one connection each: CPU of the
process, all threads, and wall time p50 and p99. And /query of 512 tokens on the full index while
snapshots are written one after the other, and while none is.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgpack
import zmq
from errors import BenchError
from servers import die_with_parent, end, free_ports

BLOCK_SIZE, BATCH_BLOCKS, ENGINES = 16, 64, 16
LIVES, ROUNDS = 1000, 5
QUESTIONS = 20_000
PATIENCE_S = 120.0
MODEL = {"model_name": "m"}
END = b"\xff" * 8


def address_of(bound: zmq.Socket[bytes]) -> str:
    said = bound.last_endpoint
    assert isinstance(said, bytes)
    return said.decode()


class Engines:
    """Engines with their replay servers, all in one thread."""

    def __init__(self, blocks: int) -> None:
        self._context = zmq.Context()
        self._pubs, self._routers = [], []
        self._kept: list[list[bytes]] = []
        per_engine = max(1, blocks // ENGINES // BATCH_BLOCKS)
        for engine in range(ENGINES):
            pub, router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
            for each in (pub, router):
                each.sndhwm = 0
                each.bind("tcp://127.0.0.1:0")
            self._pubs.append(pub)
            self._routers.append(router)
            self._kept.append([batch(engine, number) for number in range(per_engine)])
        self._next = [0] * ENGINES
        self._ending = False
        self._wanted = [0] * ENGINES  # batches to be published
        self.subscribers = 0
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def workers(self) -> str:
        """Returns the engines as `--workers` names them."""
        return ",".join(
            f"{number}={address_of(pub)};{address_of(router)}"
            for number, (pub, router) in enumerate(zip(self._pubs, self._routers, strict=True), 1)
        )

    def publish_all(self) -> None:
        """Publishes everything that there is to say, in the background."""
        self._wanted = [len(kept) for kept in self._kept]

    def publish_one_more(self) -> None:
        for engine, kept in enumerate(self._kept):
            kept.append(batch(engine, len(kept)))
        self.publish_all()

    @property
    def is_done(self) -> bool:
        return self._next == self._wanted

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (*self._pubs, *self._routers):
            poller.register(socket, zmq.POLLIN)
        while not self._ending:
            busy = any(map(int.__lt__, self._next, self._wanted))
            for socket, _ in poller.poll(0 if busy else 5):
                if socket in self._pubs:
                    self.subscribers += socket.recv()[:1] == b"\1"
                else:
                    self._answer(socket)
            for engine, number in enumerate(self._next):
                if number < self._wanted[engine]:
                    payload = self._kept[engine][number]
                    self._pubs[engine].send_multipart([b"", number.to_bytes(8), payload])
                    self._next[engine] += 1

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        asker, empty, start = router.recv_multipart()
        kept = self._kept[self._routers.index(router)]
        for number in range(int.from_bytes(start), len(kept)):
            router.send_multipart([asker, empty, number.to_bytes(8), kept[number]])
        router.send_multipart([asker, empty, END, b""])

    def close(self) -> None:
        self._ending = True
        self._thread.join()
        self._context.destroy(linger=0)


def batch(engine: int, number: int) -> bytes:
    """Returns a batch of one chain of blocks, which only this engine has."""
    first = (engine * 1_000_000 + number) * BATCH_BLOCKS
    hashes = list(range(first + 1, first + BATCH_BLOCKS + 1))
    event = ["BlockStored", hashes, None, tokens_of(engine, number), BLOCK_SIZE, None]
    payload: bytes = msgpack.packb([0.0, [event], 0])
    return payload


def tokens_of(engine: int, number: int) -> list[int]:
    first = (engine * 1_000_000 + number) % 1_000_003
    return [(first + each * 31) % 128_000 for each in range(BATCH_BLOCKS * BLOCK_SIZE)]


class Client:
    """Asks over one connection."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def ask(self, method: str, path: str, members: Mapping[str, object] | None = None) -> Any:
        body = None if members is None else json.dumps(members)
        self._http.request(method, path, body, {"content-type": "application/json"})
        reply = self._http.getresponse()
        data = reply.read()
        if reply.status >= 300:
            raise BenchError(f"{path}: {reply.status} {data[:200]!r}")
        return json.loads(data or b"null")

    def close(self) -> None:
        self._http.close()


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, preexec_fn=die_with_parent
        )
    try:
        yield process
    finally:
        end(process)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if condition():
                return
        except (OSError, http.client.HTTPException, BenchError):
            pass  # it is not there yet
        if time.monotonic() > deadline:
            raise BenchError(f"not {what} after {PATIENCE_S:.0f} s")
        time.sleep(0.005)


def asks(port: int, path: str, members: Mapping[str, object] | None = None) -> Any:
    client = Client(port)
    try:
        return client.ask("GET" if members is None else "POST", path, members)
    finally:
        client.close()


def is_there(port: int) -> bool:
    asks(port, "/health")
    return True


def is_found(port: int) -> bool:
    """Says whether a prompt of the last engine is known in full."""
    question = MODEL | {"token_ids": tokens_of(ENGINES - 1, 0)}
    scores: dict[str, dict[str, int]] = asks(port, "/query", question)["scores"]
    return scores.get(str(ENGINES), {}).get("0") == BATCH_BLOCKS * BLOCK_SIZE


def is_connected(port: int) -> bool:
    """Says whether all engines are listened to, and the subscriptions have had time to arrive."""
    rows = asks(port, "/workers")
    time.sleep(0.2)
    return all(row["status"] == "active" for row in rows)


def is_exact(port: int) -> bool:
    rows = asks(port, "/workers")
    return len(rows) == ENGINES and all(row["stream"] == "exact" for row in rows)


def kvd_command(port: int, engines: Engines, *flags: str) -> list[str]:
    command = [sys.executable, "-m", "kvd", "indexer", "--port", str(port), "--block-size", "16"]
    return [*command, "--model-name", "m", "--workers", engines.workers(), *flags]


def back(
    command: list[str], port: int, log: Path, engines: Engines, *, says_more: bool = True
) -> tuple[float, float]:
    """Returns seconds from exec to the first correct answer, and until all streams are exact."""
    if says_more:
        engines.publish_one_more()
        until(lambda: engines.is_done, "published")
    began = time.monotonic()
    with started(command, log):
        until(lambda: is_found(port), "answering")
        found = time.monotonic() - began
        if not says_more:
            before = engines.subscribers
            until(lambda: is_there(port) and engines.subscribers >= before, "there")
            engines.publish_one_more()
        until(lambda: is_exact(port), "exact")
        return found, time.monotonic() - began


def restarts(blocks: int, peer: str | None, folder: Path) -> None:
    engines = Engines(blocks)
    port, other = free_ports(2)
    log = folder / "restart.log"
    state = f"--state-dir={folder / 'state'}"
    try:
        for name, number in (("SIGTERM", signal.SIGTERM), ("SIGKILL", signal.SIGKILL)):
            command = kvd_command(port, engines, state, "--snapshot-s=2")
            with started(command, log) as process:
                until(lambda: is_there(port), "healthy")
                until(lambda: engines.subscribers >= ENGINES, "subscribed")
                engines.publish_all()
                until(lambda: engines.is_done and is_exact(port), "exact")
                time.sleep(4)  # a snapshot has all of it
                process.send_signal(number)
                process.wait()
            found, exact = back(command, port, log, engines)
            print(f"kvd after {name:8}  first answer {found:5.2f} s   exact {exact:5.2f} s")
        size = (folder / "state" / "index").stat().st_size
        print(f"snapshot {size / 1e6:.1f} MB of {blocks} blocks")
        cold(engines, port, log)
        if peer is not None:
            peers(engines, peer, port, other, log)
    finally:
        engines.close()


def cold(engines: Engines, port: int, log: Path) -> None:
    """A kvd without state has each engine's whole replay before its first live batch."""
    began = time.monotonic()
    with started(kvd_command(port, engines), log):
        until(lambda: is_there(port), "healthy")
        until(lambda: is_connected(port), "connected")
        engines.publish_one_more()
        until(lambda: is_found(port), "answering")
        found = time.monotonic() - began
        until(lambda: is_exact(port), "exact")
        exact = time.monotonic() - began
    print(f"kvd without state     first answer {found:5.2f} s   exact {exact:5.2f} s")


def peers(engines: Engines, peer: str, port: int, other: int, log: Path) -> None:
    """Dynamo's indexer, which takes the dump of another one that a kvd has filled."""
    command = [peer, "-m", "dynamo.indexer", "--block-size", "16", "--model-name", "m"]
    with started(kvd_command(port, engines), log):
        until(lambda: is_there(port), "healthy")
        until(lambda: is_connected(port), "connected")
        engines.publish_one_more()
        until(lambda: is_exact(port), "exact")
        began = time.monotonic()
        recover = [*command, "--port", str(other), "--peers", f"http://127.0.0.1:{port}"]
        with started(recover, log):
            until(lambda: is_found(other), "answering")
            print(f"Dynamo from a peer    first answer {time.monotonic() - began:5.2f} s")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def lives(client: Client, first: int) -> list[float]:
    """Runs LIVES requests through a slot tracker; returns the seconds of each."""
    took = []
    for number in range(first, first + LIVES):
        name = f"request-{number}"
        hashes = [number * 1000 + each for each in range(128)]
        add = {"request_id": name, "worker_id": 1, "dp_rank": 0, "sequence_hashes": hashes}
        began = time.perf_counter()
        client.ask("POST", "/add", MODEL | add | {"new_isl_tokens": 2048})
        client.ask("POST", "/prefill_complete", MODEL | {"request_id": name})
        client.ask("POST", "/free", MODEL | {"request_id": name})
        took.append(time.perf_counter() - began)
    return took


def bookings(folder: Path) -> None:
    """What the journal costs a request."""
    ports = free_ports(2)
    flags: tuple[list[str], ...] = ([], [f"--state-dir={folder / 'slots'}"])
    with ExitStack() as stack:
        pids, clients = [], []
        for port, own in zip(ports, flags, strict=True):
            command = [sys.executable, "-m", "kvd", "slot-tracker", "--port", str(port), *own]
            pids.append(stack.enter_context(started(command, folder / "slots.log")).pid)
            until(partial(is_there, port), "healthy")
            client = Client(port)
            stack.callback(client.close)
            worker = {"worker_id": 1, "block_size": 16, "dp_start": 0, "dp_size": 1}
            client.ask("POST", "/register", {**MODEL, **worker})
            clients.append(client)
        took: list[list[float]] = [[], []]
        cpu: list[list[float]] = [[], []]
        for turn in range(ROUNDS):
            for which in (0, 1):
                before = cpu_s(pids[which])
                took[which] += lives(clients[which], turn * LIVES)
                cpu[which].append((cpu_s(pids[which]) - before) / LIVES * 1e6)
        for which, name in enumerate(("without", "with")):
            ordered = sorted(took[which])
            p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
            print(
                f"life of a request {name:7} state: {median(cpu[which]):6.1f} us CPU, "
                f"p50 {p50 * 1e6:6.0f} us, p99 {p99 * 1e6:6.0f} us"
            )
        text = sum(path.stat().st_size for path in (folder / "slots").glob("journal.*"))
        print(f"journal {text / (ROUNDS * LIVES):.0f} bytes a request of 128 blocks")


def questions(blocks: int, folder: Path) -> None:
    """What snapshots cost questions."""
    engines = Engines(blocks)
    (port,) = free_ports(1)
    try:
        for name, pause in (("none", "0"), ("snapshots", "0.01")):
            state = folder / f"questions-{name}"
            flags = f"--state-dir={state}", f"--snapshot-s={pause}"
            with started(kvd_command(port, engines, *flags), folder / "questions.log"):
                until(lambda: is_there(port), "healthy")
                until(lambda: is_connected(port), "connected")
                engines.publish_one_more()
                until(lambda: is_exact(port), "exact")
                # In a process of its own, which has nothing else to do.
                asking = [sys.executable, __file__, "--ask", str(port)]
                took = json.loads(subprocess.run(asking, capture_output=True, check=True).stdout)
                p50, p99, worst = took[QUESTIONS // 2], took[QUESTIONS * 99 // 100], took[-1]
                print(
                    f"/query beside {name:9}: p50 {p50 * 1e6:5.0f} us, p99 {p99 * 1e6:5.0f} us, "
                    f"longest {worst * 1e6:5.0f} us"
                )
    finally:
        engines.close()


def ask_again_and_again(port: int) -> None:
    """Prints the seconds of QUESTIONS questions, the shortest first."""
    client = Client(port)
    took = []
    question = MODEL | {"token_ids": tokens_of(3, 0)[:512]}
    for _ in range(QUESTIONS):
        began = time.perf_counter()
        client.ask("POST", "/query", question)
        took.append(time.perf_counter() - began)
    client.close()
    print(json.dumps(sorted(took)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--peer-python", help="Python with ai-dynamo, to be measured beside")
    parser.add_argument("--ask", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask is not None:
        ask_again_and_again(options.ask)
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            restarts(options.blocks, options.peer_python, Path(folder))
            bookings(Path(folder))
            questions(options.blocks, Path(folder))
        except BenchError as error:
            log = Path(folder) / "restart.log"
            sys.exit(f"{error}\n{log.read_text()[-2000:] if log.exists() else ''}")


if __name__ == "__main__":
    main()
