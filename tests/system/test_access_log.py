"""The access log of a running daemon: lines for every face, and readers that stand still."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvd.telemetry.stderr import MAX_WAITING_BYTES
from tests.support import exposition, http_client
from tests.support.forking import start_process
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server, clean_environment
from tests.support.running import running

QUERY = {"model_name": "m", "token_ids": [1, 2, 3, 4]}
NOTICE = re.compile(rb"event=lines_dropped lines=(\d+)\n")
WORKER = {"model_name": "m", "worker_id": 7, "block_size": 4, "dp_start": 0, "dp_size": 1}
# Requests that the fast path answers, once their model has a worker.
PLAIN = {
    "indexer": ("/query", QUERY),
    "slot-tracker": (
        "/potential_loads",
        {"model_name": "m", "sequence_hashes": [1], "new_isl_tokens": 4},
    ),
    "conductor": ("/query", {"model": "m", "block_size": 4, "token_ids": [1, 2, 3, 4]}),
}


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[Server, dict[str, str]]]:
    """Runs three faces; yields the process and their URLs."""
    ports = {face: find_free_port() for face in PLAIN}
    binds = [f"--{face}-bind=127.0.0.1:{port}" for face, port in ports.items()]
    arguments = ("serve", *binds, "--selection-bind=off", "--log-format=json", *flags)
    with running(folder, ports["indexer"], *arguments) as server:
        yield server, {face: f"http://127.0.0.1:{port}" for face, port in ports.items()}


def requests(server: Server) -> list[dict[str, Any]]:
    rows = (json.loads(line) for line in server.stderr.splitlines())
    return [row for row in rows if row["event"] == "request" and row["path"] != "/health"]


def test_what_the_core_answers_is_a_line_on_every_face(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "--access-log", "--log-level=warning") as (server, urls),
        Client() as client,
    ):
        body = {
            "instance_id": 7,
            "endpoint": "tcp://127.0.0.1:9",
            "model_name": "m",
            "block_size": 4,
        }
        client.post(f"{urls['indexer']}/register", json=body).raise_for_status()
        client.post(f"{urls['slot-tracker']}/register", json=WORKER).raise_for_status()
        for face, (path, body) in PLAIN.items():
            headers = {"X-Request-Id": f"of-{face}"}
            answer = client.post(urls[face] + path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-request-id"] == f"of-{face}"
            (row,) = (row for row in requests(server) if row.get("request_id") == f"of-{face}")
            assert (row["face"], row["path"], row["status"]) == (face, path, 200)
            assert row["bytes"] == len(answer.content)


def test_who_is_refused_is_told_which_request_that_was(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("a read 0123456789abcdef\n")
    tokens = f"--tokens-file={tmp_path}/tokens"
    with (
        serving(tmp_path, "--access-log", tokens) as (server, urls),
        Client() as client,
    ):
        for method, known in (("GET", "r-1"), ("HEAD", "r-2"), ("GET", None)):
            headers = {"x-request-id": known} if known else {}
            answer = client.request(method, f"{urls['indexer']}/workers", headers=headers)
            assert answer.status_code == 401
            assert answer.headers.get_list("x-request-id") == ([known] if known else [])
            assert bool(answer.content) == (method == "GET")
            assert requests(server)[-1].get("request_id") == known


def test_it_is_switched_in_a_running_daemon(tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text("")
    with serving(tmp_path, "--config", os.fspath(path)) as (server, urls):

        def is_logged() -> bool:
            before = len(requests(server))
            http_client.post(f"{urls['indexer']}/query", json=QUERY)
            return len(requests(server)) > before

        assert not is_logged()
        for text, on in (("access_log = true", True), ("", False)):
            path.write_text(text)
            server.process.send_signal(signal.SIGHUP)
            server.wait_until(lambda on=on: is_logged() == on, text or "off")  # type: ignore[misc]


@pytest.fixture
def stuck() -> Iterator[tuple[int, int]]:
    """Yields the port of a kvd that logs requests to a pipe, and the pipe, which nobody reads."""
    port = find_free_port()
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "kvd", "indexer", "--port", str(port)]
    with os.fdopen(writing, "wb") as pipe:
        process = start_process(command, clean_environment(KVD_ACCESS_LOG="true"), pipe, pipe)
    try:
        first = b""
        while b"event=serving" not in first:
            piece = os.read(reading, 4096)
            assert piece, first
            first += piece
        yield port, reading
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reading)


def dropped_at(port: int) -> float:
    metrics = http_client.get(f"http://127.0.0.1:{port}/metrics").text
    return exposition.parse(metrics)["kvd_log_lines_dropped_total"]


def test_a_pipe_that_nobody_reads_does_not_stop_the_daemon(stuck: tuple[int, int]) -> None:
    port, reading = stuck
    # The longest line that a client can cause: some 4,000 of them fill the pipe and kvd's queue.
    head = (
        b"GET /health HTTP/1.1\r\nhost: kvd\r\nx-request-id: " + b"r" * 128 + b"\r\n"
        b"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n\r\n"
    )
    asked = 0
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        while asked < (MAX_WAITING_BYTES + 65536) // 250:
            client.sendall(head)
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
            asked += 1
    dropped = dropped_at(port)
    assert 0 < dropped < asked
    seen = b""
    while (notice := NOTICE.search(seen)) is None:  # a reader gets all waiting lines
        piece = os.read(reading, 65536)
        assert piece, "kvd has ended"
        seen = seen[-4096:] + piece
    # The line of the request for metrics may have been dropped as well.
    assert int(notice[1]) == dropped_at(port) in (dropped, dropped + 1)


def test_without_room_on_the_disk_it_goes_on(tmp_path: Path) -> None:
    port = find_free_port()
    flags = ("indexer", "--port", str(port))
    command = ["sh", "-c", 'exec "$0" "$@" 2>/dev/full', sys.executable, "-m", "kvd", *flags]
    server = Server(command, tmp_path, port, clean_environment(KVD_ACCESS_LOG="true"))
    try:
        server.wait_healthy()
        metrics = http_client.get(f"{server.base_url}/metrics").text
        assert exposition.parse(metrics)["kvd_log_lines_dropped_total"] > 0
    finally:
        assert server.stop() == 0
