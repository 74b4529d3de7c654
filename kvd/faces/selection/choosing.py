"""Reads the unusual members of a selection into a SelectRequest, and waits for its choice."""

from __future__ import annotations

import math
from functools import partial
from struct import Struct
from typing import Any, NamedTuple

from kvd.errors import BadRequest, Invalid
from kvd.faces.common import bodies
from kvd.faces.common.bodies import flag, optional_flag
from kvd.faces.selection.members import (
    bounded_id,
    mode_of,
    number,
    optional_number,
    optional_object,
    optional_seconds,
    phase_of,
    policy_of,
    texts,
    u32,
    u64,
)
from kvd.http.messages import Response
from kvd.model import PartitionKey
from kvd.selection.affinity import MAX_SESSION_ID_BYTES
from kvd.selection.phases import PREFILL_SUFFIX, Phase
from kvd.selection.policies import RouterPolicy
from kvd.selection.requests import Constraints, QueuedRequest, SelectRequest
from kvd.selection.scheduler import Scheduler
from kvd.selection.service import Selections
from kvd_core.ledger.ledger import MAX_REQUEST_ID_BYTES
from kvd_core.selector.settings import Settings

FLOAT = Struct("f")

INPUT_TRIGGERS = ("user_message", "tool_result", "other")  # of a session's context

# Overrides that change a choice, by their names in requests; others are accepted and ignored.
OVERRIDES = {
    "overlap_score_weight": "overlap_weight",
    "kv_overlap_score_weight": "overlap_weight",
    "prefill_load_scale": "overlap_weight",
    "overlap_score_credit": "device_credit",
    "router_temperature": "temperature",
}
# Overrides of weights that only Dynamo's cost has: requests with one of them get that cost.
OF_DYNAMO = OVERRIDES.keys() - {"router_temperature"}


def request_of(
    selections: Selections,
    key: PartitionKey,
    members: bodies.Members,
    selection_id: str | None,
    expected_output_tokens: int | None,
    strict_priority: int,
    session_id: str | None,
    lora_name: str | None,
) -> SelectRequest:
    """Returns the selection that a body asks for.

    The caller has read the usual members; the unusual ones are read here, from `members`.
    """
    required, preferred = _taints(members)
    constraints = Constraints(_allowed(members), _rank(members, "pinned_worker"), required)
    settings, advisory = settings_of(selections, key, members), optional_flag(members, "advisory")
    hints = _hints(members)
    if expected_output_tokens is None:
        expected_output_tokens = hints.expected_output_tokens
    return SelectRequest(
        key,
        settings.replace(queue_threshold=None) if advisory else settings,
        phase=phase_of(members, tuple(Phase)),
        selection_id=selection_id,
        constraints=None if constraints == Constraints() else constraints,
        preferred=preferred,
        affinity=_affinity(members),
        strict_priority=strict_priority,
        priority_jump=hints.priority_jump,
        expected_output_tokens=expected_output_tokens,
        lora_name=lora_name,
        explain=optional_flag(members, "explain"),
        advisory=advisory,
        session_id=_session(selections, members, session_id),
        expected_ttft=optional_flag(members, "expected_ttft"),
        slo_ttft_s=optional_seconds(members, "slo_ttft_ms"),
    )


def check_booking(selection: SelectRequest | None, reservation_id: str | None) -> None:
    """Raises if a selection cannot be booked, or not under the given id."""
    if selection is not None and selection.advisory:
        raise BadRequest("advisory: an advisory request cannot book")
    longest = MAX_REQUEST_ID_BYTES
    if selection is not None and selection.phase is Phase.BOTH:  # books twice
        longest -= len(PREFILL_SUFFIX)
    if reservation_id is not None:
        bounded_id(reservation_id, longest)


async def wait(scheduler: Scheduler, queued: QueuedRequest) -> Response:
    """Waits for a queued selection; returns the response to it."""
    undo = partial(scheduler.take_back, queued)
    return Response(200, await scheduler.wait(queued), undo=undo)


class _Hints(NamedTuple):
    priority_jump: float  # seconds that the request counts as older
    expected_output_tokens: int | None


