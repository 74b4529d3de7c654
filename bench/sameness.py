"""Checks that both servers give equal answers before anything is timed."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable

from errors import BenchError
from servers import Pair, Server

TIMEOUT = 30.0  # seconds for one answer

Scores = dict[tuple[str, str], int]  # (instance, rank) -> tokens


def _scores(server: Server, path: str, body: str) -> Scores:
    """Non-zero scores: whether a worker without a match is listed is each server's choice."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        reply = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise BenchError(f"{server.name} {path}: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise BenchError(f"{server.name} {path} answered {response.status} {reply[:300]!r}")
    rows: dict[str, dict[str, int]] = json.loads(reply)["scores"]
    return {(i, rank): n for i, ranks in rows.items() for rank, n in ranks.items() if n}


def check_equal(pair: Pair, path: str, bodies: Iterable[str], matched: int) -> None:
    """Raise unless both servers score every body alike, the best at `matched` tokens."""
    for number, body in enumerate(bodies):
        first, second = (_scores(server, path, body) for server in pair)
        if first != second:
            raise BenchError(
                f"{path}, sample {number}: {pair[0].name} says {first}, {pair[1].name} {second}"
            )
        if max(first.values(), default=0) != matched:
            raise BenchError(f"{path}, sample {number}: {first}, expected a score of {matched}")
