"""Checks that both servers give equal answers before anything is timed."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle

from errors import BenchError
from servers import Pair, Server

TIMEOUT = 30.0  # seconds for one answer

Scores = dict[tuple[str, str], int]  # (instance, rank) -> tokens
Rows = list[dict[str, object]]

# Members of the slot tracker's rows that need not be equal: the two names for a tenant, and a count
# that only newer versions of the peer have.
FREE_MEMBERS = ("tenant_id", "routing_group", "active_requests")

# Members of a selection that must be equal.
SELECTED = (
    "model_name",
    "worker_id",
    "dp_rank",
    "endpoint",
    "block_size",
    "overlap",
    "effective_prefill_tokens",
    "potential_decode_blocks",
)

LIFE_PATHS = ("/add", "/prefill_complete", "/free")  # for the bodies of a request's life, in order


def _ask(server: Server, method: str, path: str, body: str = "") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        reply = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise BenchError(f"{server.name} {path}: {error}") from error
    finally:
        connection.close()
    if response.status // 100 != 2:
        raise BenchError(f"{server.name} {path} answered {response.status} {reply[:300]!r}")
    return reply


def _scores(server: Server, path: str, body: str) -> Scores:
    """Returns the scores above zero: only some servers list workers without a match."""
    rows: dict[str, dict[str, int]] = json.loads(_ask(server, "POST", path, body))["scores"]
    return {(i, rank): n for i, ranks in rows.items() for rank, n in ranks.items() if n}


def check_equal(pair: Pair, path: str, bodies: Iterable[str], matched: int) -> None:
    """Raises unless both servers score every body alike, the best at `matched` tokens."""
    for number, body in enumerate(bodies):
        first, second = (_scores(server, path, body) for server in pair)
        if first != second:
            raise BenchError(
                f"{path}, sample {number}: {pair[0].name} says {first}, {pair[1].name} {second}"
            )
        if max(first.values(), default=0) != matched:
            raise BenchError(f"{path}, sample {number}: {first}, expected a score of {matched}")


def _selected(server: Server, path: str, body: str) -> dict[str, object]:
    answer: dict[str, object] = json.loads(_ask(server, "POST", path, body))
    return {name: answer[name] for name in SELECTED}


def _check_selected(pair: Pair, path: str, body: str, matched: int) -> None:
    first, second = (_selected(server, path, body) for server in pair)
    if first != second:
        raise BenchError(f"{path}: {pair[0].name} says {first}, {pair[1].name} {second}")
    overlap = first["overlap"]
    if not isinstance(overlap, dict) or overlap["longest_matched"] != matched:
        raise BenchError(f"{path}: {first}, expected {matched} cached tokens")


def check_selections_equal(pair: Pair, bodies: Iterable[str], matched: int) -> None:
    """Raises unless both services choose the same rank, which caches `matched` tokens."""
    for body in bodies:
        _check_selected(pair, "/select", body, matched)


def check_reservations_equal(pair: Pair, bodies: Iterable[str], matched: int) -> None:
    """Raises unless both services book alike and have equal loads after every step.

    All bookings are freed again.
    """
    for body in bodies:
        _check_selected(pair, "/select_and_reserve", body, matched)
        path = f"/reservations/{json.loads(body)['reservation_id']}"
        for method, step in (("POST", f"{path}/prefill_complete"), ("DELETE", path)):
            _check_fleets(pair)
            for server in pair:
                _ask(server, method, step)
    _check_fleets(pair)


def _check_fleets(pair: Pair) -> None:
    first, second = (_fleet_loads(server) for server in pair)
    if first != second:
        raise BenchError(f"/loads: {pair[0].name} says {first}, {pair[1].name} {second}")


def _fleet_loads(server: Server) -> Rows:
    (fleet,) = json.loads(_ask(server, "GET", "/loads"))
    rows: Rows = fleet["loads"]
    return sorted(rows, key=lambda row: (row["worker_id"], row["dp_rank"]))


@dataclass(frozen=True)
class LoadStats:
    """The expected answers of slot trackers: each worker's load, and what a question adds to it."""

    workers: int
    blocks: int
    prefill_tokens: int
    novel_blocks: int  # blocks of a question that even the worker with most of them lacks


def _rows(server: Server, method: str, path: str, body: str = "") -> Rows:
    """Returns rows in the order of worker and rank, without FREE_MEMBERS."""
    rows: Rows = json.loads(_ask(server, method, path, body))
    kept = ({name: x for name, x in row.items() if name not in FREE_MEMBERS} for row in rows)
    return sorted(kept, key=lambda row: (row["worker_id"], row["dp_rank"]))


def _equal_rows(pair: Pair, method: str, path: str, body: str = "") -> Rows:
    first, second = (_rows(server, method, path, body) for server in pair)
    if first != second:
        raise BenchError(f"{path}: {pair[0].name} says {first}, {pair[1].name} {second}")
    return first


def _check_loads(pair: Pair, totals: LoadStats) -> None:
    rows = _equal_rows(pair, "GET", "/loads")
    loads = [(row["active_decode_blocks"], row["active_prefill_tokens"]) for row in rows]
    if loads != [(totals.blocks, totals.prefill_tokens)] * totals.workers:
        raise BenchError(f"/loads: {rows}, expected {totals}")


def check_slots_equal(
    pair: Pair, questions: Iterable[str], lives: Iterable[str], totals: LoadStats
) -> None:
    """Raises unless both slot trackers have equal loads, also after every step of a request.

    `lives` are the bodies for LIFE_PATHS, request by request; no request stays live.
    """
    _check_loads(pair, totals)
    for body in questions:
        rows = _equal_rows(pair, "POST", "/potential_loads", body)
        least = min(int(str(row["potential_decode_blocks"])) for row in rows)
        if len(rows) != totals.workers or least != totals.blocks + totals.novel_blocks:
            raise BenchError(f"/potential_loads: {rows}, expected {totals}")
    for path, body in zip(cycle(LIFE_PATHS), lives):
        for server in pair:
            _ask(server, "POST", path, body)
        _equal_rows(pair, "GET", "/loads")
    _check_loads(pair, totals)
