"""Routes that change at run time how a model is routed: busy thresholds, router mode and policy.

A change to a model holds for all its tenants; a change to one tenant wins over it.
"""

from __future__ import annotations

from typing import Any

from kvd.errors import BadRequest
from kvd.faces.common import bodies
from kvd.faces.selection.members import POLICY, TUNED, mode_of, number, policy_of, tuning_key
from kvd.http.messages import Request, Response
from kvd.selection.options import THRESHOLDS, RouterMode
from kvd.selection.policies import MEMBERS, Policy, RouterPolicy, weights_of
from kvd.selection.service import Selections
from kvd.selection.tuning import TuningKey
from kvd_core.json.scan import BodyScanner
from kvd_core.selector.selector import MAX_ISL_TOKENS

OFF = "off"  # the value of a threshold that is not applied

BUSY = BodyScanner({}, (*TUNED, *THRESHOLDS))
MODE = BodyScanner({}, (*TUNED, "router_mode"))


def post_thresholds(request: Request, *, selections: Selections) -> Response:
    """Sets the given thresholds; answers those that now hold."""
    members = bodies.scan(BUSY, request.body)
    key = tuning_key(members)
    changes = {
        name: _threshold(members, name) for name in THRESHOLDS if members.get(name) is not None
    }
    if changes:
        try:
            selections.tuning.change(key, changes)
        except ValueError as error:
            raise BadRequest(str(error)) from None
    return bodies.json_response(_busy(selections, key))


def list_thresholds(request: Request, *, selections: Selections) -> Response:
    keys = selections.tuning.where_set(THRESHOLDS)
    return bodies.json_response({"thresholds": [_busy(selections, key) for key in keys]})


def delete_thresholds(request: Request, *, selections: Selections) -> Response:
    """Removes thresholds that were set, so that the model's or the default ones hold again."""
    key = _named(request)
    selections.tuning.forget(key, THRESHOLDS)
    return bodies.json_response(_busy(selections, key))


def post_mode(request: Request, *, selections: Selections) -> Response:
    """Sets the router mode if one is given; answers the one that now holds."""
    members = bodies.scan(MODE, request.body)
    key = tuning_key(members)
    if members.get("router_mode") is not None:
        selections.tuning.change(key, {"mode": mode_of(members).core})
    return bodies.json_response(_mode(selections, key))


def list_modes(request: Request, *, selections: Selections) -> Response:
    """Lists the default mode, and the modes that were set for models and tenants."""
    answer = {
        "router_mode": RouterMode.of(selections.options.settings),
        "router_modes": [
            _mode(selections, key) for key in selections.tuning.changed_keys(("mode",))
        ],
    }
    return bodies.json_response(answer)


def delete_mode(request: Request, *, selections: Selections) -> Response:
    key = _named(request)
    selections.tuning.forget(key, ("mode",))
    return bodies.json_response(_mode(selections, key))


def post_policy(request: Request, *, selections: Selections) -> Response:
    """Sets the router policy if one is given; answers the one that now holds."""
    members = bodies.scan(POLICY, request.body)
    key = tuning_key(members)
    if members.get("router_policy") is not None:
        policy = policy_of(members, selections.tuning.settings(*key))
        selections.tuning.change(key, policy.row, whole=MEMBERS)
    return bodies.json_response(_policy(selections, key))


def list_policies(request: Request, *, selections: Selections) -> Response:
    """Lists the default policy, those set for models and tenants, and the weights of all."""
    settings = selections.options.settings
    answer = {
        "router_policy": str(Policy.of(settings)),
        "weights": weights_of(settings),
        "router_policies": [
            _policy(selections, key) for key in selections.tuning.changed_keys(MEMBERS)
        ],
        "presets": {each: weights_of(settings.replace(**each.row)) for each in RouterPolicy},
    }
    return bodies.json_response(answer)


def delete_policy(request: Request, *, selections: Selections) -> Response:
    key = _named(request)
    selections.tuning.forget(key, MEMBERS)
    return bodies.json_response(_policy(selections, key))


def _busy(selections: Selections, key: TuningKey) -> dict[str, Any]:
    settings = selections.tuning.settings(*key)
    return _shown(key) | {name: settings.members[name] for name in THRESHOLDS}


def _mode(selections: Selections, key: TuningKey) -> dict[str, Any]:
    settings = selections.tuning.settings(*key)
    return _shown(key) | {"router_mode": RouterMode.of(settings)}


def _policy(selections: Selections, key: TuningKey) -> dict[str, Any]:
    settings = selections.tuning.settings(*key)
    return _shown(key) | {
        "router_policy": str(Policy.of(settings)),
        "weights": weights_of(settings),
    }


def _shown(key: TuningKey) -> dict[str, Any]:
    model, tenant = key
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
    return value


def _named(request: Request) -> TuningKey:
    model, tenant = bodies.filters(request)
    if model is None:
        raise BadRequest("the parameter `model_name` is missing")
    return model, tenant
