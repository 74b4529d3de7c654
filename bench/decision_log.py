"""Measures the CPU of a reservation's life with the decision log and without it.

    python bench/decision_log.py

Two `kvd select-service`, one of them with a log, get the same reservations in turns over one
connection each: /select_and_reserve with 2,048 or 32,768 tokens in blocks of 16 as hashes,
/prefill_complete, DELETE. Prints the CPU microseconds of a whole life, over all threads of the
process, and the bytes of its lines in the log. Nothing is cached, and engines publish nothing.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import zmq
from machine import cpu_s
from servers import Contender, Server, running

BLOCK_SIZE = 16
WORKERS = 8, 64, 512
TOKENS = 2048, 32_768
LIVES, ROUNDS = 500, 7
MODEL = {"model_name": "m"}
HERE = Path(__file__).resolve().parent


class Client:
    """Reserves, completes and frees on one connection."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._http = http.client.HTTPConnection(server.address)
        self._number = 0

    def ask(self, method: str, path: str, members: dict[str, object] | None = None) -> None:
        headers = {} if members is None else {"Content-Type": "application/json"}
        body = None if members is None else json.dumps(members).encode()
        self._http.request(method, path, body, headers)
        answer = self._http.getresponse()
        text = answer.read()
        assert answer.status < 300, text

    def live(self, tokens: int) -> None:
        """Takes one reservation from its beginning to its end."""
        self._number += 1
        hashes = [tokens + at for at in range(tokens // BLOCK_SIZE)]
        name = f"reservation-{self._number}"
        prompt = {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": tokens}
        self.ask("POST", "/select_and_reserve", {**MODEL, **prompt, "reservation_id": name})
        self.ask("POST", f"/reservations/{name}/prefill_complete")
        self.ask("DELETE", f"/reservations/{name}")

    def cpu_us(self, tokens: int) -> float:
        before = cpu_s(self.server.pid)
        for _ in range(LIVES):
            self.live(tokens)
        return (cpu_s(self.server.pid) - before) / LIVES * 1e6


def clients(stack: ExitStack, folder: Path, workers: int, engine: str) -> Iterator[Client]:
    """Yields a client of a server without the log, then one of a server with it."""
    for name, flags in (("off", ()), ("on", (f"KVD_DECISION_LOG={folder}/log",))):
        command = ("env", *flags, sys.executable, "-m", "kvd", "select-service")
        contender = Contender(f"decision-log-{name}", command, HERE.parent)
        client = Client(stack.enter_context(running(contender, folder)))
        for number in range(workers):
            worker = {"worker_id": number, "endpoint": "http://w:1", "block_size": BLOCK_SIZE}
            events = {"kv_events_endpoints": {"0": engine}}
            client.ask("POST", "/workers", {**MODEL, **worker, **events})
        yield client


def main() -> None:
    print("| workers | tokens | off, µs | on, µs | more | bytes |\n|---|---|---|---|---|---|")
    for workers in WORKERS:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            silent: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
            port = silent.bind_to_random_port("tcp://127.0.0.1")
            stack.enter_context(silent)
            off, on = clients(stack, Path(folder), workers, f"tcp://127.0.0.1:{port}")
            log = Path(folder, "log")
            for tokens in TOKENS:
                before = log.stat().st_size
                took = [(off.cpu_us(tokens), on.cpu_us(tokens)) for _ in range(ROUNDS)]
                plain, logged = (median(column) for column in zip(*took, strict=True))
                size = (log.stat().st_size - before) / (LIVES * ROUNDS)
                cells = f"{plain:.0f} | {logged:.0f} | {logged - plain:.0f} | {size:.0f}"
                print(f"| {workers} | {tokens:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
