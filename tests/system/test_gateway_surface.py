"""The surface of `kvd gateway` for every client: errors, keys, pages, conversations, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from examples.engine.options import EngineOptions
from tests.support.gateways import Answered, Client, serving
from tests.support.processes import Server

Start = Callable[..., Server]
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
KEY, WATCHER, ENGINE_KEY = (
    "client-key-0123456789",
    "watcher-key-0123456789",
    "engine-key-0123456789",
)
ASKED: Any = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
PAGE = "https://chat.example"


async def send(client: Client, method: str, path: str, **more: Any) -> Answered:
    response = await client.http.request(method, path, **more)
    return Answered(response.status_code, response.headers, response.content, True)


REFUSALS = {
    "no path": ("POST", "/v1/nowhere", {}, 404, "unknown_url", None),
    "a slash too many": ("POST", f"{CHAT}/", {}, 404, "unknown_url", None),
    "no method": ("GET", CHAT, {}, 405, "method_not_allowed", None),
    "no method of messages": ("GET", MESSAGES, {}, 405, "method_not_allowed", "not_found_error"),
    "too large": ("POST", CHAT, {"content": b"x" * 5000}, 413, "request_too_large", None),
    "too large a message": (
        "POST", MESSAGES, {"content": b"x" * 5000}, 413, "request_too_large", "request_too_large",
    ),
    "encoded": (
        "POST", CHAT, {"headers": {"content-encoding": "zstd"}, "content": b"{}"},
        415, "unsupported_media_type", None,
    ),
    "no type": ("POST", "/upstreams", {"content": b"{}"}, 415, "unsupported_media_type", None),
    "no JSON": ("POST", CHAT, {"content": b"{"}, 400, "invalid_json", None),
    "no form": ("POST", "/v1/audio/transcriptions", {"json": {}}, 400, "invalid_form", None),
    "no model": (
        "POST", MESSAGES, {"json": {"model": "x"}}, 404, "model_not_found", "not_found_error",
    ),
    "a page": (
        "POST", CHAT, {"json": ASKED, "headers": {"origin": PAGE}}, 403, "not_permitted", None,
    ),
    "another host": (
        "POST", CHAT, {"json": ASKED, "headers": {"host": "evil.example"}},
        421, "not_permitted", None,
    ),
}  # fmt: skip


async def test_refusals_are_in_the_form_of_the_api(kvd_process: Start) -> None:
    flags = ("--gateway-body-bytes", "4096")
    async with serving(kvd_process, EngineOptions(), flags=flags) as (client, running):
        for method, path, more, status, code, anthropic in REFUSALS.values():
            headers = {"x-request-id": "mine", **more.pop("headers", {})}
            answered = await send(client, method, path, headers=headers, **more)
            assert (answered.status, answered.headers["x-kvd-error"]) == (status, code)
            assert answered.headers["x-request-id"] == "mine"
            assert answered.headers["content-type"] == "application/json"
            error = answered.json["error"]
            if anthropic is None:
                assert error["code"] == code
                assert error["type"] == "invalid_request_error"
            else:
                assert answered.json["type"] == "error"
                assert error["type"] == anthropic
                assert answered.json["request_id"] == "mine" == answered.headers["request-id"]
        assert running[0].server.requests == 0
        answered = await send(client, "GET", CHAT)
        assert answered.headers["allow"] == "POST"
        assert answered.headers["x-request-id"]  # made by the gateway
        assert (await send(client, "HEAD", "/")).status == 404
        assert (await send(client, "HEAD", "/v1/models")).body == b""
        response = await client.post("/v1/responses", {"model": "demo", "input": "hi"})
        kept = f"/v1/responses/{response.json['id']}"
        answered = await send(client, "HEAD", kept)
        assert (answered.status, answered.body) == (405, b"")
        assert answered.headers["allow"] == "DELETE, GET"
        assert (await send(client, "GET", kept)).status == 200
        expecting = {"expect": "200-ok"}
        assert (await send(client, "POST", CHAT, json=ASKED, headers=expecting)).status == 417


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, ...]:
    """Flags of a gateway that has its own clients' keys, and the engines' key."""
    (tmp_path / "tokens").write_text(f"chat generate {KEY}\nwatcher read {WATCHER}\n")
    (tmp_path / "engine-key").write_text(ENGINE_KEY)
    files = (f"--tokens-file={tmp_path}/tokens", f"--upstream-key-file={tmp_path}/engine-key")
    return (*files, f"--allowed-origins={PAGE}")


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_keys_of_the_gateway_go_no_further(
    kvd_process: Start, keys: tuple[str, ...], name: str
) -> None:
    def shown(key: str) -> dict[str, str]:
        return {name: f"Bearer {key}" if name == "authorization" else key}

    async with serving(kvd_process, EngineOptions(), flags=keys) as (client, running):
        for path in (CHAT, MESSAGES):
            answered = await client.post(path, ASKED)
            assert (answered.status, answered.headers["www-authenticate"]) == (401, "Bearer")
            assert answered.headers["x-kvd-error"] == "invalid_api_key"
            assert (await client.post(path, ASKED, shown(WATCHER))).status == 403
            assert (await client.post(path, ASKED, shown("nobody-0123456789"))).status == 401
            assert (await client.post(path, ASKED, shown(KEY))).status == 200
            head = running[0].server.heads[0]
            assert head[b"authorization"] == b"Bearer " + ENGINE_KEY.encode()
            assert b"x-api-key" not in head
        models = await send(client, "GET", "/v1/models", headers=shown(KEY))
        assert models.status == 200
        assert (await client.get("/v1/models")).status == 401
        watched = await send(client, "GET", "/status", headers={"authorization": f"Bearer {KEY}"})
        assert watched.status == 403


async def test_keys_of_engines_are_passed_on(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):
        for sent, got in (
            ({"authorization": "Bearer a"}, b"Bearer a"),
            ({"x-api-key": "a"}, b"Bearer a"),
            ({"x-api-key": "a", "authorization": "Bearer b"}, b"Bearer b"),
            ({}, None),
        ):
            assert (await client.post(MESSAGES, ASKED, sent)).status == 200
            assert running[0].server.heads[0].get(b"authorization") == got


async def test_pages_of_allowed_origins_may_ask(kvd_process: Start, keys: tuple[str, ...]) -> None:
    asks = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-stainless-os",
    }
    async with serving(kvd_process, EngineOptions(), flags=keys) as (client, _):
        response = await send(client, "OPTIONS", CHAT, headers=asks)
        assert (response.status, response.body) == (204, b"")
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
        assert "POST" in response.headers["access-control-allow-methods"]
        shown = {"origin": PAGE, "authorization": f"Bearer {KEY}"}
        for stream in (False, True):
            answered = await client.post(CHAT, {**ASKED, "stream": stream}, shown)
            assert answered.headers.get_list("access-control-allow-origin") == [PAGE]
        models = await send(client, "GET", "/v1/models", headers=shown)
        assert models.headers["access-control-allow-origin"] == PAGE
        other = {**asks, "origin": "https://evil.example"}
        refused = await send(client, "OPTIONS", CHAT, headers=other)
        assert refused.status == 403
        assert "access-control-allow-origin" not in refused.headers


async def test_each_request_is_a_line_with_the_length_of_its_answer(kvd_process: Start) -> None:
    servers: list[Server] = []

    def start(*flags: str, face: str) -> Server:
        servers.append(kvd_process(*flags, face=face))
        return servers[-1]

    flags = ("--access-log", "--log-format", "json", "--allowed-origins", PAGE)
    async with serving(start, EngineOptions(model="demo"), flags=flags) as (client, running):
        asks = {"origin": PAGE, "access-control-request-method": "POST"}
        done = [
            await send(client, "POST", CHAT, json=ASKED, headers={"x-request-id": "whole"}),
            await send(
                client, "POST", CHAT, json=ASKED | {"stream": True}, headers={"x-request-id": "sse"}
            ),
            await send(client, "POST", CHAT, content=b"{", headers={"x-request-id": "no-json"}),
            await send(
                client, "POST", CHAT, headers={"x-request-id": "page", "origin": "http://evil"}
            ),
            await send(client, "OPTIONS", CHAT, headers=asks | {"x-request-id": "preflight"}),
        ]
        running[0].end()
        done.append(
            await send(client, "POST", CHAT, json=ASKED, headers={"x-request-id": "refused"})
        )
    assert [each.status for each in done] == [200, 200, 400, 403, 204, 502]
    await trio.to_thread.run_sync(servers[0].stop)  # which has written all lines when it ends
    rows = [json.loads(line) for line in servers[0].stderr.splitlines()]
    found = {row["request_id"]: row for row in rows if "request_id" in row}
    for answered in done:
        row = found.pop(answered.headers["x-request-id"])
        assert (row["path"], row["status"]) == (CHAT, answered.status)
        assert row["bytes"] == len(answered.body)
    assert not found


async def test_the_model_of_a_form(kvd_process: Start) -> None:
    path = "/v1/audio/transcriptions"
    sound = {"file": ("a.wav", b"RIFF" + bytes(200_000) + b"--\r\n\r\nmodel", "audio/wav")}
    other = EngineOptions(model="other")
    async with serving(kvd_process, EngineOptions(), other) as (client, running):
        for at, model in enumerate(("demo", "other")):
            request = client.http.build_request("POST", path, files=sound, data={"model": model})
            whole = await request.aread()
            for body in (whole, b"preamble\r\n" + whole):
                sent = {"content-type": request.headers["content-type"]}
                answered = await client.post(path, body, sent)
                assert answered.json == {"text": f"{len(body)} bytes"}
                assert answered.headers["x-kvd-endpoint"] == running[at].url
                assert answered.headers["x-kvd-decision"] == "load"
        answered = await send(client, "POST", path, files=sound)  # names neither of two models
        assert (answered.status, answered.headers["x-kvd-error"]) == (404, "model_not_found")


async def test_models_of_a_name_with_slashes(kvd_process: Start) -> None:
    engine = EngineOptions(model="meta/llama/3")
    async with serving(kvd_process, engine, EngineOptions(model="b")) as (client, _):
        listed = (await client.get("/v1/models?limit=1000")).json
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (
            "meta/llama/3", "b", False,
        )  # fmt: skip
        for path in ("meta/llama/3", "meta%2Fllama%2F3"):
            assert (await client.get(f"/v1/models/{path}")).json["id"] == "meta/llama/3"
        unknown = await client.get("/v1/models/meta/llama")
        assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")


async def test_chats_without_tokens_are_followed_by_their_text(kvd_process: Start) -> None:
    """Only the engine knows how `documents` change the tokens."""
    three = (EngineOptions(), EngineOptions(), EngineOptions())
    async with serving(kvd_process, *three) as (client, _):
        for number in range(6):
            messages, places, decisions = [f"{number}"], set(), []
            for turn in range(3):
                answered = await client.chat(*messages, documents=[])
                places.add(answered.headers["x-kvd-endpoint"])
                decisions.append(answered.headers["x-kvd-decision"])
                messages.append(f"{turn}")
            assert decisions == ["load", "session", "session"]
            assert len(places) == 1
        metrics = await client.metrics()
        assert metrics['kvd_gateway_decisions_total{by="session"}'] == 12
        assert metrics["kvd_gateway_texts"] == 18


async def test_renders_of_other_apis(kvd_process: Start) -> None:
    two = (EngineOptions(renders=True), EngineOptions(renders=True))
    async with serving(kvd_process, *two) as (client, _):
        answered = await client.post(MESSAGES, ASKED)
        assert answered.headers["x-kvd-tokens"] == "render"
        body = {"model": "demo", "max_output_tokens": 1, "input": "hi"}
        answered = await client.post("/v1/responses", body)
        assert answered.headers["x-kvd-tokens"] == "render"
        assert answered.json["usage"]["input_tokens"] == int(
            answered.headers["x-kvd-prompt-tokens"]
        )


async def test_a_salt_keeps_prompts_apart(kvd_process: Start) -> None:
    prompt = " ".join(f"w{number}" for number in range(100))
    async with serving(kvd_process, EngineOptions(events=False)) as (client, _):
        matched = []
        for salt in ("a", "a", "b", None, None):
            more = {} if salt is None else {"cache_salt": salt}
            answered = await client.chat(prompt, **more)
            matched.append(int(answered.headers["x-kvd-matched-tokens"]) > 0)
        assert matched == [False, True, False, False, True]


async def test_decisions_can_be_kept_from_clients(kvd_process: Start) -> None:
    flags = ("--gateway-decision-headers=false",)
    async with serving(kvd_process, EngineOptions(), flags=flags) as (client, _):
        answered = await client.post(CHAT, ASKED, {"x-request-id": "mine"})
        assert answered.headers["x-request-id"] == "mine"
        assert not [name for name in answered.headers if name.startswith("x-kvd-")]


async def test_a_large_body_comes_at_its_own_pace(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):
        body = json.dumps({**ASKED, "user": "x" * 3_000_000}).encode()

        async def pieces() -> Any:
            for at in range(0, len(body), 1_000_000):
                yield body[at : at + 1_000_000]

        headers = {"expect": "100-continue", "content-type": "application/json"}
        response = await client.http.post(CHAT, content=pieces(), headers=headers)
        assert response.status_code == 200
        assert running[0].server.received[0] == body
        assert isinstance(response, httpx.Response)


async def test_engines_are_not_asked_for_compressed_answers(kvd_process: Start) -> None:
    """Nothing could be read in them, and a stream would be held to its end."""
    async with serving(kvd_process, EngineOptions()) as (client, [engine]):
        answered = await client.chat("hello", headers={"accept-encoding": "gzip"})
        assert answered.status == 200
        assert b"accept-encoding" not in engine.server.heads[0]
