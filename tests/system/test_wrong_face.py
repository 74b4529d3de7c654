"""A request to the wrong face is answered with the name and address of the right one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kvd.http.table import RouteTable
from tests.support import http_client
from tests.support.all_routes import all_routes
from tests.support.asking import FACES, serving_faces
from tests.support.processes import Server

ROUTES = all_routes()
TABLES = {face: RouteTable(routes) for face, routes in ROUTES.items()}


def test_every_path_of_another_face_is_shown_the_way(tmp_path: Path, certificate: Path) -> None:
    with serving_faces(tmp_path, certificate, DYN_KV_INDEXER_TEST_ENDPOINTS="1") as faces:
        for here in FACES:
            paths = {route.path for face in FACES for route in ROUTES[face]}
            for label in sorted(paths):
                path = re.sub(r"\{\w+\}", "1", label)
                if TABLES[here].label(path.encode()):
                    continue
                there = [face for face in FACES if TABLES[face].label(path.encode())]
                assert there
                where = [f"{face} face, at {', '.join(faces.addresses[face])}" for face in there]
                for method in ("GET", "POST"):
                    reply = faces.ask(faces.plain(here), path, method=method)
                    wanted = f"this is the {here} face; {label} is on the {' and the '.join(where)}"
                    assert (reply.status, reply.error) == (404, f"not found: {wanted}")
            assert faces.ask(faces.plain(here), "/nowhere").error == "not found"


def test_a_face_that_is_not_served_is_named_as_well(kvd_process: Callable[..., Server]) -> None:
    base = kvd_process(face="indexer").base_url
    answer = http_client.post(f"{base}/select", json={})
    assert answer.json() == {
        "error": "not found: this is the indexer face; /select is on the selection face, "
        "which this process does not serve"
    }
