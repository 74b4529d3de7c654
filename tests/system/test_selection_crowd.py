"""Thousands of clients whose selections are held at once, each on a connection of its own."""

from __future__ import annotations

import json
import selectors
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvd.platform.descriptors import raise_limit, waiting_within
from tests.conformance.engine import Engine
from tests.support.budget import scaled
from tests.support.http_client import Client
from tests.support.processes import START_DEADLINE_S, Server

# In a soak ten thousand, or as many as kvd lets wait with the available descriptors.
WAITING = min(scaled(2000), 10_000, waiting_within(raise_limit()))
LEAVING = WAITING // 10  # clients that leave before they are served
DOOMED = WAITING // 5  # clients that allow only one worker, which is removed
PATIENCE_S = 600  # limit of a selection's wait: more than the slowest machine needs for the crowd
BATCH = WAITING * 2 // 5  # tokens: the two workers that stay have room for the rest, one token each
RESERVED = 50  # reservations on each worker, beside the one that makes it busy


class WaitingClients:
    """Clients that have sent a request and wait for the answer."""

    def __init__(self, server: Server) -> None:
        self._address = "127.0.0.1", server.port
        self.waiting: dict[str, socket.socket] = {}

    def ask(self, name: str, **members: Any) -> None:
        prompt = {"block_hashes": [7], "sequence_hashes": [7], "isl_tokens": 1}
        body = json.dumps({**prompt, **members, "reservation_id": name}).encode()
        head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        made = self.waiting[name] = socket.socket()
        made.connect(self._address)
        made.sendall(b"POST /select_and_reserve HTTP/1.1\r\n%b\r\n\r\n%b" % (head.encode(), body))

    def leave(self, names: Iterable[str]) -> None:
        for name in names:
            self.waiting.pop(name).close()

    def answers(self, count: int) -> dict[str, tuple[int, Any]]:
        """Waits for that many answers; returns their statuses and members. Those clients leave."""
        found: dict[str, tuple[int, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for name, waiting in self.waiting.items():
                selector.register(waiting, selectors.EVENT_READ, name)
            while len(found) < count:
                ready = selector.select(timeout=START_DEADLINE_S)
                assert ready, f"{len(found)} of {count} answers"
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    head, _, body = self.waiting[key.data].recv(65536).partition(b"\r\n\r\n")
                    found[key.data] = int(head.split()[1]), json.loads(body)
        self.leave(found)
        return found


class Service:
    """The selection service, and an engine for each of three workers.

    They are there so that the daemon's descriptors can be counted: attempts to connect to engines
    that are not come and go.
    """

    def __init__(self, server: Server, client: Client, opened: ExitStack) -> None:
        self._server = server
        self._client = client
        self._engines = {worker_id: Engine(f"e{worker_id}") for worker_id in (1, 2, 3)}
        for engine in self._engines.values():
            engine.bind()
            opened.callback(engine.unbind)

    def do(self, method: str, path: str, members: Any = None, status: int = 200) -> Any:
        answer = self._client.request(method, path, json=members)
        assert answer.status_code == status, answer.text
        return answer.json()

    def register(self, worker_id: int) -> None:
        """Registers a worker and makes it busy, with more tokens than it can compute at once."""
        worker = {
            "worker_id": worker_id,
            "endpoint": f"http://worker-{worker_id}:8000",
            "block_size": 4,
            "max_num_batched_tokens": BATCH,
            "kv_events_endpoints": {"0": self._engines[worker_id].endpoint("pub")},
        }
        assert self.do("POST", "/workers", worker, 201)["lifecycle"] == "schedulable"
        self._engines[worker_id].wait_subscribed(1, START_DEADLINE_S)
        self.reserve(f"busy-{worker_id}", worker_id, BATCH + 1)
        for number in range(RESERVED):
            self.reserve(f"{worker_id}-{number}", worker_id, 1)

    def remove(self, worker_id: int) -> None:
        self.do("DELETE", f"/workers/{worker_id}")
        self._engines[worker_id].wait_unsubscribed(START_DEADLINE_S)

    def reserve(self, name: str, worker_id: int, tokens: int) -> None:
        prompt = {"sequence_hashes": [worker_id], "isl_tokens": tokens}
        place = {"worker_id": worker_id, "effective_prefill_tokens": tokens}
        self.do("POST", "/reservations", {"reservation_id": name, **place, **prompt}, 201)

    def loads(self) -> Any:
        (fleet,) = self.do("GET", "/loads")
        return fleet

    def wait_pending(self, count: int) -> None:
        self._server.wait_until(lambda: self.loads()["pending_count"] == count, f"at {count} held")

    def rows(self) -> dict[int, tuple[int, int, int]]:
        return {row["worker_id"]: tuple(row.values())[2:] for row in self.loads()["loads"]}  # type: ignore[misc]

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self._server.process.pid}/fd").iterdir()))


def test_thousands_of_clients_are_held(kvd_process: Callable[..., Server]) -> None:
    environ = {
        "DYN_ROUTER_QUEUE_THRESHOLD": "1",
        "KVD_HTTP_CONNECTIONS": str(WAITING + 10),
        "KVD_HTTP_HANDLER_S": str(PATIENCE_S),
        "KVD_ROUTER_QUEUE_S": str(PATIENCE_S),
    }
    server = kvd_process(face="select-service", environ=environ)
    with Client(server.base_url, timeout=START_DEADLINE_S) as client, ExitStack() as opened:
        service = Service(server, client, opened)
        for worker_id in (1, 2, 3):
            service.register(worker_id)
        before = service.rows(), service.descriptors()
        clients = WaitingClients(server)
        for number in range(WAITING):
            members = {"allowed_worker_ids": [3]} if number < DOOMED else {}
            clients.ask(f"c{number}", **members)
        service.wait_pending(WAITING)
        assert service.rows() == before[0]
        clients.leave([f"c{number}" for number in range(WAITING - LEAVING, WAITING)])
        service.wait_pending(WAITING - LEAVING)

        service.remove(3)
        refused = clients.answers(DOOMED)
        assert {status for status, _ in refused.values()} == {503}
        assert refused.keys() == {f"c{number}" for number in range(DOOMED)}
        service.do("DELETE", "/reservations/3-0", status=404)
        service.wait_pending(WAITING - LEAVING - DOOMED)
        assert service.rows() == {id_: row for id_, row in before[0].items() if id_ != 3}

        service.do("POST", "/reservations/busy-1/prefill_complete")
        service.do("DELETE", "/reservations/busy-2")
        check_served(service, clients.answers(WAITING - LEAVING - DOOMED))
        check_nothing_left(service, before)


def check_served(service: Service, served: dict[str, tuple[int, Any]]) -> None:
    assert {status for status, _ in served.values()} == {200}
    assert all(answer["reservation_id"] == name for name, (_, answer) in served.items())
    on = Counter(answer["worker_id"] for _, answer in served.values())
    # All of the crowd share one block, and all others another one; each has one token.
    assert service.rows() == {
        1: (on[1] + RESERVED, 1 + (on[1] > 0), on[1] + RESERVED + 1),
        2: (on[2] + RESERVED, 1 + (on[2] > 0), on[2] + RESERVED),
    }
    assert min(on[1], on[2]) > 0


def check_nothing_left(service: Service, before: tuple[Any, int]) -> None:
    """Removed workers take their requests along; new ones with the same ids begin empty."""
    for worker_id in (1, 2):
        service.remove(worker_id)
    assert service.loads()["loads"] == []
    for worker_id in (1, 2, 3):
        service.register(worker_id)
    assert (service.rows(), service.descriptors()) == before
    for name in ("c0", f"c{WAITING - 1}", f"c{DOOMED}"):  # refused, gone, served
        service.reserve(name, 1, 1)
        service.do("DELETE", f"/reservations/{name}")
