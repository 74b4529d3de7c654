"""Each face's OpenAPI document is valid, and has exactly its routes and the members they read."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from kvd.faces.common.openapi import document
from kvd.faces.common.paths import DOCUMENT_PATH
from kvd.faces.conductor import handlers as questions
from kvd.faces.conductor import registration as conductor
from kvd.faces.explain import questions as explained
from kvd.faces.indexer import registration as indexer_registration
from kvd.faces.indexer import routes as indexer
from kvd.faces.indexer.handlers import HashQueryHandler, QueryHandler, TieredQueryHandler
from kvd.faces.selection import handlers as selection
from kvd.faces.selection import members, prompts, records, regret, reservations, tuning, workers
from kvd.faces.slot_tracker import handlers as slots
from kvd.faces.slot_tracker import registration as slot_registration
from kvd.faces.slot_tracker import routes as slot_tracker
from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope
from kvd_core.json.scan import BodyScanner
from tests.support.all_routes import DESCRIPTIONS, all_routes

ROUTES = all_routes()
FACES = pytest.mark.parametrize("face", ROUTES)


def shown(face: str) -> dict[str, Any]:
    """Returns the document in a face's answer."""
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


@pytest.mark.slow("the validator reads all of OpenAPI's own schema")
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


# Scanners of bodies for routes that every face has.
EVERYWHERE = {"POST /explain": BodyScanner(prompts.ARRAYS, explained.FIELDS)}
# Scanners of bodies for routes of one face.
SCANNERS: dict[str, dict[str, BodyScanner]] = {
    "indexer": {
        "POST /query": BodyScanner(QueryHandler.ARRAY, QueryHandler.FIELDS),
        "POST /query_by_hash": BodyScanner(HashQueryHandler.ARRAY, HashQueryHandler.FIELDS),
        "POST /query_tiered_by_hash": BodyScanner(
            TieredQueryHandler.ARRAY, TieredQueryHandler.FIELDS
        ),
        "POST /register": indexer_registration.REGISTER,
        "POST /unregister": indexer.UNREGISTER,
        "POST /register_peer": indexer.PEER,
        "POST /deregister_peer": indexer.PEER,
        "POST /test/pause_listener": indexer.RANK,
        "POST /test/resume_listener": indexer.RANK,
    },
    "slot-tracker": {
        "POST /register": slot_registration.REGISTER,
        "POST /unregister": slot_tracker.UNREGISTER,
        "POST /add": BodyScanner(slots.AddHandler.ARRAYS, slots.AddHandler.FIELDS),
        "POST /prefill_complete": BodyScanner({}, slots.STEP),
        "POST /free": BodyScanner({}, slots.STEP),
        "POST /potential_loads": BodyScanner(
            slots.PotentialLoadsHandler.ARRAYS, slots.PotentialLoadsHandler.FIELDS
        ),
    },
    "selection": {
        "POST /workers": records.WORKER,
        "PUT /workers": workers.WORKERS,
        "PATCH /workers/{worker_id}": records.WORKER,
        "POST /select": BodyScanner(prompts.ARRAYS, selection.SELECT_FIELDS),
        "POST /select_and_reserve": BodyScanner(prompts.ARRAYS, selection.SELECT_FIELDS),
        "POST /reservations": reservations.RESERVE,
        "POST /reservations/{reservation_id}/output_block": reservations.OUTPUT,
        "POST /reservations/{reservation_id}/report": regret.REPORT,
        "POST /potential_loads": BodyScanner(prompts.ARRAYS, selection.PROMPT_FIELDS),
        "POST /overlap_scores": BodyScanner(prompts.ARRAYS, selection.PROMPT_FIELDS),
        "POST /busy_threshold": tuning.BUSY,
        "POST /router_mode": tuning.MODE,
        "POST /policy": members.POLICY,
    },
    "conductor": {
        "POST /query": BodyScanner(questions.QueryHandler.ARRAYS, questions.FIELDS),
        "POST /query_by_hash": BodyScanner(questions.HashQueryHandler.ARRAYS, questions.FIELDS),
        "POST /register": conductor.REGISTER,
        "POST /unregister": conductor.REGISTER,
    },
}
# Members that are read with a registration's others, but have no effect when it ends.
PASSED_OVER = {"replay_endpoint", "curve_server_key", "hash_profile", "cache_group"}


@pytest.mark.parametrize("face", SCANNERS)  # without the gateway, whose engines read the bodies
def test_a_body_has_the_members_that_are_read(face: str) -> None:
    bodies = {
        name: operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
        for name, operation in operations(face).items()
        if "requestBody" in operation
    }
    everywhere = {member: schema for body in bodies.values() for member, schema in body.items()}
    scanners = SCANNERS[face] | EVERYWHERE
    for name, scanner in scanners.items():
        values = {
            member: [] if "array" in json.dumps(schema) else None
            for member, schema in {**everywhere, **bodies[name]}.items()
        }
        read = scanner.scan(json.dumps(values).encode()).keys()
        if name == "POST /unregister" and face == "conductor":
            read -= PASSED_OVER
        assert bodies[name].keys() == read, name
    unread = bodies.keys() - scanners.keys()
    assert all(name.startswith("POST /replica_sync/") for name in unread)


def test_a_route_without_a_description_cannot_be_documented() -> None:
    route = Route("GET", "/unsaid", lambda request: Response(200, b""))
    with pytest.raises(KeyError, match="GET /unsaid"):
        document("indexer", (route,), DESCRIPTIONS["indexer"])
