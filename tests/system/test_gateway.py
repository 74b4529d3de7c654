"""`kvd gateway` in front of simulated engines: where requests go, and what faults cost."""

from __future__ import annotations

import json
import ssl
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from examples.engine.options import EngineOptions, Fault
from tests.support import http_client
from tests.support.exposition import parse
from tests.support.gateways import (
    CHAT,
    Client,
    gateway_of,
    scripted_engine,
    serving,
    tls_of,
    trusting,
    wait_heard,
    wait_metric,
    wait_serving,
)
from tests.support.narrow import narrow_stream
from tests.support.ports import find_free_port
from tests.support.processes import Server, clean_environment
from tests.support.zmtp_fakes import until

Start = Callable[..., Server]
PROMPT = " ".join(f"w{number}" for number in range(100))


async def test_what_is_expected_to_be_cached_is_cached(kvd_process: Start) -> None:
    three = (EngineOptions(), EngineOptions(), EngineOptions())
    flags = ("--gateway-memory-bytes", "0")
    async with serving(kvd_process, *three, flags=flags) as (client, running):
        messages, places = [PROMPT], set()
        for turn in range(5):
            answered = await client.chat(*messages)
            assert answered.status == 200
            details = answered.json["usage"]["prompt_tokens_details"]
            matched = int(answered.headers["x-kvd-matched-tokens"])
            assert matched == details["cached_tokens"]
            assert (matched > 0) == (turn > 0)
            assert answered.headers["x-kvd-tokens"] == "tokenize"
            places.add(answered.headers["x-kvd-endpoint"])
            messages.append(f"{PROMPT} {turn}")
            await wait_heard(client, running)
        assert len(places) == 1
        metrics = await client.metrics()
        assert metrics["kvd_http_requests_app_total"] == 0  # a scrape does not load Quart
        matched = metrics["kvd_gateway_matched_tokens_total"]
        assert 0 < matched < metrics["kvd_gateway_prompt_tokens_total"]
        for name in ("reported_matched_tokens", "reported_cached_tokens"):
            assert metrics[f"kvd_gateway_{name}_total"] == matched
        assert metrics['kvd_gateway_decisions_total{by="overlap"}'] == 5


async def test_a_prompt_under_way_counts_as_cached(kvd_process: Start) -> None:
    three = (EngineOptions(), EngineOptions(), EngineOptions())
    async with serving(kvd_process, *three) as (client, running), trio.open_nursery() as nursery:
        for each in running:
            each.server.options.faults.append(Fault.SILENCE)  # computes and publishes nothing
        nursery.start_soon(client.chat, f"{PROMPT} first")
        await until(lambda: sum(each.server.requests for each in running) == 1)
        (busy,) = (each for each in running if each.server.requests)
        for each in running:
            each.server.options.faults.clear()
        answered = await client.chat(f"{PROMPT} second")
        assert answered.headers["x-kvd-endpoint"] == busy.url
        assert int(answered.headers["x-kvd-matched-tokens"]) > 0
        nursery.cancel_scope.cancel()


async def test_a_next_turn_needs_no_tokenizer(kvd_process: Start) -> None:
    three = (EngineOptions(), EngineOptions(), EngineOptions())
    async with serving(kvd_process, *three) as (client, running):
        messages, sources, places = [PROMPT], [], set()
        for turn in range(4):
            answered = await client.chat(*messages)
            sources.append(answered.headers["x-kvd-tokens"])
            places.add(answered.headers["x-kvd-endpoint"])
            if turn:
                # The last turn does not count: it came after the tokens were asked for.
                details = answered.json["usage"]["prompt_tokens_details"]
                matched = int(answered.headers["x-kvd-matched-tokens"])
                assert 0 < matched <= details["cached_tokens"]
            messages.append(f"{PROMPT} {turn}")
            await wait_heard(client, running)
            await wait_metric(client, "kvd_gateway_conversations", turn + 1)
        assert sources == ["tokenize", "memory", "memory", "memory"]
        assert len(places) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault", [Fault.CLOSE, Fault.AFTER_HEAD, Fault.GARBAGE, Fault.REFUSE_429, Fault.REFUSE_503]
)
async def test_a_fault_before_the_answer_costs_the_client_nothing(
    kvd_process: Start, fault: Fault, stream: bool
) -> None:
    async with serving(kvd_process, EngineOptions(), EngineOptions()) as (client, running):
        for each in running:
            each.server.options.faults.append(fault)
        running[1].server.options.faults.clear()
        for _ in range(4):  # one request meets the fault
            answered = await client.chat(PROMPT, stream=stream)
            assert (answered.status, answered.clean) == (200, True)
        assert sum(each.server.requests for each in running) in (4, 5)


