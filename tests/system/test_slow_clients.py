"""Clients that hold a connection with as few bytes as possible, on every address of every face."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import pytest

from kvd.http.routes import Route
from tests.support.all_routes import all_routes
from tests.support.asking import FACES, Faces, bearer, serving_faces

TOKEN = "holder-0123456789"
DEADLINES = {"head": 0.3, "body": 0.3, "idle": 0.3, "linger": 5.0}
DRIP_S = 0.03  # between two bytes
# Enough for a handshake and a deadline on a busy machine; without deadlines nothing would end.
MOST_S = 30.0
HANDSHAKES = 5  # tried in turn by one client, at most
CLIENTS = 24  # at once
PAUSE_S = 0.1  # between rounds of well-behaved requests

ROUTES = all_routes()
GRANTED = f"authorization: Bearer {TOKEN}\r\n"
JSON = "content-type: application/json\r\n"


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Faces]:
    folder = tmp_path_factory.mktemp("slow")
    (folder / "tokens").write_text(f"holder read,lifecycle,admin {TOKEN}\n")
    lines = [f"http_{name}_s = {seconds}" for name, seconds in DEADLINES.items()]
    with serving_faces(folder, certificate, f'tokens_file = "{folder}/tokens"', *lines) as served:
        yield served


def drip(sock: socket.socket, sent: bytes, more: bytes) -> tuple[bytes, float]:
    """Sends `sent`, and then `more` again and again until the server ends the connection.

    Returns the bytes received, and after how many seconds the last of them came.
    """
    received, begun = b"", time.monotonic()
    last = begun
    sock.settimeout(DRIP_S)
    try:
        sock.sendall(sent)
        while time.monotonic() - begun < MOST_S:
            try:
                piece = sock.recv(65536)
                if not piece:
                    break
                received += piece
                last = time.monotonic()
            except TimeoutError:
                try:
                    sock.sendall(more)
                except BrokenPipeError:  # the server reads no more; its answer follows
                    more = b""
    except OSError:
        pass  # the server closed it before the last byte
    assert time.monotonic() - begun < MOST_S, (sent, received)
    return received, last - begun


def posts(face: str) -> list[Route]:
    """Returns one route that takes a body of each kind: hot, waiting, and of the application."""
    found: dict[tuple[bool, bool], Route] = {}
    for route in ROUTES[face]:
        if route.method == "POST" and "{" not in route.path:
            found.setdefault((route.hot, route.waits), route)
    return list(found.values())


def attacks(face: str) -> Iterator[tuple[str, str, str, bytes, list[int]]]:
    """Yields attacks: the deadline they meet, head, body, bytes to repeat, expected statuses."""
    for route in posts(face):
        head = f"POST {route.path} HTTP/1.1\r\nhost: localhost\r\n"
        yield "head", head + GRANTED, "a", b"a", [408]
        yield "head", head + JSON + "x: ", "", b"", [408]
        for length, body, more in (
            ("content-length: 4000\r\n", "{", b" "),
            ("transfer-encoding: chunked\r\n", "1;", b"x"),
        ):
            yield "body", head + JSON + GRANTED + length + "\r\n", body, more, [408]
            yield "", head + JSON + length + "\r\n", body, more, [401]
            expecting = length + "expect: 100-continue\r\n\r\n"
            yield "body", head + JSON + GRANTED + expecting, "", b"", [100, 408]
            yield "", head + JSON + expecting, "", b"", [401]
        yield "idle", head + JSON + GRANTED + "content-length: 0\r\n\r\n", "", b"", [0]


def test_no_connection_lasts_longer_than_its_deadlines(faces: Faces) -> None:
    before = faces.descriptors()

    def attack(job: tuple[str, tuple[str, str, str, bytes, list[int]]]) -> None:
        address, (phase, head, body, more, wanted) = job
        # On a busy machine the head's deadline may pass before a handshake is done.
        for _ in range(HANDSHAKES if address.startswith("tls:") else 1):
            with closing(faces.connect(address)) as sock:
                answer, seconds = drip(sock, (head + body).encode(), more)
            if answer:
                break
        statuses = [int(each) for each in re.findall(rb"HTTP/1.1 (\d+) ", answer)]
        if wanted != [0]:  # 0: any status, for an empty body
            assert statuses == wanted, (address, head, answer)
        if phase in ("head", "body"):
            assert seconds >= DEADLINES[phase], (address, head)

    jobs = [
        (address, each)
        for face in FACES
        for address in faces.addresses[face]
        for each in attacks(face)
    ]
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        attacking = [pool.submit(attack, job) for job in jobs]
        slowest = 0.0
        while wait(attacking, PAUSE_S).not_done:
            for address in faces.each():
                begun = time.monotonic()
                assert faces.ask(address, "/metrics", bearer(TOKEN)).status == 200
                slowest = max(slowest, time.monotonic() - begun)
        for each in attacking:
            each.result()
    assert slowest < MOST_S  # other clients are served meanwhile
    faces.until(before)
    assert "level=error" not in faces.server.stderr


def test_who_says_nothing_is_gone(faces: Faces) -> None:
    """A client may be silent before a handshake, in the middle of it, or after it."""
    before = faces.descriptors()
    with ThreadPoolExecutor(CLIENTS) as pool:

        def wait_silently(address: str, sent: bytes) -> None:
            with closing(faces.connect(address)) as sock:
                assert drip(sock, sent, b"")[0] == b""

        waiting = []
        for address in faces.each():
            waiting.append(pool.submit(wait_silently, address, b""))
            if address.startswith("tls:"):
                for sent in (b"", b"\x16\x03\x01", b"\x16\x03\x01\x3f\xff\x01"):
                    waiting.append(pool.submit(wait_silently, address.removeprefix("tls:"), sent))
        for each in waiting:
            each.result()
    faces.until(before)
