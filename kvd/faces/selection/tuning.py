"""Routes that change at run time how a model is routed: busy thresholds, router mode and policy.

What is said of a model holds for all its tenants; what is said of a tenant wins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvd.errors import BadRequest, Invalid
from kvd.faces.common import bodies
from kvd.faces.selection.members import mode_of, number, policy_of
from kvd.http.messages import Request, Response
from kvd.selection.options import THRESHOLDS, RouterMode
from kvd.selection.policies import MEMBERS, Policy, RouterPolicy, weights_of
from kvd.selection.service import Selections
from kvd.selection.tuning import TuningKey
from kvd_core.json.scan import BodyScanner
from kvd_core.selector.selector import MAX_ISL_TOKENS

OFF = "off"  # of a threshold


class PlacedPolicy(NamedTuple):
    """A policy, and the model, or the model's tenant, that it is of."""

    place: TuningKey
    policy: Policy


MODEL = ("model", "model_name")  # the documented name, and that of the other routes

BUSY = BodyScanner({}, ("model", *bodies.PLACE, *THRESHOLDS))
MODE = BodyScanner({}, ("model", *bodies.PLACE, "router_mode"))
POLICY_MEMBERS = ("model", *bodies.PLACE, "router_policy")
POLICY = BodyScanner({}, POLICY_MEMBERS)


def post_thresholds(request: Request, *, selections: Selections) -> Response:
    """Sets those thresholds that are given, and says what holds."""
    members = bodies.scan(BUSY, request.body)
    place = _place(members)
    changes = {
        name: _threshold(members, name) for name in THRESHOLDS if members.get(name) is not None
    }
    if changes:
        selections.tuning.change(place, changes)
    return bodies.json_response(_busy(selections, place))


def list_thresholds(request: Request, *, selections: Selections) -> Response:
    places = selections.tuning.places(THRESHOLDS)
    return bodies.json_response({"thresholds": [_busy(selections, place) for place in places]})


def delete_thresholds(request: Request, *, selections: Selections) -> Response:
    """Takes back what was set, so that the model's or the default ones hold again."""
    place = _named(request)
    selections.tuning.forget(place, THRESHOLDS)
    return bodies.json_response(_busy(selections, place))


def post_mode(request: Request, *, selections: Selections) -> Response:
    """Sets the router mode if one is given, and says which holds."""
    members = bodies.scan(MODE, request.body)
    place = _place(members)
    if members.get("router_mode") is not None:
        selections.tuning.change(place, {"mode": mode_of(members).core})
    return bodies.json_response(_mode(selections, place))


def list_modes(request: Request, *, selections: Selections) -> Response:
    """Lists the default mode, and where another one has been set."""
    answer = {
        "router_mode": RouterMode.of(selections.options.settings),
        "router_modes": [_mode(selections, place) for place in selections.tuning.said(("mode",))],
    }
    return bodies.json_response(answer)


def delete_mode(request: Request, *, selections: Selections) -> Response:
    place = _named(request)
    selections.tuning.forget(place, ("mode",))
    return bodies.json_response(_mode(selections, place))


def post_policy(request: Request, *, selections: Selections) -> Response:
    """Sets the router policy if one is given, and says which holds."""
    members = bodies.scan(POLICY, request.body)
    place = _place(members)
    if members.get("router_policy") is not None:
        policy = policy_of(members, selections.tuning.settings(*place))
        selections.tuning.change(place, policy.row, whole=MEMBERS)
    return bodies.json_response(_policy(selections, place))


def read_policy(body: bytes) -> PlacedPolicy:
    """Reads a body of `post_policy` that names its policy."""
    members = bodies.scan(POLICY, body)
    place = _place(members)
    bodies.require(members, "router_policy")
    return PlacedPolicy(place, policy_of(members, None))


def list_policies(request: Request, *, selections: Selections) -> Response:
    """Lists the default policy, where another one has been set, and the weights of all."""
    settings = selections.options.settings
    answer = {
        "router_policy": str(Policy.of(settings)),
        "weights": weights_of(settings),
        "router_policies": [
            _policy(selections, place) for place in selections.tuning.said(MEMBERS)
        ],
        "presets": {each: weights_of(settings.replace(**each.row)) for each in RouterPolicy},
    }
    return bodies.json_response(answer)


def delete_policy(request: Request, *, selections: Selections) -> Response:
    place = _named(request)
    selections.tuning.forget(place, MEMBERS)
    return bodies.json_response(_policy(selections, place))


def _busy(selections: Selections, place: TuningKey) -> dict[str, Any]:
    settings = selections.tuning.settings(*place)
    return _shown(place) | {name: settings.members[name] for name in THRESHOLDS}


def _mode(selections: Selections, place: TuningKey) -> dict[str, Any]:
    settings = selections.tuning.settings(*place)
    return _shown(place) | {"router_mode": RouterMode.of(settings)}


def _policy(selections: Selections, place: TuningKey) -> dict[str, Any]:
    settings = selections.tuning.settings(*place)
    return _shown(place) | {
        "router_policy": str(Policy.of(settings)),
        "weights": weights_of(settings),
    }


def _shown(place: TuningKey) -> dict[str, Any]:
    model, tenant = place
    return {"model": model} if tenant is None else {"model": model, "tenant_id": tenant}


def _threshold(members: bodies.Members, name: str) -> float | None:
    """Returns a threshold, None for one that is off."""
    if members[name] == OFF:
        return None
    if name == "active_prefill_tokens_threshold":
        return bodies.uint(members, name, MAX_ISL_TOKENS)
    value = number(members, name)
    if not 0 <= value <= 1 and name == "active_decode_blocks_threshold":
        raise BadRequest(f"{name} must be from 0 to 1")
    if not value >= 0:
        raise BadRequest(f"{name} must not be negative")
    return value


def _place(members: bodies.Members) -> TuningKey:
    model = bodies.alias(members, *MODEL)
    if model is None:
        raise Invalid("missing member `model`")
    return model, bodies.alias(members, *bodies.TENANT)


def _named(request: Request) -> TuningKey:
    model, tenant = bodies.filters(request)
    if model is None:
        raise BadRequest("the parameter `model_name` is missing")
    return model, tenant