async def test_an_error_as_the_first_event_is_tried_elsewhere(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions(), EngineOptions()) as (client, running):
        for each in running:
            each.server.options.faults.append(Fault.ERROR_EVENT)
        running[1].server.options.faults.clear()
        for _ in range(4):
            answered = await client.chat(PROMPT, stream=True)
            assert answered.text == " word0 word1 word2 word3"


@pytest.mark.parametrize("fault", [Fault.AFTER_EVENT, Fault.IN_EVENT])
async def test_a_stream_that_breaks_off_is_seen_cut(kvd_process: Start, fault: Fault) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):
        running[0].server.options.faults.append(fault)
        answered = await client.chat(PROMPT, stream=True)
        assert answered.status == 200
        assert not answered.clean
        # If the gateway ended half an event, clients would take it for a whole one: it is just cut.
        has_error = b'"code": "upstream_failed"' in answered.body.rpartition(b"\n\ndata: ")[2]
        assert has_error == (fault is Fault.AFTER_EVENT)
        await wait_serving(client, 1)
        assert (await client.chat(PROMPT, stream=True)).clean


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/v1/responses", {"input": PROMPT}),
    ],
)
async def test_a_stream_may_end_with_its_connection(
    kvd_process: Start, path: str, body: dict[str, Any]
) -> None:
    async with serving(kvd_process, EngineOptions(chunks=False)) as (client, _):
        for _ in range(3):  # its engine goes on serving
            members = {"model": "demo", "max_tokens": 4, "stream": True, **body}
            answered = await client.post(path, members)
            assert (answered.status, answered.clean) == (200, True)
            assert b"upstream_failed" not in answered.body


async def test_a_500_is_passed_on_and_met_by_one_engine_only(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions(), EngineOptions()) as (client, running):
        for each in running:
            each.server.options.faults.append(Fault.REFUSE_500)
        answered = await client.chat(PROMPT)
        assert answered.status == 500
        assert answered.json["error"]["message"] == "simulated 500"
        assert sum(each.server.requests for each in running) == 1


async def test_all_refuse(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions(), EngineOptions()) as (client, running):
        for each in running:
            each.server.options.faults.append(Fault.REFUSE_503)
        answered = await client.chat(PROMPT)
        assert answered.status == 503
        assert answered.json["error"]["message"] == "simulated 503"
        assert answered.headers["retry-after"] == "1"
        assert sum(each.server.requests for each in running) == 2


@pytest.mark.parametrize("engines", [1, 2, 3])
async def test_all_refuse_in_their_first_event(kvd_process: Start, engines: int) -> None:
    """The client gets the error as a status, as if it had not asked for a stream."""
    options = [EngineOptions(faults=deque([Fault.ERROR_EVENT])) for _ in range(engines)]
    async with serving(kvd_process, *options) as (client, running):
        answered = await client.chat(PROMPT, stream=True)
        assert (answered.status, answered.clean) == (503, True)
        assert answered.headers["content-type"] == "application/json"
        assert answered.headers["retry-after"] == "1"
        assert answered.json["error"]["message"] == "the queue is full"
        assert sum(each.server.requests for each in running) == min(engines, 2)
        assert (await client.metrics())["kvd_gateway_running_requests"] == 0


