"""Helpers for JSON schemas, and what describes a route.

Handlers ignore members of a body that its schema lacks. Answers have no such members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvd.faces.common.bodies import MAX_KEPT_BYTES, MAX_RETRY_KEY_BYTES, U32_MAX, U64_MAX

Schema = dict[str, Any]
Members = dict[str, Schema]
Content = dict[str, Schema]  # by content type

JSON = "application/json"


def whole(minimum: int, maximum: int) -> Schema:
    return {"type": "integer", "minimum": minimum, "maximum": maximum}


def counted(unit: str) -> Schema:
    """Returns the schema of a count of `unit`."""
    return {"type": "integer", "minimum": 0, "description": unit}


ANY: Schema = {}  # a value that kvd does not interpret
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
U32, U64 = whole(0, U32_MAX), whole(0, U64_MAX)
I64, HASH = whole(-(2**63), 2**63 - 1), whole(-(2**63), U64_MAX)
BLOCK_SIZE: Schema = {**whole(1, U32_MAX), "description": "tokens"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TOKENS, BLOCKS, SECONDS = counted("tokens"), counted("blocks"), counted("seconds")
# Texts that are kept have a bound in bytes; names have no control characters.
LABEL: Schema = {**TEXT, "maxLength": MAX_KEPT_BYTES}
NAME: Schema = {**LABEL, "pattern": r"^[^\x00-\x1f\x7f-\x9f]*$"}
ADDRESS: Schema = {**LABEL, "minLength": 1}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def by_name(values: Schema) -> Schema:
    """Returns the schema of an object whose member names are data."""
    return {"type": "object", "additionalProperties": values}


def by_rank(values: Schema) -> Schema:
    """Returns the schema of an object with a member for each data-parallel rank."""
    return by_name(values) | {"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def members(required: Members, optional: Members | None = None) -> Schema:
    """Returns the schema of an object in a body, whose other members are ignored."""
    schema: Schema = {"type": "object", "properties": {**required, **(optional or {})}}
    return schema | ({"required": list(required)} if required else {})


def row(required: Members, optional: Members | None = None) -> Schema:
    """Returns the schema of an object in an answer, which has no other members."""
    return members(required, optional) | {"additionalProperties": False}


def in_json(schema: Schema) -> Content:
    return {JSON: {"schema": schema}}


def in_query(name: str, required: bool = False) -> Schema:
    return {"name": name, "in": "query", "required": required, "schema": TEXT}


@dataclass(frozen=True, slots=True)
class Operation:
    """The documentation of one route.

    `answers` has the content of each successful answer, by status; `refuses` has the statuses of
    the handler's own failures, beside those that any route can have. `parameters` are those of the
    query and the head. `segment` is the schema of the text that fills the path's placeholder.
    """

    summary: str
    answers: Mapping[int, Content]
    refuses: tuple[int, ...] = ()
    body: Content | None = None
    parameters: tuple[Schema, ...] = ()
    segment: Schema | None = None
    needs_body: bool = True


@dataclass(frozen=True, slots=True)
class Description:
    """The documentation of a face's routes, by method and path, and of its failures."""

    operations: Mapping[str, Operation]
    failure: Schema
    failure_types: tuple[str, ...] = (JSON,)


OK = in_json(row({"status": {"const": "ok"}}))
NOTHING: Content = {}
FAILURE = row({"error": TEXT})
TENANT: Members = {"tenant_id": TEXT, "routing_group": TEXT}
KEPT_TENANT: Members = {"tenant_id": NAME, "routing_group": NAME}
FILTERS = (in_query("model_name"), in_query("tenant_id"), in_query("routing_group"))
RETRY_KEY: Schema = {
    "name": "idempotency-key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "maxLength": MAX_RETRY_KEY_BYTES},
}
