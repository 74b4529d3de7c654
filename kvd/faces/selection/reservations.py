"""Routes of reservations."""

from __future__ import annotations

import trio

from kvd.errors import BadRequest
from kvd.faces.common import bodies
from kvd.faces.selection.choosing import settings_of
from kvd.faces.selection.handlers import PROMPT_FIELDS, PromptReader
from kvd.faces.selection.members import (
    booked,
    bounded_id,
    number,
    partition_key,
    phase_of,
    retry_of,
    u64,
)
from kvd.faces.selection.prompts import ARRAYS
from kvd.http.messages import Request, Response
from kvd.selection.phases import Phase
from kvd.selection.requests import SelectReply
from kvd.selection.service import Selections
from kvd_core.json.scan import BodyScanner
from kvd_core.selector.selector import MAX_ISL_TOKENS

RESERVE = PromptReader(
    ARRAYS,
    (
        *PROMPT_FIELDS,
        "selection_id",
        "reservation_id",
        "worker_id",
        "dp_rank",
        "effective_prefill_tokens",
        "expected_output_tokens",
        "phase",
    ),
)
OUTPUT = BodyScanner({}, ("decay_fraction",))
SLICE = 256  # ids examined between two checkpoints: up to 1.5 ms, if all of them end


def reserve(request: Request, *, selections: Selections) -> Response:
    """Books a prompt on a rank that was selected before: 201, or 200 for a retry under its key."""
    members = bodies.scan(RESERVE, request.body)
    given = bodies.optional_text(members, "reservation_id")
    if given is None:
        given = bodies.text(members, "selection_id")
    reservation_id = bounded_id(given)
    retry = retry_of(request, reservation_id)
    if (again := selections.reservations.retries.find(retry)) is not None:
        assert again.receipt is not None
        return booked(200, again.answer, again.receipt, selections)
    rank = (
        u64(members, "worker_id"),
        bodies.optional_uint(members, "dp_rank", bodies.U32_MAX) or 0,
    )
    RESERVE.read_booked(selections)
    tokens = bodies.optional_uint(members, "effective_prefill_tokens", MAX_ISL_TOKENS)
    if tokens is not None and tokens > RESERVE.isl_tokens:
        raise BadRequest("effective_prefill_tokens must not exceed isl_tokens")
    key = partition_key(members)
    settings_of(selections, key, members)  # only checked: the caller has chosen already
    phase = phase_of(members, (Phase.PREFILL, Phase.DECODE))
    predicts = "token_ids" in members or "block_hashes" in members
    expected = bodies.optional_uint(members, "expected_output_tokens", bodies.U32_MAX)
    record, receipt = selections.reservations.reserve_on_rank(
        key,
        reservation_id,
        rank,
        RESERVE.put_before,
        tokens or 0,
        predicts=predicts,
        expected=expected,
        phase=phase,
    )
    answer = {
        "reservation_id": reservation_id,
        "model_name": key.model_name,
        "tenant_id": key.tenant_id,
        "worker_id": rank[0],
        "dp_rank": rank[1],
        "endpoint": record.endpoint,
    }
    rendered = bodies.render(answer)
    selections.reservations.retries.note(retry, SelectReply(rendered, receipt))
    return booked(201, rendered, receipt, selections)


def show_reservation(request: Request, *, selections: Selections) -> Response:
    """Shows what is booked under an id."""
    reservation_id = bodies.segment(request)
    key, live = selections.reservations.find(reservation_id)
    row = {
        "reservation_id": reservation_id,
        "model_name": key.model_name,
        "tenant_id": key.tenant_id,
        "worker_id": live.worker_id,
        "dp_rank": live.dp_rank,
        "blocks": live.blocks,
        "effective_prefill_tokens": live.tokens,
        "active_prefill_tokens": live.prefill_tokens,
        "prefill_complete": live.prefill_complete,
        "output_blocks": live.output_blocks,
        "expected_output_tokens": live.expected_output_tokens,
        "age_s": round(selections.clock() - live.admitted_at, 3),
    }
    return bodies.json_response(row)


async def free_by_prefix(request: Request, *, selections: Selections) -> Response:
    """Ends all bookings whose ids begin with a text, but not with another."""
    given = bodies.parameters(request, "prefix", "spared")
    prefix, spared = given.get("prefix"), given.get("spared")
    if not prefix:
        raise BadRequest("prefix: expected the beginning of reservation ids")
    live, freed = selections.reservations, 0
    for count, each in enumerate(list(live.owner_of), 1):
        is_meant = each.startswith(prefix) and not (spared and each.startswith(spared))
        # It may have ended meanwhile, or with its other phase.
        if is_meant and each in live.owner_of:
            live.free(each)
            freed += 1
        if count % SLICE == 0:
            await trio.lowlevel.checkpoint()
    return bodies.json_response({"freed": freed})


def output_block(request: Request, *, selections: Selections) -> Response:
    fraction = None
    if request.body:
        members = bodies.scan(OUTPUT, request.body)
        if members.get("decay_fraction") is not None:
            fraction = number(members, "decay_fraction")
            if not 0 <= fraction <= 1:
                raise BadRequest("decay_fraction must be from 0 to 1")
    selections.reservations.output_block(bodies.segment(request), fraction)
    return Response(200, bodies.OK)
