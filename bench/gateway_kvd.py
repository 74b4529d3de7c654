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

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import count, product
from pathlib import Path
from statistics import median

from servers import environment

ENGINES = 4
TOKENS = 512, 16_384
CONNECTIONS = 1, 16
REQUESTS, ROUNDS = 480, 5
START_S = 30.0
HERE = Path(__file__).resolve().parent.parent
HEADERS = {"content-type": "application/json"}


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process, to the microsecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


class Started:
    """A process of the comparison."""

    def __init__(self, opened: ExitStack, module: str, *flags: str) -> None:
        command = [sys.executable, "-m", module, *flags]
        self.process = subprocess.Popen(
            command, cwd=HERE, stderr=subprocess.DEVNULL, env=environment()
        )
        opened.callback(self.process.wait)
        opened.callback(self.process.terminate)


class Gateway(Started):
    """A gateway under load."""

    def __init__(self, opened: ExitStack, engines: Sequence[str], *flags: str) -> None:
        self._opened, self._port = opened, free_port()
        named = [part for each in engines for part in ("--upstream", each)]
        super().__init__(opened, "kvd", "gateway", "--port", str(self._port), *named, *flags)
        self._connections: list[http.client.HTTPConnection] = []

    def connection(self, number: int) -> http.client.HTTPConnection:
        """Returns one of the kept connections."""
        while len(self._connections) <= number:
            made = http.client.HTTPConnection("127.0.0.1", self._port)
            self._connections.append(self._opened.enter_context(closing(made)))
        return self._connections[number]

    def wait(self) -> None:
        """Waits until all engines serve, and the kvd that the gateway asks, if it asks one."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                status = json.loads(self.ask(0, "GET", "/status")[1])
                serving = [each["standing"] == "serving" for each in status["upstreams"]]
                if all(serving) and all(each["up"] for each in status.get("kvds", ())):
                    return
            except (OSError, http.client.HTTPException, ValueError):
                self.connection(0).close()
            time.sleep(0.05)
        raise SystemExit("the gateway does not serve")

    def ask(
        self, number: int, method: str, path: str, body: bytes | None = None
    ) -> tuple[str | None, bytes]:
        """Sends a request over one of the connections; returns the decision and the answer."""
        connection = self.connection(number)
        connection.request(method, path, body, HEADERS)
        answer = connection.getresponse()
        return answer.headers["x-kvd-decision"], answer.read()


def prompts(tokens: int) -> Iterator[bytes]:
    """Yields bodies with token ids; no two prompts share a block."""
    for number in count(1):
        ids = range(number * tokens, (number + 1) * tokens)
        yield json.dumps({"model": "demo", "max_tokens": 1, "prompt": list(ids)}).encode()


def measure(
    gateway: Gateway, connections: int, bodies: Iterator[bytes], pids: Sequence[int]
) -> list[float]:
    """Returns microseconds: CPU of a request in each process, then the median time of an answer."""
    each = REQUESTS // connections
    shares = [[next(bodies) for _ in range(each)] for _ in range(connections)]
    times: list[float] = []

    def ask(number: int) -> None:
        for body in shares[number]:
            since = time.perf_counter()
            decision, _ = gateway.ask(number, "POST", "/v1/completions", body)
            times.append(time.perf_counter() - since)
            assert decision == "predicted", decision

    with ThreadPoolExecutor(connections) as pool:
        before = [cpu_s(pid) for pid in pids]
        list(pool.map(ask, range(connections)))
        spent = [cpu_s(pid) - since for pid, since in zip(pids, before, strict=True)]
    return [1e6 * each / REQUESTS for each in spent] + [1e6 * median(times)]


def main() -> None:
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        ports = [free_port() for _ in range(ENGINES)]
        for port in ports:
            Started(opened, "examples.engine", "--no-events", "--port", str(port))
        url = f"unix:{folder}/kvd.sock"
        others = [f"--{face}-bind=off" for face in ("indexer", "slot-tracker", "conductor")]
        kvd = Started(opened, "kvd", "serve", *others, "--selection-bind", url)
        engines = [f"http://127.0.0.1:{port}" for port in ports]
        local = Gateway(opened, engines)
        remote = Gateway(opened, engines, "--kvd", url)
        for gateway in (local, remote):
            gateway.wait()
        print("tokens, connections | CPU us of the gateway alone | asking | of kvd | answer us")
        for tokens, connections in product(TOKENS, CONNECTIONS):
            bodies, rounds = prompts(tokens), []
            for _ in range(ROUNDS):
                own = measure(local, connections, bodies, [local.process.pid])
                pids = [remote.process.pid, kvd.process.pid]
                asked = measure(remote, connections, bodies, pids)
                rounds.append((own[0], asked[0], asked[1], own[1], asked[2]))
            each = [f"{median(column):,.0f}" for column in zip(*rounds, strict=True)]
            print(f"{tokens:,}, {connections} |", " | ".join(each[:3]), f"| {each[3]}, {each[4]}")
        print(f"{os.cpu_count()} cores")


if __name__ == "__main__":
    main()
