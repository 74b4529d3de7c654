"""Builds the OpenAPI 3.1 document of a face from its routes and their descriptions.

    Route                        method, path, scope, whether it takes a body
    schemas.py of the face       an Operation for each: summary, bodies, answers, refusals
        │
        v
    document()                   GET /openapi.json

Refusals of the server itself are added here. Which of them a route can have follows from its
declaration.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus

from kvd._version import VERSION
from kvd.faces.common.bodies import render
from kvd.faces.common.paths import DOCUMENT_PATH
from kvd.faces.common.schemas import Description, Operation, Schema
from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope

# Statuses with which the server itself refuses a request of any route: malformed, too slow, URL too
# long, expectation, head too long, bug, limit reached (docs/faces/indexer.md).
_OF_ALL = (400, 408, 414, 417, 431, 500, 503)
_OF_BODIES = (413, 415)  # too long; compressed, or of another content type
_OF_TOKENS = (401, 403, 421)  # no token; wrong token, or another page's Origin; wrong Host

_ABOUT = (
    "HEAD works wherever GET does. Unknown parameters, and unknown members of JSON bodies, are "
    "ignored. Whole numbers are written without a point or an exponent, and no member comes twice."
)
_SECURITY: Schema = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token that has the scope; needed only where the daemon has tokens.",
    }
}


def with_document(
    name: str, routes: Sequence[Route], description: Description
) -> tuple[Route, ...]:
    """Returns the routes of a face and one more, which shows the document of all of them."""

    def show(request: Request) -> Response:
        return Response(200, text)

    every = (*routes, Route("GET", DOCUMENT_PATH, show))
    text = render(document(name, every, description))
    return every


def document(name: str, routes: Sequence[Route], description: Description) -> Schema:
    """Returns the document; raises KeyError for a route without a description."""
    paths: dict[str, dict[str, Schema]] = {}
    for route in routes:
        operation = description.operations[f"{route.method} {route.path}"]
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, operation)
    types = description.failure_types
    failure = {
        "description": "The request is refused.",
        "content": {each: {"schema": {"$ref": "#/components/schemas/Failure"}} for each in types},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"kvd {name}",
            "version": VERSION,
            "description": _ABOUT,
        },
        "paths": paths,
        "components": {
            "schemas": {"Failure": description.failure},
            "responses": {"Failure": failure},
            "securitySchemes": _SECURITY,
        },
    }


def _operation(route: Route, operation: Operation) -> Schema:
    shown: Schema = {
        "operationId": re.sub(r"\W+", "_", f"{route.method} {route.path}".lower()).rstrip("_"),
        "summary": operation.summary,
        "responses": _responses(route, operation),
    }
    if parameters := [*_segments(route, operation), *operation.parameters]:
        shown["parameters"] = parameters
    if operation.body is not None:
        shown["requestBody"] = {"required": operation.needs_body, "content": operation.body}
    if route.scope is not Scope.OPEN:
        shown["security"] = [{"bearer": [str(route.scope.name).lower()]}, {}]
    return shown


def _responses(route: Route, operation: Operation) -> Schema:
    refusals = {*_OF_ALL, *operation.refuses}
    if route.body_limit:
        refusals.update(_OF_BODIES)
    if route.scope is not Scope.OPEN:
        refusals.update(_OF_TOKENS)
    responses: dict[int, Schema] = {
        status: {"$ref": "#/components/responses/Failure"} for status in refusals
    }
    for status, content in operation.answers.items():
        if status in refusals:
            content = {name: {"schema": _or_failure(each)} for name, each in content.items()}
        responses[status] = {"description": HTTPStatus(status).phrase}
        if content:
            responses[status]["content"] = content
    return {str(status): responses[status] for status in sorted(responses)}


def _or_failure(media: Schema) -> Schema:
    return {"anyOf": [media["schema"], {"$ref": "#/components/schemas/Failure"}]}


def _segments(route: Route, operation: Operation) -> list[Schema]:
    names = re.findall(r"{(\w+)}", route.path)
    schema = operation.segment or {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