async def test_an_answer_byte_by_byte_is_the_same(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):
        plain = await client.chat(PROMPT, stream=True, headers={"x-request-id": "same"})
        running[0].server.options.faults.append(Fault.BYTES)
        slow = await client.chat(PROMPT, stream=True, headers={"x-request-id": "same"})
        assert slow.clean
        assert slow.body == plain.body
        assert plain.headers["x-request-id"] == "same"


@pytest.mark.parametrize("behind_tls", [False, True])
async def test_a_client_that_leaves_aborts_its_request(
    kvd_process: Start, certificate: Path, behind_tls: bool
) -> None:
    slow, tls = EngineOptions(step_s=0.05), tls_of(certificate) if behind_tls else None
    flags = trusting(certificate)
    async with serving(kvd_process, slow, flags=flags, tls=tls) as (client, running):
        body = b'{"model":"demo","max_tokens":1000,"stream":true,"prompt":"a b c"}'
        stream = await trio.open_tcp_stream("127.0.0.1", client.http.base_url.port)
        async with stream:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            await stream.send_all(head % len(body) + body)
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        await until(lambda: running[0].server.aborted == 1)


async def test_an_engine_that_ends_is_left_and_taken_again(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions(), EngineOptions()) as (client, running):
        running[0].end()
        for number in range(6):  # tokens are asked of each engine in turn
            answered = await client.chat(f"{number} {PROMPT}")
            assert answered.status == 200
            assert answered.headers["x-kvd-endpoint"] == running[1].url
        await wait_serving(client, 1)
        await running[0].start()
        await wait_serving(client, 2)


async def test_nobody_left(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):
        running[0].end()
        # The first request asks for its tokens, and so finds that the engine has gone.
        for _ in range(2):
            answered = await client.chat(PROMPT)
            assert answered.status == 503
        assert answered.json["error"]["code"] == "no_upstream"
        assert answered.headers["retry-after"] == "1"
        messages = {"model": "demo", "max_tokens": 4, "messages": []}
        answered = await client.post("/v1/messages", messages)
        assert answered.json["error"]["type"] == "overloaded_error"


async def test_what_the_gateway_refuses(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):
        for body, status, code in (
            (b"{", 400, "invalid_json"),
            (b"[]", 400, "invalid_json"),
            (b'{"model":"other","messages":[]}', 404, "model_not_found"),
            (b'{"model":7,"messages":[]}', 400, "invalid_json"),
            (b'{"model":"demo","kv_transfer_params":{}}', 400, "forbidden_parameter"),
        ):
            answered = await client.post("/v1/chat/completions", body)
            assert (answered.status, answered.json["error"]["code"]) == (status, code)
        answered = await client.post("/v1/images", {})
        assert (answered.status, answered.json["error"]["code"]) == (404, "unknown_url")
        assert running[0].server.requests == 0


async def test_extreme_numbers_are_the_engines_to_judge(kvd_process: Start) -> None:
    """Whatever numbers a client sends, it is answered, and the next request is served."""
    async with serving(kvd_process, EngineOptions()) as (client, _):
        for more in (
            b'"prompt":[[4294967296]]',
            b'"prompt":"a","nvext":{"agent_hints":{"osl":4294967296,"priority":4294967296}}',
            b'"prompt":"a","nvext":{"agent_hints":{"osl":9223372036854775807}}',
            b'"prompt":"a","nvext":{"agent_hints":{"osl":4294967295,"priority":4294967295}}',
        ):
            body = b'{"model":"demo","max_tokens":1,%b}' % more
            assert (await client.post("/v1/completions", body)).status in (200, 400)
        assert (await client.chat(PROMPT)).status == 200


@contextmanager
def starting_with_tls(folder: Path, certificate: Path) -> Iterator[tuple[Start, int]]:
    """Yields what starts a gateway that listens with TLS as well, and that port."""
    plain, port = find_free_port(), find_free_port()

    def start(*flags: str, face: str) -> Server:
        files = [f"--tls-{kind}file={certificate}/{kind}.pem" for kind in ("cert", "key")]
        bind = f"--gateway-bind=127.0.0.1:{plain},tls:127.0.0.1:{port}"
        command = [sys.executable, "-m", "kvd", face, bind, *files, *flags]
        server = Server(command, folder, plain, clean_environment())
        stack.callback(server.stop)
        server.wait_healthy()
        return server

    with ExitStack() as stack:
        yield start, port


