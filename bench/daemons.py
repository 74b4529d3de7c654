"""Starts daemons as processes, sends them requests, and times the lives of requests."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from errors import BenchError
from servers import die_with_parent, end, environment

LIVES, ROUNDS = 1000, 5
PATIENCE_S = 120.0
MODEL = {"model_name": "m"}


class Client:
    """Sends requests over one connection."""

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
            command,
            stdout=output,
            stderr=output,
            env=environment(),
            preexec_fn=die_with_parent,
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
            pass  # the server does not answer yet
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


def lives(client: Client, first: int) -> list[float]:
    """Takes LIVES requests through a slot tracker, from add to free; returns their seconds."""
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


def p50_p99(took: list[float]) -> tuple[float, float]:
    """Returns the median and the 99th percentile."""
    ordered = sorted(took)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
