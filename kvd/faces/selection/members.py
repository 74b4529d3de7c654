"""Strict readers of the members that several bodies of the selection service have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from kvd.errors import BadRequest, Invalid
from kvd.faces.common import bodies
from kvd.http.messages import Request, Response
from kvd.model import PartitionKey
from kvd.selection.candidates import Candidates
from kvd.selection.options import RouterMode
from kvd.selection.phases import Phase
from kvd.selection.policies import SHOWN, Policy
from kvd.selection.requests import Retry
from kvd.selection.service import Selections
from kvd.selection.tuning import TuningKey, TuningPolicy
from kvd.selection.worker_record import DEFAULT_MODEL
from kvd.slots.live_requests import Receipt
from kvd_core.json.scan import BodyScanner
from kvd_core.ledger.ledger import MAX_REQUEST_ID_BYTES
from kvd_core.selector.settings import Settings

# Longest time that a body may give: sums of times stay finite, as JSON needs.
MAX_MILLISECONDS = 2**53

# What is tuned: a model, by its documented name or that of other routes, or one tenant of a model.
TUNED = ("model", *bodies.PARTITION_MEMBERS)
TUNED_POLICY = (*TUNED, "router_policy")
POLICY = BodyScanner({}, TUNED_POLICY)


def partition_key(members: bodies.Members) -> PartitionKey:
    model_name = members.get("model_name", DEFAULT_MODEL)
    if not isinstance(model_name, str):
        raise Invalid("model_name: expected a text")
    return PartitionKey(model_name, bodies.tenant(members))


def u32(members: bodies.Members, name: str) -> int:
    return bodies.uint(members, name, bodies.U32_MAX)


def u64(members: bodies.Members, name: str) -> int:
    return bodies.uint(members, name, bodies.U64_MAX)


def number(members: Mapping[str, Any], name: str) -> float:
    value = members[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Invalid(f"{name}: expected a number")
    try:
        return float(value)
    except OverflowError:
        raise Invalid(f"{name}: a number out of range") from None


def texts(members: bodies.Members, name: str) -> tuple[str, ...]:
    value = members[name]
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise Invalid(f"{name}: expected an array of texts")
    return tuple(bodies.kept_name(each, name) for each in value)


def optional_object(members: bodies.Members, name: str) -> bodies.Members | None:
    value = members.get(name)
    if value is not None and not isinstance(value, dict):
        raise Invalid(f"{name}: expected an object")
    return value


def optional_number(members: bodies.Members, name: str) -> float:
    return 0.0 if members.get(name) is None else number(members, name)


def optional_seconds(members: bodies.Members, name: str) -> float | None:
    """Returns a time that is given in milliseconds; None when the member is absent or null."""
    if members.get(name) is None:
        return None
    milliseconds = number(members, name)
    if not 0.0 < milliseconds <= MAX_MILLISECONDS:
        raise BadRequest(f"{name} must be above 0 and at most {MAX_MILLISECONDS}")
    return milliseconds / 1000.0


def retry_of(request: Request, reservation_id: str | None) -> Retry | None:
    """Returns what identifies a retry of this request; None without an Idempotency-Key."""
    key = bodies.retry_key(request)
    if key is None:
        return None
    content = hashlib.blake2b(request.body, digest_size=16, person=request.path.encode()[:16])
    return Retry((reservation_id, key), content.digest())


def booked(
    status: int, answer: bytes, receipt: Receipt[Candidates], selections: Selections
) -> Response:
    """Returns the response that reports a booking; if its client has left, the booking ends."""
    return Response(status, answer, undo=partial(selections.reservations.take_back, receipt))


def bounded_id(text: str, longest: int = MAX_REQUEST_ID_BYTES) -> str:
    if len(text.encode()) > longest:
        raise Invalid(f"reservation_id: longer than {longest} bytes")
    return text


def phase_of(members: bodies.Members, allowed: tuple[Phase, ...]) -> Phase | None:
    value = members.get("phase")
    if value is None:
        return None
    if value not in allowed:
        raise Invalid(f"phase: expected one of {', '.join(allowed)}")
    return Phase(value)


def mode_of(members: Mapping[str, Any]) -> RouterMode:
    try:
        return RouterMode(members["router_mode"])
    except ValueError:
        raise Invalid(f"router_mode: expected one of {', '.join(RouterMode)}") from None


def policy_of(members: Mapping[str, Any], held: Settings | None) -> Policy:
    """Returns the policy of a body: a name, or an object with a name, weights or both.

    Without a name, the weights change those of `held`, the settings so far.
    """
    value = members["router_policy"]
    try:
        if isinstance(value, str):
            return Policy.parse(value)
        if not isinstance(value, dict):
            raise ValueError("expected a text or an object")
        for name in value:
            if name not in ("policy", "weights"):
                raise ValueError(f"{name[:SHOWN]}: unknown member; expected policy and weights")
        weights = optional_object(value, "weights") or {}
        changes = {
            name: None if weights[name] is None else number(weights, name) for name in weights
        }
        base = value.get("policy")
        if base is None and held is not None:
            return Policy.of(held).with_weights(changes)
        if not isinstance(base, str):
            raise ValueError("policy: expected a text")
        return Policy.parse(base).with_weights(changes)
    except (ValueError, Invalid) as error:
        raise Invalid(f"router_policy: {error}") from None


def tuning_key(members: bodies.Members) -> TuningKey:
    """Returns the model, and the tenant if the body names one, whose routing is changed."""
    model = bodies.alias(members, "model", "model_name")
    if model is None:
        raise Invalid("missing member `model`")
    return model, bodies.alias(members, *bodies.TENANT)


def read_policy(body: bytes) -> TuningPolicy:
    """Reads a body of POST /policy that names its policy, as an entry of a fleet file must."""
    members = bodies.scan(POLICY, body)
    key = tuning_key(members)
    bodies.require(members, "router_policy")
    return TuningPolicy(key, policy_of(members, None))
