"""Compares a gateway that asks a kvd over a Unix socket with one that chooses itself.

    python bench/gateway_kvd.py

Two gateways in front of the same simulated engines (examples.engine) get the same completions in
turns, over one kept connection and over 16: prompts of 512 and 16,384 token ids in blocks of 16,
one token of output. One gateway chooses itself, the other asks a `kvd serve`. Prints the CPU
microseconds of a request in the gateway and in kvd, over all threads, and the median time of an
answer. The engines publish no events, so that no index takes part of the CPU. Figures are medians
of the rounds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import count, product
from pathlib import Path
from statistics import median

from daemons import asks, started, until
from errors import BenchError
from servers import free_ports

ENGINES = 4
TOKENS = 512, 16_384
CONNECTIONS = 1, 16
REQUESTS, ROUNDS = 480, 5
# A gateway would close connections that rest while the other one is measured on a busy machine.
IDLE_S = 3600
HEADERS = {"content-type": "application/json"}


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process, to the microsecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def start(opened: ExitStack, log: Path, module: str, *flags: str) -> int:
    """Starts a process of the comparison; returns its id."""
    return opened.enter_context(started([sys.executable, "-m", module, *flags], log)).pid


class Gateway:
    """A gateway under load."""

    def __init__(
        self, opened: ExitStack, log: Path, port: int, engines: Sequence[str], *flags: str
    ) -> None:
        self._opened, self._port = opened, port
        named = [part for each in engines for part in ("--upstream", each)]
        own = "--port", str(port), f"--http-idle-s={IDLE_S}"
        self.pid = start(opened, log, "kvd", "gateway", *own, *named, *flags)
        self._connections: list[http.client.HTTPConnection] = []

    def connection(self, number: int) -> http.client.HTTPConnection:
        """Returns one of the kept connections."""
        while len(self._connections) <= number:
            made = http.client.HTTPConnection("127.0.0.1", self._port)
            self._connections.append(self._opened.enter_context(closing(made)))
        return self._connections[number]

    def serves(self) -> bool:
        """Returns whether all engines serve, and the kvd that the gateway asks, if it asks one."""
        status = asks(self._port, "/status")
        serving = [each["standing"] == "serving" for each in status["upstreams"]]
        return all(serving) and all(each["up"] for each in status.get("kvds", ()))

    def complete(self, number: int, body: bytes) -> str | None:
        """Sends a completion over one of the connections; returns the decision."""
        connection = self.connection(number)
        connection.request("POST", "/v1/completions", body, HEADERS)
        answer = connection.getresponse()
        answer.read()
        return answer.headers["x-kvd-decision"]


def prompts(tokens: int) -> Iterator[bytes]:
    """Yields bodies with token ids; no two prompts share a block."""
    for number in count(1):
        ids = range(number * tokens, (number + 1) * tokens)
        yield json.dumps({"model": "demo", "max_tokens": 1, "prompt": list(ids)}).encode()


def measure(
    gateway: Gateway, requests: int, connections: int, bodies: Iterator[bytes], pids: Sequence[int]
) -> list[float]:
    """Returns microseconds: CPU of a request in each process, then the median time of an answer."""
    each = max(1, requests // connections)
    shares = [[next(bodies) for _ in range(each)] for _ in range(connections)]
    times: list[float] = []

    def ask(number: int) -> None:
        for body in shares[number]:
            since = time.perf_counter()
            decision = gateway.complete(number, body)
            times.append(time.perf_counter() - since)
            assert decision == "predicted", decision

    with ThreadPoolExecutor(connections) as pool:
        before = [cpu_s(pid) for pid in pids]
        list(pool.map(ask, range(connections)))
        spent = [cpu_s(pid) - since for pid, since in zip(pids, before, strict=True)]
    return [1e6 * each / len(times) for each in spent] + [1e6 * median(times)]


def compare(requests: int, rounds: int, log: Path) -> None:
    """Prints the comparison; raises BenchError if a process does not serve."""
    with ExitStack() as opened:
        url = f"unix:{log.parent}/kvd.sock"
        of_local, of_remote, *ports = free_ports(2 + ENGINES)
        for port in ports:
            start(opened, log, "examples.engine", "--no-events", "--port", str(port))
        others = [f"--{face}-bind=off" for face in ("indexer", "slot-tracker", "conductor")]
        kvd = start(opened, log, "kvd", "serve", *others, "--selection-bind", url)
        engines = [f"http://127.0.0.1:{port}" for port in ports]
        local = Gateway(opened, log, of_local, engines)
        remote = Gateway(opened, log, of_remote, engines, "--kvd", url)
        for gateway in (local, remote):
            until(gateway.serves, "serving")
        print("tokens, connections | CPU us of the gateway alone | asking | of kvd | answer us")
        for tokens, connections in product(TOKENS, CONNECTIONS):
            bodies, rows = prompts(tokens), []
            for _ in range(rounds):
                own = measure(local, requests, connections, bodies, [local.pid])
                asked = measure(remote, requests, connections, bodies, [remote.pid, kvd])
                rows.append((own[0], asked[0], asked[1], own[1], asked[2]))
            each = [f"{median(column):,.0f}" for column in zip(*rows, strict=True)]
            print(f"{tokens:,}, {connections} |", " | ".join(each[:3]), f"| {each[3]}, {each[4]}")
        print(f"{os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=REQUESTS, help="completions of a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "processes.log"
        try:
            compare(options.requests, options.rounds, log)
        except BenchError as error:
            sys.exit(f"{error}\n{log.read_text(errors='replace')[-2000:]}")


if __name__ == "__main__":
    main()
