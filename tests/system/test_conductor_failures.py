"""The conductor's refusals: always a text and a code, whichever layer refuses."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from kvd.errors import Unavailable
from kvd.faces.conductor import routes as face
from kvd.http.answer import answer_now
from kvd.http.errors import Failures
from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope
from tests.support.publishing import Json, Running, running_conductor

REGISTER: Json = {
    "endpoint": "tcp://127.0.0.1:1",
    "type": "vLLM",
    "modelname": "m",
    "instance_id": "a",
    "block_size": 4,
    "dp_rank": 0,
}
QUERY: Json = {"model": "m", "block_size": 4, "token_ids": [1, 2, 3, 4]}
BY_HASH: Json = {"model": "m", "block_size": 4, "seq_hashes": [1]}
UNREGISTER: Json = {"instance_id": "a"}
BODIES = {
    "/register": REGISTER,
    "/query": QUERY,
    "/query_by_hash": BY_HASH,
    "/unregister": UNREGISTER,
}


def refused(conductor: Running, path: str, body: bytes | str, status: int = 400) -> Json:
    answer = conductor.client.post(path, content=body)
    assert answer.status_code == status, answer.text
    failure: Json = answer.json()
    assert isinstance(failure["error"], str)
    return failure


def spelled(path: str, name: str, value: str) -> str:
    """Returns the usual body with this text as the value of one member."""
    members = {each: json.dumps(known) for each, known in BODIES[path].items()} | {name: value}
    return "{" + ",".join(f'"{each}":{text}' for each, text in members.items()) + "}"


# ---- what the server refuses


@pytest.mark.parametrize(
    ("method", "path", "status", "reason"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/nothing", 404, "not_found"),
        ("GET", "/query", 405, "method_not_allowed"),
        ("DELETE", "/register", 405, "method_not_allowed"),
        ("POST", "/services", 405, "method_not_allowed"),
        ("GET", "/" + "x" * 10_000, 414, "invalid_request"),
    ],
)
def test_unknown_paths_and_methods(
    conductor: Running, method: str, path: str, status: int, reason: str
) -> None:
    answer = conductor.client.request(method, path)
    assert (answer.status_code, answer.json()["reason"]) == (status, reason)


@pytest.mark.parametrize("path", BODIES)
def test_bodies_over_the_limit(conductor: Running, path: str) -> None:
    with socket.create_connection(("127.0.0.1", conductor.server.port)) as sock:
        sock.sendall(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999999\r\n\r\n"
            % path.encode()
        )
        head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert json.loads(body)["reason"] == "too_large"


def test_what_is_no_http(conductor: Running) -> None:
    with socket.create_connection(("127.0.0.1", conductor.server.port)) as sock:
        sock.sendall(b"POST /query HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n")
        head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["reason"] == "invalid_request"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [(Unavailable("full"), 503, "unavailable"), (RuntimeError("a bug"), 500, "internal")],
)
def test_bounds_and_bugs(error: Exception, status: int, reason: str) -> None:
    def handler(request: Request) -> Response:
        raise error

    request = Request("POST", "/register", b"", [], b"{}")
    response = answer_now(
        Route("POST", "/register", handler, any_type=True, scope=Scope.ADMIN),
        request,
        Failures(face.REASONS),
    )
    assert isinstance(response.body, bytes)
    assert (response.status, json.loads(response.body)["reason"]) == (status, reason)


def test_a_body_may_be_as_long_as_is_set(tmp_path: Path) -> None:
    (tmp_path / "kvd.toml").write_text("http_body_bytes = 3000000\n")
    with running_conductor(tmp_path, "--config", str(tmp_path / "kvd.toml")) as running:
        for size, status in ((3_000_000, 200), (3_000_001, 413)):
            begin, end = b'{"model":"m","block_size":4,"token_ids":[1', b"]}"
            body = begin + b" " * (size - len(begin) - len(end)) + end
            assert running.client.post("/query", content=body).status_code == status


# ---- bodies


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"{} {}", "invalid_json"),
        (b"\xef\xbb\xbf{}", "invalid_json"),
        ("{}".encode("utf-16"), "invalid_json"),
        (b'{"a":' * 100_000, "invalid_json"),
        (b"null", "invalid_type"),
        (b"[{}]", "invalid_type"),
    ],
)
def test_what_is_no_object(conductor: Running, path: str, body: bytes, reason: str) -> None:
    assert refused(conductor, path, body)["reason"] == reason


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("block_size", "4.0", "invalid_type"),
        ("block_size", "4e0", "invalid_type"),
        ("block_size", "true", "invalid_type"),
        ("block_size", '"4"', "invalid_type"),
        ("block_size", "0", "invalid_value"),
        ("block_size", "-4", "invalid_value"),
        ("block_size", "4294967296", "invalid_value"),
        ("block_size", "9" * 5000, "invalid_type"),
        ("block_size", "1e999", "invalid_type"),
        ("block_size", "NaN", "invalid_json"),
        ("instance_id", "7", "invalid_type"),
        ("instance_id", "{}", "invalid_type"),
        ("instance_id", '"' + "x" * 4097 + '"', "invalid_value"),
        ("instance_id", '"' + "\\u00e9" * 2049 + '"', "invalid_value"),
        ("tenant_id", '"\\ud800"', "invalid_json"),
        ("tenant_id", '"\\udc00\\ud800"', "invalid_json"),
        ("tenant_id", '"a\nb"', "invalid_json"),
        ("lora_name", "[]", "invalid_type"),
        ("additionalsalt", "1", "invalid_type"),
    ],
)  # fmt: skip
def test_members_of_another_type_or_range(
    conductor: Running, path: str, name: str, value: str, reason: str
) -> None:
    failure = refused(conductor, path, spelled(path, name, value))
    assert failure["reason"] == reason
    if reason != "invalid_json":
        assert failure.get("field", name) == name


@pytest.mark.parametrize("path", BODIES)
def test_a_member_is_given_once(conductor: Running, path: str) -> None:
    """Also where hashes are texts: such a body is parsed in another way."""
    usual = json.dumps(BODIES[path])[:-1]
    for name, value in BODIES[path].items():
        body = f'{usual},"{name}":{json.dumps(value)}}}'
        assert refused(conductor, path, body)["reason"] == "invalid_type"
    if path == "/query_by_hash":
        refused(conductor, path, '{"model":"m","model":"n","block_size":4,"seq_hashes":["1"]}')


@pytest.mark.parametrize("path", BODIES)
def test_null_is_absent(conductor: Running, path: str) -> None:
    conductor.post("/register", REGISTER)
    names = (
        "tenant_id",
        "lora_name",
        "lora_id",
        "additionalsalt",
        "hash_profile",
        "replay_endpoint",
    )
    conductor.post(path, BODIES[path] | dict.fromkeys(names))


@pytest.mark.parametrize(
    ("value", "reason"),
    [("-2", "invalid_value"), ("18446744073709551616", "invalid_value"), ('"3"', "invalid_type"),
     ("3.0", "invalid_type"), ("true", "invalid_type"), ("[]", "invalid_type")],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/query", "/query_by_hash"])
def test_adapters_by_number(conductor: Running, path: str, value: str, reason: str) -> None:
    failure = refused(conductor, path, spelled(path, "lora_id", value))
    assert (failure["reason"], failure["field"]) == (reason, "lora_id")


@pytest.mark.parametrize(
    "value", ["[1.0]", "[true]", "[null]", "[[1]]", "[-9223372036854775809]", "{}", '"1"',
              "[18446744073709551616]", '["x"]', '["1e3"]', '["18446744073709551616"]'],
)  # fmt: skip
def test_hashes(conductor: Running, value: str) -> None:
    failure = refused(conductor, "/query_by_hash", spelled("/query_by_hash", "seq_hashes", value))
    assert failure["reason"] in ("invalid_type", "invalid_value")


@pytest.mark.parametrize("value", ["[-1]", "[4294967296]", "[1.0]", '["1"]', "[true]", "{}", "7"])
def test_tokens(conductor: Running, value: str) -> None:
    failure = refused(conductor, "/query", spelled("/query", "token_ids", value))
    assert failure["reason"] == "invalid_type"


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_addresses(conductor: Running, field: str) -> None:
    for value in ("1.1.1.1:5557", "udp://a:1", "tcp://a", "tcp://a:65536", "tcp://a:1;tcp://b:2"):
        failure = refused(conductor, "/register", json.dumps(REGISTER | {field: value}))
        assert (failure["reason"], failure["field"]) == ("invalid_value", field)


@pytest.mark.parametrize("field", ["type", "modelname", "lora_name", "tenant_id", "instance_id"])
def test_names_with_control_characters(conductor: Running, field: str) -> None:
    for value in ("a\0b", "\n", "\x7f", "\x9b2J"):
        failure = refused(conductor, "/register", json.dumps(REGISTER | {field: value}))
        assert (failure["reason"], failure["field"]) == ("invalid_value", field)


def test_conflicts(conductor: Running) -> None:
    conductor.post("/register", REGISTER)
    conductor.post("/register", REGISTER)
    other = {
        "endpoint": "tcp://127.0.0.1:2",
        "replay_endpoint": "tcp://127.0.0.1:2",
        "curve_server_key": "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6",
    }
    for field, value in other.items():
        failure = conductor.post("/register", REGISTER | {field: value}, 409)
        assert failure["reason"] == "invalid_registration"
        known = REGISTER.get(field, "none")
        assert failure["error"] == f"a|default|0 is already registered with {field} {known}"
    assert len(conductor.services()) == 1


def test_odd_names_are_names(conductor: Running) -> None:
    """Any text that a client chooses comes back unchanged, in rows and listings."""
    for name in ('a"b\\', "é\U0001f600", "x" * 4096, "a|b", "7", "007", " "):
        conductor.post("/register", REGISTER | {"instance_id": name, "tenant_id": name})
        answer = conductor.post("/query", QUERY | {"tenant_id": name})
        assert answer.keys() == {name} == answer[name].keys()
        assert [each["InstanceID"] for each in conductor.services()] == [name]
        body = {"instance_id": name, "tenant_id": name}
        removed = conductor.post("/unregister", body)["removed_instances"]
        assert removed == [f"{name}|{name}|0"]
