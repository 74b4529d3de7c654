"""Measures for the recovery suite: a dump under query load, and how soon a replica answers."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from errors import BenchError
from generator import Generator, Option, Result
from servers import Contender, Server, running

DUMP_TIMEOUT = 60.0  # seconds without a byte
REPLICA_TIMEOUT = 60.0  # seconds until a replica answers with the recovered state
POLL_EVERY = 0.02  # seconds
RECEIVE_BYTES = 1 << 20
MIB = 2**20


def dump_under_load(generator: Generator, server: Server, load: dict[str, Option]) -> Result:
    """Dumps again and again while queries run; returns figures of the dumps and the queries."""
    before = _memory(server.pid, "VmRSS")
    seconds = []
    size = 0
    with ThreadPoolExecutor(1) as pool:
        queries = pool.submit(lambda: generator.run("http", server, **load))
        while not queries.done():
            started = time.monotonic()
            size = _read_dump(server)
            seconds.append(time.monotonic() - started)
        figures = queries.result()
    extra = _memory(server.pid, "VmHWM") - before
    return {
        "dump_s": median(seconds),
        "dump_mib": size / MIB,
        "extra_mib": extra / MIB,
        "p50_us": figures["p50_us"],
        "p99_us": figures["p99_us"],
    }


def replica(contender: Contender, donor: Server, logs: Path, body: str) -> Result:
    """Starts a replica with `donor` as its peer; waits until the query `body` finds a prefix."""
    command = (*contender.command, "--peers", f"http://{donor.address}")
    named = replace(contender, name=f"{contender.name}-replica", command=command)
    started = time.monotonic()
    with running(named, logs) as server:
        while not _finds(server, body):
            if time.monotonic() - started > REPLICA_TIMEOUT:
                raise BenchError(f"{named.name} has not recovered after {REPLICA_TIMEOUT:.0f} s")
            time.sleep(POLL_EVERY)
        return {
            "stands_s": time.monotonic() - started,
            "peak_mib": _memory(server.pid, "VmHWM") / MIB,
        }


def _read_dump(server: Server) -> int:
    """Returns the size of a dump in bytes; parses nothing, so that only the server is timed."""
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address, timeout=DUMP_TIMEOUT) as connection:
        connection.sendall(b"GET /dump HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        size = sum(_pieces(connection))
    if size < RECEIVE_BYTES // 1024:
        raise BenchError(f"{server.name} /dump gave {size} bytes")
    return size


def _pieces(connection: socket.socket) -> Iterator[int]:
    while piece := connection.recv(RECEIVE_BYTES):
        yield len(piece)


def _finds(server: Server, body: str) -> bool:
    with _connection(server) as connection:
        connection.request("POST", "/query", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        reply = response.read()
    if response.status != 200:
        return False
    scores: dict[str, dict[str, int]] = json.loads(reply)["scores"]
    return any(tokens for ranks in scores.values() for tokens in ranks.values())


@contextmanager
def _connection(server: Server) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DUMP_TIMEOUT)
    try:
        yield connection
    finally:
        connection.close()


def _memory(pid: int, name: str) -> int:
    """Returns one of the memory figures of /proc/PID/status in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise BenchError(f"no {name} of process {pid}")
