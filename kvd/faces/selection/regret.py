"""Routes of reported outcomes: taking a report, and comparing reports with expectations."""

from __future__ import annotations

from typing import Any

from kvd.errors import BadRequest
from kvd.faces.common import bodies
from kvd.faces.selection.members import optional_seconds
from kvd.http.messages import Request, Response
from kvd.selection.regret import Account
from kvd.selection.service import Selections
from kvd_core.json.scan import BodyScanner
from kvd_core.selector.selector import MAX_ISL_TOKENS

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


def list_regret(request: Request, *, selections: Selections) -> Response:
    """Lists the accounts of all ranks, and their sum by model and tenant."""
    rows = []
    sums: dict[Any, Account] = {}
    for (key, worker_id, dp_rank), account in selections.regret.rows():
        partition = key._asdict()
        rows.append(partition | {"worker_id": worker_id, "dp_rank": dp_rank} | _members(account))
        sums.setdefault(key, Account()).add(account)
    models = [key._asdict() | _members(account) for key, account in sums.items()]
    return bodies.json_response({"models": models, "ranks": rows})


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