@pytest.mark.parametrize("fault", [Fault.GARBAGE, Fault.SILENCE, Fault.IN_EVENT])
async def test_faults_are_told_to_clients_of_tls_too(
    tmp_path: Path, certificate: Path, fault: Fault
) -> None:
    flags = "--gateway-silence-s", "0.2"
    with starting_with_tls(tmp_path, certificate) as (start, port):
        async with (
            serving(start, EngineOptions(), flags=flags) as (client, running),
            httpx.AsyncClient(
                base_url=f"https://127.0.0.1:{port}", trust_env=False, verify=False, timeout=60
            ) as http,
        ):
            running[0].server.options.faults.append(fault)
            answered = await Client(http).chat(PROMPT, stream=True)
            status = {Fault.GARBAGE: 502, Fault.SILENCE: 504, Fault.IN_EVENT: 200}[fault]
            assert answered.status == status
            if fault is Fault.IN_EVENT:
                assert not answered.clean
            else:
                assert answered.json["error"]["message"]
            await wait_serving(client, 1)
            assert (await Client(http).chat(PROMPT, stream=True)).clean


async def test_a_client_of_tls_may_pause_while_it_reads(tmp_path: Path, certificate: Path) -> None:
    """As one without TLS may: the engine waits, and `http_send_s` is for answers of kvd's own."""
    body = bytes(16 * 1024 * 1024)  # more than all buffers on the way hold

    async def script(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    trust = ssl.create_default_context(cafile=certificate / "cert.pem")
    trust.check_hostname = False
    asked = b'{"model":"demo"}'
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(asked)}\r\n\r\n"
    with starting_with_tls(tmp_path, certificate) as (start, port):
        async with (
            scripted_engine(script) as url,
            gateway_of(start, [url], ["--http-send-s", "0.001"]) as client,
            trio.SSLStream(await narrow_stream("127.0.0.1", port), trust) as stream,
        ):
            await stream.send_all(head.encode() + asked)
            forwarded, before = 0.0, -1.0
            while not forwarded or forwarded != before:
                await trio.sleep(0.05)
                before = forwarded
                forwarded = (await client.metrics())["kvd_gateway_relay_payload_bytes_total"]
            received = bytearray()
            while not received.endswith(body):
                piece = await stream.receive_some()
                assert piece, len(received)
                received += piece


async def test_bodies_and_headers_go_on_as_they_are(kvd_process: Start) -> None:
    body = b'{ "model":"demo" ,"max_tokens":1, "prompt":[1,2,3],"x":1.00 }'
    sent = {
        "authorization": "Bearer secret",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-data-parallel-rank": "7",
        "x-kvd-endpoint": "me",
        "connection": "close, x-hop",
        "x-hop": "1",
    }
    async with serving(kvd_process, EngineOptions()) as (client, running):
        answered = await client.post("/v1/completions", body, sent)
        assert answered.status == 200
        assert answered.headers["x-kvd-tokens"] == "ids"
        server = running[0].server
        assert server.received[0] == body
        head = server.heads[0]
        assert head[b"authorization"] == b"Bearer secret"
        assert head[b"traceparent"] == sent["traceparent"].encode()
        assert head.keys().isdisjoint({b"x-data-parallel-rank", b"x-kvd-endpoint", b"x-hop"})
        assert head[b"host"] == running[0].url.removeprefix("http://").encode()


async def test_models_are_the_union_of_all_engines(kvd_process: Start) -> None:
    async with serving(
        kvd_process,
        EngineOptions(adapters=("poet",), max_model_len=1000),
        EngineOptions(max_model_len=500),
    ) as (client, running):
        cards = (await client.get("/v1/models")).json["data"]
        assert {card["id"]: card["max_model_len"] for card in cards} == {
            "demo": 500,
            "poet": None,
        }
        for _ in range(3):
            answered = await client.chat(PROMPT, model="poet")
            assert answered.headers["x-kvd-endpoint"] == running[0].url
        assert (await client.get("/v1/models/poet")).status == 200
        assert (await client.get("/v1/models/nobody")).status == 404


