"""Running faces against the OpenAPI documents that they serve, with requests made from those.

Requests are random, but the same in every run: valid by the document, or with a fault in the body.
`tests/conformance` checks its answers, with engines that really publish, by the documents as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection

from kvd.faces.conductor.msgpack import FORMS
from tests.support import http_client
from tests.support.budget import scaled
from tests.support.documented import Documented
from tests.support.ports import find_free_port
from tests.support.processes import Server, clean_environment
from tests.support.running import running_kvd

EXAMPLES = scaled(2)  # for each route and mode
SETTINGS = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)

ENGINE = "tcp://127.0.0.1:9"  # nobody publishes there
# What is registered with each face first, so that some requests are about known things.
COMMANDS = {
    "gateway": "gateway",
    "indexer": "indexer",
    "slot-tracker": "slot-tracker",
    "selection": "select-service",
    "conductor": "conductor",
}
REGISTERED: dict[str, tuple[str, dict[str, Any]]] = {
    "indexer": (
        "/register",
        {"instance_id": 1, "endpoint": ENGINE, "model_name": "m", "block_size": 4},
    ),
    "slot-tracker": (
        "/register",
        {"worker_id": 1, "model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 2},
    ),
    "selection": (
        "/workers",
        {"worker_id": 1, "model_name": "m", "block_size": 4, "endpoint": "http://127.0.0.1:8000"},
    ),
    "conductor": (
        "/register",
        {
            "instance_id": "e",
            "endpoint": ENGINE,
            "type": "vLLM",
            "modelname": "m",
            "block_size": 4,
            "dp_rank": 0,
        },
    ),
}
KNOWN = {"model": "m", "modelname": "m", "model_name": "m", "block_size": 4, "worker_id": 1}
ENVIRON = {"DYN_KV_INDEXER_TEST_ENDPOINTS": "1", "DYN_ROUTER_USE_KV_EVENTS": "false"}


@schemathesis.serializer(*FORMS)
def packed(context: schemathesis.SerializationContext, value: Any) -> bytes:
    try:
        return value if isinstance(value, bytes) else bytes(msgpack.packb(value))
    except OverflowError:  # msgpack has no numbers beyond 64 bits
        return b"\xc1"


@schemathesis.deserializer(*FORMS)
def unpacked(context: schemathesis.DeserializationContext, response: schemathesis.Response) -> Any:
    return msgpack.unpackb(response.content)


@pytest.fixture(scope="module", params=COMMANDS)
def face(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a face with a registration."""
    folder = tmp_path_factory.mktemp("documented")
    if request.param == "gateway":
        with running_gateway(folder) as url:
            yield url
        return
    with running_kvd(folder, face=COMMANDS[request.param], environ=ENVIRON) as server:
        path, body = REGISTERED[request.param]
        reply = http_client.post(server.base_url + path, json=body)
        assert reply.is_success, reply.content
        yield server.base_url


@contextmanager
def running_gateway(folder: Path) -> Iterator[str]:
    """Runs a gateway in front of an engine; yields its URL once it serves the engine."""
    port = find_free_port()
    command = [sys.executable, "-m", "examples.engine", "--port", str(port), "--model", "m"]
    engine = Server(command, folder, port, clean_environment())
    try:
        engine.wait_healthy()
        upstream = f"--upstream=http://127.0.0.1:{port}"
        with running_kvd(folder, upstream, face="gateway") as server:
            server.wait_logged("upstream_serving")
            yield server.base_url
    finally:
        engine.process.kill()
        engine.process.wait()


def aim(case: Case) -> None:
    """Replaces the names in a request by those that the face knows."""
    for members in (case.body, case.query):
        if isinstance(members, dict):
            members.update({name: KNOWN[name] for name in KNOWN if name in members})


def as_httpx(response: schemathesis.Response) -> httpx.Response:
    """Returns an answer, with its request, in the form that `Documented` checks."""
    asked = response.request
    body = asked.body.encode() if isinstance(asked.body, str) else asked.body or b""
    request = httpx.Request(str(asked.method), str(asked.url), headers=asked.headers, content=body)
    headers = [(name, each) for name, values in response.headers.items() for each in values]
    return httpx.Response(
        response.status_code, headers=headers, content=response.content, request=request
    )


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as opened:
        opened.trust_env = False  # else it looks for proxies with every request
        yield opened


def test_a_face_is_as_its_document_says(face: str, session: requests.Session) -> None:
    document = http_client.get(f"{face}/openapi.json").json()
    documented = Documented(document)
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        for mode in GenerationMode:
            typed = [each for each in operation.body if "multipart" not in each.media_type]
            if mode is GenerationMode.NEGATIVE and not typed:
                continue  # any text is valid in a form

            @SETTINGS
            @given(operation.as_strategy(generation_mode=mode), st.booleans())
            def play(case: Case, aimed: bool) -> None:
                if aimed and case.meta and not case.meta.generation.mode.is_negative:
                    aim(case)
                response = case.call(base_url=face, session=session)
                assert response.status_code != 500, response.content
                assert documented.untrue(as_httpx(response)) is None
                case.validate_response(response, checks=[negative_data_rejection])

            play()
