"""Reads requests strictly: members of bodies, parameters of queries, path segments.

Bodies are JSON objects whose members are checked one by one. A member that is missing, mistyped or
out of range raises Invalid (422) with its name; a body that is not JSON raises BadJson (400).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

from kvd.errors import BadJson, BadRequest, Invalid
from kvd.http.messages import Request, Response
from kvd.model import DEFAULT_TENANT, PartitionKey, is_name
from kvd_core.json.scan import BodyScanner, ScanAhead, objects_of

U32_MAX = 2**32 - 1
# Longest name or address that can be registered, as long as the longest path on Linux.
MAX_KEPT_BYTES = 4096
U64_MAX = 2**64 - 1

RETRY_KEY = b"idempotency-key"  # header, draft-ietf-httpapi-idempotency-key-header
# Longest `Idempotency-Key`, which is kept with the request; a UUID has 36.
MAX_RETRY_KEY_BYTES = 255

TENANT = ("tenant_id", "routing_group")  # the documented name and the newer one
PARTITION_MEMBERS = ("model_name", *TENANT)

OK = b'{"status":"ok"}'  # the answer to a change, where nothing else is to be said

Members = dict[str, Any]


def scan(scanner: BodyScanner, body: bytes | None, ahead: ScanAhead | None = None) -> Members:
    """Returns the members of a body that the scanner knows; None is the one scanned last.

    `ahead` is what `scanned_ahead` has returned for this body.
    """
    try:
        return scanner.scan(body, ahead)
    except ValueError as error:
        raise BadJson(f"the body is not valid JSON: {error}") from None
    except TypeError as error:
        raise Invalid(str(error)) from None


def require(members: Members, name: str) -> Any:
    if name not in members:
        raise Invalid(f"missing member `{name}`")
    return members[name]


def objects(members: Members, name: str) -> Iterator[bytes]:
    """Yields the objects of an array that was read as a span, each as its JSON."""
    try:
        yield from objects_of(require(members, name))
    except TypeError as error:
        raise Invalid(f"{name}: {error}") from None


def text(members: Members, name: str) -> str:
    return _text(require(members, name), name)


def bounded(value: str, name: str) -> str:
    """Returns a text that will be kept; raises Invalid if it is longer than MAX_KEPT_BYTES."""
    if len(value.encode()) > MAX_KEPT_BYTES:
        raise Invalid(f"{name}: longer than {MAX_KEPT_BYTES} bytes")
    return value


def kept_name(value: str, name: str) -> str:
    """Returns a name that will be kept; raises Invalid if it is too long or has control characters.

    Not for addresses, which have rules of their own.
    """
    if not is_name(value):
        raise Invalid(f"{name}: has control characters")
    return bounded(value, name)


def registered_partition(members: Members) -> PartitionKey:
    """Returns the model and the tenant of a registration."""
    for name in PARTITION_MEMBERS:
        if (value := optional_text(members, name)) is not None:
            kept_name(value, name)
    return PartitionKey(text(members, "model_name"), tenant(members))


def optional_text(members: Members, name: str) -> str | None:
    """Returns a text, or None when the member is absent or null."""
    value = members.get(name)
    return None if value is None else _text(value, name)


def uint(members: Members, name: str, maximum: int) -> int:
    return _uint(require(members, name), name, maximum)


def optional_uint(members: Members, name: str, maximum: int) -> int | None:
    """Returns a number, or None when the member is absent or null."""
    value = members.get(name)
    return None if value is None else _uint(value, name, maximum)


def flag(members: Members, name: str) -> bool:
    value = members[name]
    if not isinstance(value, bool):
        raise Invalid(f"{name}: expected true or false")
    return value


def optional_flag(members: Members, name: str) -> bool:
    """Returns a flag, False when the member is absent or null."""
    return members.get(name) is not None and flag(members, name)


def alias(members: Members, *names: str) -> str | None:
    """Returns a text that a body may give under any of several names; None if it gives none.

    Several names with the same value are fine; different values are an error, and so is null.
    """
    given = {name: text(members, name) for name in names if name in members}
    if len(set(given.values())) > 1:
        raise Invalid(f"`{'` and `'.join(given)}` are the same member and differ")
    return next(iter(given.values()), None)


def tenant(members: Members) -> str:
    """Returns the tenant under its documented or its newer name, else the default one."""
    if "routing_group" not in members:  # nearly always, and on the hot path
        return _text(members.get("tenant_id", DEFAULT_TENANT), "tenant_id")
    given = alias(members, *TENANT)
    return DEFAULT_TENANT if given is None else given


def parameters(request: Request, *names: str) -> dict[str, Any]:
    """Returns the query's parameters for the partition and `names`; BadRequest for duplicates."""
    found: dict[str, Any] = {}
    for name, value in parse_qsl(request.query.decode("latin-1"), keep_blank_values=True):
        if name not in PARTITION_MEMBERS and name not in names:
            continue
        if name in found:
            raise BadRequest(f"the parameter `{name}` is given twice")
        found[name] = value
    return found


def filters(request: Request) -> tuple[str | None, str | None]:
    """Returns the model and the tenant to which a listing is limited; None stands for any."""
    wanted = parameters(request)
    return wanted.get("model_name"), alias(wanted, *TENANT)


def segment(request: Request) -> str:
    """Returns the decoded segment of the path that fills the route's placeholder."""
    return decoded(unquote_to_bytes(request.captured))


def decoded(path: bytes) -> str:
    try:
        return path.decode()
    except UnicodeDecodeError:
        raise BadRequest("the path is not UTF-8") from None


def retry_key(request: Request) -> str | None:
    """Returns the Idempotency-Key; None if there is none.

    Several header lines count as one list, since a proxy may join them (RFC 9110 §5.3).
    """
    lines = [value.strip(b" \t") for name, value in request.headers if name == RETRY_KEY]
    key = b", ".join(line for line in lines if line)
    if len(key) > MAX_RETRY_KEY_BYTES:
        raise Invalid(f"idempotency-key: longer than {MAX_RETRY_KEY_BYTES} bytes")
    return key.decode("latin-1") or None


def json_response(value: Any) -> Response:
    """Returns a 200 with the value as JSON without blanks, which is how the peers write it."""
    return Response(200, render(value))


def render(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Invalid(f"{name}: expected a text")
    return value


def _uint(value: Any, name: str, maximum: int) -> int:
    if type(value) is not int:  # excludes bool, which Python counts as an int
        raise Invalid(f"{name}: expected a whole number")
    if not 0 <= value <= maximum:
        raise Invalid(f"{name}: expected a number from 0 to {maximum}")
    return value