def _hints(members: bodies.Members) -> _Hints:
    """Returns the hints in `nvext.agent_hints`; the request's own priority_jump wins.

    There `osl` stands for expected_output_tokens, and `latency_sensitivity`, or a `priority` above
    0, for priority_jump.
    """
    nvext = optional_object(members, "nvext") or {}
    hints = optional_object(nvext, "agent_hints") or {}
    output = bodies.optional_uint(hints, "osl", bodies.U32_MAX)
    sensitivity, priority = (
        optional_number(hints, name) for name in ("latency_sensitivity", "priority")
    )
    jump = sensitivity if hints.get("latency_sensitivity") is not None else max(0.0, priority)
    if members.get("priority_jump") is not None:
        jump = number(members, "priority_jump")
    return _Hints(jump, output)


def _session(selections: Selections, members: bodies.Members, session_id: str | None) -> str | None:
    """Returns the session of the request; None if it has none or sessions are not kept.

    The id in `session_context` wins over `session_id`.
    """
    context = optional_object(members, "session_context")
    if context is not None:
        session_id = _session_of(context)
    if session_id is None or selections.affinity is None:
        return None
    if len(session_id.encode()) > MAX_SESSION_ID_BYTES:
        raise BadRequest(f"session_id: longer than {MAX_SESSION_ID_BYTES} bytes")
    return session_id


def _session_of(context: bodies.Members) -> str:
    bodies.optional_text(context, "parent_session_id")
    optional_flag(context, "session_final")
    trigger = context.get("input_trigger")
    if trigger is not None and trigger not in INPUT_TRIGGERS:
        raise Invalid(f"input_trigger: expected one of {', '.join(INPUT_TRIGGERS)}")
    return bodies.text(context, "session_id")


def _allowed(members: bodies.Members) -> frozenset[int] | None:
    value = members.get("allowed_worker_ids")
    if value is None:
        return None
    if not isinstance(value, list):
        raise Invalid("allowed_worker_ids: expected an array")
    for each in value:
        if type(each) is not int or not 0 <= each <= bodies.U64_MAX:
            u64({"allowed_worker_ids": each}, "allowed_worker_ids")  # raises the usual error
    return frozenset(value)


def _rank(members: bodies.Members, name: str) -> tuple[int, int] | None:
    value = optional_object(members, name)
    if value is None:
        return None
    return u64(value, "worker_id"), u32(value, "dp_rank")


def _affinity(members: bodies.Members) -> tuple[int, int | None] | None:
    value = optional_object(members, "affinity_target")
    if value is None:
        return None
    return u64(value, "worker_id"), bodies.optional_uint(value, "dp_rank", bodies.U32_MAX)


def _taints(members: bodies.Members) -> tuple[frozenset[str], dict[str, float] | None]:
    """Returns the taints that a worker must have, and the weights of preferred ones."""
    value = optional_object(members, "routing_constraints") or {}
    required = frozenset[str]()
    if value.get("required_taints") is not None:
        required = frozenset(texts(value, "required_taints"))
    preferred = value.get("preferred_taints")
    if isinstance(preferred, list):
        return required, dict.fromkeys(texts(value, "preferred_taints"), 1.0)
    if preferred is not None and not isinstance(preferred, dict):
        raise Invalid("preferred_taints: expected an object of weights, or an array of texts")
    weights = {taint: _weight(preferred, taint) for taint in preferred} if preferred else None
    return required, weights


def _weight(weights: bodies.Members, taint: str) -> float:
    """Returns a weight in single precision, as Dynamo has it."""
    try:
        weight: float = FLOAT.unpack(FLOAT.pack(number(weights, taint)))[0]
    except (Invalid, OverflowError):
        weight = math.inf
    if not math.isfinite(weight):
        raise Invalid("preferred_taints: a weight is not a number or is out of range")
    return weight


def settings_of(selections: Selections, key: PartitionKey, members: bodies.Members) -> Settings:
    """Returns the settings of a model and tenant with what a request overrides."""
    settings = selections.settings(key)
    override = optional_object(members, "router_config_override") or {}
    given = [name for name in OVERRIDES if override.get(name) is not None]
    changes: dict[str, Any] = {OVERRIDES[name]: number(override, name) for name in given}
    if members.get("router_policy") is not None:
        changes |= policy_of(members, settings).row
    elif OF_DYNAMO & set(given):
        changes |= RouterPolicy.DYNAMO.row
    if override.get("track_prefill_tokens") is not None:
        changes["track_prefill"] = flag(override, "track_prefill_tokens")
    if override.get("router_mode") is not None:
        changes["mode"] = mode_of(override).core
    optional_flag(override, "assume_kv_reuse")  # only checked: `prompts.unique` heeds it
    if not changes:
        return settings
    try:
        return settings.replace(**changes)
    except ValueError as error:
        raise Invalid(f"router_config_override: {error}") from None
