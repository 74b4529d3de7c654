"""Routes of reported outcomes: taking a report, and comparing reports with expectations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvd.errors import BadRequest
from kvd.faces.common import bodies
from kvd.faces.common.slices import written
from kvd.faces.selection.members import optional_seconds
from kvd.http.messages import Request, Response
from kvd.model import PartitionKey
from kvd.selection.regret import Account, Rank
from kvd.selection.service import Selections
from kvd_core.json.scan import BodyScanner
from kvd_core.selector.selector import MAX_ISL_TOKENS

SLICE_ROWS = 64  # accounts written between two checkpoints: about 1 ms

REPORT = BodyScanner({}, ("prompt_tokens", "cached_tokens", "output_tokens", "ttft_ms"))


def report(request: Request, *, selections: Selections) -> Response:
    """Takes a client's report on the outcome of a live reservation, which may be incomplete."""
    reservation_id = bodies.segment(request)
    members = bodies.scan(REPORT, request.body)
    key, live = selections.reservations.find(reservation_id)
    rank = key, live.worker_id, live.dp_rank
    cached = bodies.optional_uint(members, "cached_tokens", MAX_ISL_TOKENS)
    prompt = bodies.optional_uint(members, "prompt_tokens", MAX_ISL_TOKENS)
    output = bodies.optional_uint(members, "output_tokens", bodies.U32_MAX)
    ttft_s = optional_seconds(members, "ttft_ms")
    if cached is not None:
        if prompt is None:
            raise BadRequest("cached_tokens requires prompt_tokens")
        if cached > prompt:
            raise BadRequest("cached_tokens must not exceed prompt_tokens")
        if selections.settings(key).members["track_prefill"]:  # else the booking has no tokens
            selections.regret.note_cached(rank, max(0, prompt - live.tokens), cached)
    if output is not None:
        selections.speeds.note_output(reservation_id, output)
    if ttft_s is not None:
        selections.regret.note_ttft(rank, selections.speeds.expected_of(reservation_id), ttft_s)
    return Response(200, bodies.OK)


async def list_regret(request: Request, *, selections: Selections) -> Response:
    """Lists the accounts of all ranks, and their sum by model and tenant."""
    return Response(200, await written(_accounts(list(selections.regret.rows()))))


def _accounts(rows: list[tuple[Rank, Account]]) -> Iterator[bytes]:
    """Yields the lists, and b"" where other tasks may run; a rank is shown as it is then."""
    sums: dict[PartitionKey, Account] = {}
    for number, ((key, _, _), account) in enumerate(rows, 1):
        sums.setdefault(key, Account()).add(account)
        if number % SLICE_ROWS == 0:
            yield b""
    models = [key._asdict() | _members(account) for key, account in sums.items()]
    yield b'{"models":%b,"ranks":[' % bodies.render(models)
    for number, ((key, worker_id, dp_rank), account) in enumerate(rows, 1):
        row = key._asdict() | {"worker_id": worker_id, "dp_rank": dp_rank} | _members(account)
        yield (b"," if number > 1 else b"") + bodies.render(row)
        if number % SLICE_ROWS == 0:
            yield b""
    yield b"]}"


def _members(account: Account) -> dict[str, Any]:
    timed = account.timed
    return {
        "reports": account.reports,
        "expected_cached_tokens": account.expected_cached_tokens,
        "cached_tokens": account.cached_tokens,
        "missing_tokens": account.missing_tokens,
        "surplus_tokens": account.surplus_tokens,
        "timed": timed,
        "expected_ttft_s": account.expected_ttft_s / timed if timed else None,
        "ttft_s": account.ttft_s / timed if timed else None,
        "ttft_error_p50": account.error_at(0.5) if timed else None,
        "ttft_error_p90": account.error_at(0.9) if timed else None,
    }
