"""Reads members of the conductor's request bodies, and makes the failures of wrong ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from kvd.errors import BadRequest, KvdError
from kvd.faces.common.bodies import MAX_KEPT_BYTES, U32_MAX, U64_MAX
from kvd.index.publishers import EVERY_INSTANCE, Described
from kvd.model import is_name
from kvd.wire import kv_events
from kvd_core.json.scan import BodyScanner

MODEL = ("model", "modelname", "model_name")
SALT = ("cache_salt", "additional_salt", "additionalsalt")
HASHES = ("seq_hashes", "block_hash", "block_hashes")
ASKED = ("tenant_id", "block_size", "lora_name", "instance_id", "lora_id")

# Reads a question with hashes of any type.
SPELLED = BodyScanner({}, (*MODEL, *SALT, *ASKED, *HASHES), nested_bytes=None)
# Longest body in bytes whose hashes may be texts, some 10,000: making Python objects of them takes
# 30 ms.
TEXT_HASHES_LIMIT = 256 * 1024

Members = dict[str, Any]
_Name = TypeVar("_Name", str, str | None)


class Topic(NamedTuple):
    """The blocks that a question is about: model, context, instance."""

    model: str
    tenant: str
    block_size: int
    lora_name: str
    cache_salt: str
    instance: str  # "": all


def scan(scanner: BodyScanner, body: bytes | None) -> Members:
    try:
        return scanner.scan(body)
    except ValueError as error:
        raise detailed(BadRequest(f"the body is not valid JSON: {error}"), "invalid_json") from None
    except TypeError as error:
        raise detailed(BadRequest(str(error)), "invalid_type") from None


def require(members: Members, name: str) -> Any:
    value = members.get(name)
    if value is None:
        raise missing(name)
    return value


def required(members: Members, name: str) -> str:
    """Returns a text that must not be empty."""
    require(members, name)
    value = text(members, name)
    if not value:
        raise invalid(f"{name}: must not be empty", name)
    return value


def text(members: Members, name: str) -> str | None:
    """Returns a text, or None when the member is absent or null."""
    value = members.get(name)
    return None if value is None else kept_text(name, value)


def kept_text(name: str, value: object) -> str:
    """Returns a text that is short enough to be kept; raises for any other value."""
    if not isinstance(value, str):
        raise wrong_type(name, "a text")
    if len(value.encode()) > MAX_KEPT_BYTES:
        raise invalid(f"{name}: longer than {MAX_KEPT_BYTES} bytes", name)
    return value


def optional_name(members: Members, name: str) -> str | None:
    """Returns a name that will be kept, or None when the member is absent or null."""
    return named(text(members, name), name)


def required_name(members: Members, name: str) -> str:
    return named(required(members, name), name)


def named(value: _Name, name: str) -> _Name:
    if value is not None and not is_name(value):
        raise invalid(f"{name}: has control characters", name)
    return value


def checked(described: Described) -> Described:
    """Returns a publisher; raises for an engine that claims to serve every instance."""
    if described.instance_id == EVERY_INSTANCE and not described.is_store:
        raise invalid("instance_id: `*` is for stores, which serve every instance", "instance_id")
    return described


def usable(value: str | None, name: str, check: Callable[[str], None]) -> None:
    """Runs `check` on an address or key, if there is one; its failure gets the member's name."""
    if value is None:
        return
    try:
        check(value)
    except BadRequest as error:
        raise detailed(error, "invalid_value", name) from None


def echoed(value: object, name: str) -> object:
    """Returns a value of any type that will be kept."""
    if len(json.dumps(value)) > MAX_KEPT_BYTES:
        raise invalid(f"{name}: longer than {MAX_KEPT_BYTES} bytes", name)
    return value


def alias(members: Members, names: tuple[str, ...]) -> str | None:
    """Returns a text that a body may give under any of several names; None if it gives none."""
    given = {name: value for name in names if (value := text(members, name)) is not None}
    if len(set(given.values())) > 1:
        raise differing(list(given), min(given))
    return next(iter(given.values()), None)


def model_name(members: Members, called: str) -> str:
    """Returns the model; failures name the member `called`, as the route's documentation does."""
    name = alias(members, MODEL)
    if name is None:
        raise missing(called)
    if not name:
        raise invalid("the model must not be empty", called)
    return name


def kept_model_name(members: Members, called: str) -> str:
    """Returns the model name of a registration, which will be kept; checks it as `named` does."""
    return named(model_name(members, called), called)


def adapter(members: Members) -> str:
    """Returns the adapter's name, or #N for its number N, where engines know only numbers."""
    name = text(members, "lora_name") or ""
    number = members.get("lora_id")
    if number is None:
        return name
    if type(number) is not int:
        raise wrong_type("lora_id", "a whole number")
    if not -1 <= number <= U64_MAX:
        raise invalid(f"lora_id: expected a number from -1 to {U64_MAX}", "lora_id")
    if name:
        raise invalid("`lora_id` is deprecated, and not to be used with `lora_name`", "lora_id")
    return f"#{number}" if number > 0 else ""


def uint(members: Members, name: str, minimum: int) -> int:
    require(members, name)
    value = optional_uint(members, name, minimum)
    assert value is not None
    return value


def optional_uint(members: Members, name: str, minimum: int) -> int | None:
    value = members.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise wrong_type(name, "a whole number")
    if not minimum <= value <= U32_MAX:
        raise invalid(f"{name}: expected a number from {minimum} to {U32_MAX}", name)
    return value


def as_integers(body: bytes) -> bytes | None:
    """Returns a body with its hashes as integers; None if none of them is a text.

    Hashes may be texts for clients whose JSON has no 64-bit integers.
    """
    if len(body) > TEXT_HASHES_LIMIT:
        return None
    members = scan(SPELLED, body)
    given = {name: members[name] for name in HASHES if isinstance(members.get(name), list)}
    if not any(isinstance(each, str) for hashes in given.values() for each in hashes):
        return None
    for name, hashes in given.items():
        try:
            members[name] = [kv_events.hash_of(each) for each in hashes]
        except ValueError:
            raise invalid(f"{name}: expected whole numbers of 64 bits", name) from None
    return json.dumps(members).encode()


def missing(name: str) -> KvdError:
    return detailed(BadRequest(f"missing member `{name}`"), "missing", name)


def wrong_type(name: str, wanted: str) -> KvdError:
    return detailed(BadRequest(f"{name}: expected {wanted}"), "invalid_type", name)


def invalid(text: str, name: str) -> KvdError:
    return detailed(BadRequest(text), "invalid_value", name)


def differing(names: list[str], field: str) -> KvdError:
    return invalid(f"`{'` and `'.join(names)}` are the same member and differ", field)


def detailed(error: KvdError, reason: str, name: str | None = None) -> KvdError:
    """Returns the failure with the details that this face adds to all of its failures."""
    error.details = {"reason": reason} if name is None else {"reason": reason, "field": name}
    return error
