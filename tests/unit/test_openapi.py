"""The OpenAPI document of every face: valid, and of exactly its routes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from kvd.faces.common.openapi import document
from kvd.faces.common.schemas import DOCUMENT_PATH
from kvd.http.types import Request, Response, Route, Scope
from tests.support.all_routes import DESCRIPTIONS, all_routes

ROUTES = all_routes()
FACES = pytest.mark.parametrize("face", ROUTES)


def shown(face: str) -> dict[str, Any]:
    """Returns what a face answers when it is asked for its document."""
    (route,) = (route for route in ROUTES[face] if route.path == DOCUMENT_PATH)
    response = route.handler(Request("GET", DOCUMENT_PATH, b"", [], b""))
    assert isinstance(response, Response) and isinstance(response.body, bytes)
    found: dict[str, Any] = json.loads(response.body)
    return found


def operations(face: str) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in shown(face)["paths"].items()
        for method, operation in methods.items()
    }


@FACES
def test_the_document_is_valid(face: str) -> None:
    OpenAPIV31SpecValidator(shown(face)).validate()


@FACES
def test_the_document_has_every_route_and_no_other(face: str) -> None:
    routes = {f"{route.method} {route.path}" for route in ROUTES[face]}
    assert operations(face).keys() == routes == DESCRIPTIONS[face].operations.keys()


@FACES
def test_an_operation_says_what_its_route_declares(face: str) -> None:
    for route in ROUTES[face]:
        operation = operations(face)[f"{route.method} {route.path}"]
        scope = [{"bearer": [str(route.scope.name).lower()]}, {}]
        assert operation.get("security", Scope.OPEN) == (route.scope and scope)
        assert ("413" in operation["responses"]) == bool(route.body_limit)
        assert ("401" in operation["responses"]) == bool(route.scope)
        given = re.findall(r"{(\w+)}", route.path)
        assert [
            each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"
        ] == given
        if "requestBody" in operation:
            assert route.body_limit


def test_a_route_without_a_description_cannot_be_documented() -> None:
    route = Route("GET", "/unsaid", lambda request: Response(200, b""))
    with pytest.raises(KeyError, match="GET /unsaid"):
        document("indexer", (route,), DESCRIPTIONS["indexer"])
