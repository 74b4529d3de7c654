"""Measures the cost of bearer tokens to a request on the fast path: with 0, 1, 2 and 64 tokens.

    python bench/tokens.py

One connection asks for the `/loads` of a slot tracker without workers, in this process. Most of a
figure is the system calls, two at each end. The numbers of tokens take turns, and the fastest round
of each counts.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvd.faces.slot_tracker import routes as slot_tracker
from kvd.http.fast_path import FastPath, Parkable
from kvd.http.limits import HttpLimits, HttpStats
from kvd.http.permits import PermitRules
from kvd.http.transport import Shared
from kvd.slots.trackers import SlotTrackers
from kvd.telemetry.counts import RequestCounts

ROUNDS, REQUESTS = 25, 4_000
TOKEN = b"bench-0123456789abcdef"
HELD = (0, 1, 2, 64)  # tokens; a request is compared with all, and shows the last one
ROUTES = {
    f"{route.method} {route.path}".encode(): route
    for route in slot_tracker.routes(SlotTrackers(1.0))
    if route.hot and "{" not in route.path
}


def unexpected(*asked: object) -> NoReturn:
    raise SystemExit(f"not answered by the fast path: {asked}")


def nanoseconds(held: int) -> float:
    """Returns this thread's CPU time for one request."""
    rules = PermitRules()
    others = [(b"other-0123456789-%d" % number, 1) for number in range(held - 1)]
    rules.replace([*others, *([(TOKEN, 1)] if held else [])], [], [])
    shared = Shared(HttpLimits(), HttpStats(), tick=1.0)
    path = FastPath(
        *(ROUTES, [], unexpected, unexpected, unexpected, unexpected),
        *(rules, shared, RequestCounts()),
    )
    path.lines = path.created_lines = b"HTTP/1.1 200 OK\r\n"
    shown = b"authorization: Bearer %b\r\n" % TOKEN if held else b""
    common = b"host: 127.0.0.1:8091\r\nuser-agent: bench\r\naccept: */*\r\n"
    request = b"GET /loads HTTP/1.1\r\n%b%b\r\n" % (common, shown)
    server, client = socket.socketpair()
    with closing(server), closing(client), closing(path):
        path.add(server.fileno())
        path.park(Parkable(True), server.fileno())
        started = time.thread_time_ns()
        for _ in range(REQUESTS):
            client.send(request)
            path.serve_ready(0)
            client.recv(4096)
        return (time.thread_time_ns() - started) / REQUESTS


def main() -> None:
    least = dict.fromkeys(HELD, float("inf"))
    for _ in range(ROUNDS):
        for held in HELD:
            least[held] = min(least[held], nanoseconds(held))
    print("| tokens | µs a request | more |\n|---|---|---|")
    for held, cost in least.items():
        print(f"| {held} | {cost / 1000:.2f} | {(cost - least[0]) / 1000:.2f} |")


if __name__ == "__main__":
    main()