async def test_sglang_is_known_by_what_it_says(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions(kind="sglang")) as (client, _):
        shown = (await client.get("/status")).json["upstreams"][0]
        assert (shown["engine"], shown["block_size"]) == ("sglang", 16)
        assert (await client.chat(PROMPT)).status == 200


async def test_adapters_of_sglang_are_asked_for_beside_their_base(kvd_process: Start) -> None:
    """By an adapter's name alone SGLang would answer as the base model, without a word."""
    options = EngineOptions(kind="sglang", adapters=("poet",), events=False)
    async with serving(kvd_process, options) as (client, running):
        cards = (await client.get("/v1/models")).json["data"]
        assert [card["id"] for card in cards] == ["demo", "demo:poet"]
        assert (await client.get("/v1/models/demo:poet")).json["id"] == "demo:poet"
        assert (await client.chat(PROMPT, model="poet")).status == 404
        expected = []
        for asks in ({"model": "demo:poet"}, {"lora_path": "poet"}, {}, {"lora_path": "nobody"}):
            answered = await client.chat(PROMPT, **asks)
            assert answered.status == 200
            assert asks.items() <= json.loads(running[0].server.received[0]).items()
            expected.append(int(answered.headers["x-kvd-matched-tokens"]) > 0)
        assert expected == [False, True, False, True]


async def test_a_session_stays_where_tokens_are_not_known(kvd_process: Start) -> None:
    three = (EngineOptions(), EngineOptions(), EngineOptions())
    async with serving(kvd_process, *three) as (client, _):
        for name in ("x-session-id", "x-claude-code-session-id", "session_id"):
            places = set()
            for _ in range(6):
                answered = await client.post(
                    "/v1/chat/completions",
                    {"model": "demo", "messages": [], "documents": [], "max_tokens": 1},
                    {name: f"s-{name}"},
                )
                assert answered.headers["x-kvd-tokens"] == "none"
                places.add(answered.headers["x-kvd-endpoint"])
            assert len(places) == 1


async def test_engines_without_events_are_chosen_by_what_they_were_sent(kvd_process: Start) -> None:
    three = (EngineOptions(events=False), EngineOptions(events=False), EngineOptions())
    flags = ("--gateway-memory-bytes", "0")
    async with serving(kvd_process, *three, flags=flags) as (client, running):
        for number in range(6):
            messages = [f"{number} {PROMPT}"]
            first = await client.chat(*messages)
            await wait_heard(client, [each for each in running if each.server.publisher])
            second = await client.chat(*messages, "more")
            place = first.headers["x-kvd-endpoint"]
            assert second.headers["x-kvd-endpoint"] == place
            has_events = place == running[2].url
            assert second.headers["x-kvd-decision"] == ("overlap" if has_events else "predicted")
            assert int(second.headers["x-kvd-matched-tokens"]) > 0
        shown = (await client.get("/status")).json["upstreams"]
        assert [bool(each["events"]) for each in shown] == [False, False, True]


async def test_tokens_are_asked_of_the_next_engine_where_one_has_gone(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions(), EngineOptions()) as (client, running):
        running[0].end()
        for number in range(4):
            answered = await client.chat(f"{number} {PROMPT}")
            assert (answered.status, answered.headers["x-kvd-tokens"]) == (200, "tokenize")


def test_an_engine_that_was_never_there_is_said_once(kvd_process: Start) -> None:
    server = kvd_process("--upstream", "http://127.0.0.1:1", face="gateway")
    server.wait_logged(
        'event=upstream_unusable url=http://127.0.0.1:1 reason="unreachable: nothing'
    )

    def attempts() -> float:
        text = http_client.get(f"{server.base_url}/metrics").text
        return parse(text)["kvd_gateway_relay_begun_total"]

    begun = attempts()
    server.wait_until(lambda: attempts() >= begun + 3, "asking again")
    assert server.stderr.count("event=upstream_unusable") == 1
