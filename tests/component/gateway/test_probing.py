"""Impossible answers of an engine give the operator a reason, and do no other harm."""

from __future__ import annotations

import json

import pytest
import trio

from kvd.gateway.answers import first_error
from kvd.gateway.heads import read_head
from kvd.gateway.probing import (
    MAX_VERSION,
    EngineKind,
    Facts,
    NotAnEngine,
    Probe,
    cache_configs,
)
from kvd.gateway.requests import Api, longest_ids, read
from kvd.gateway.stats import TokenSource
from kvd.gateway.tokens import read_tokens, renders
from kvd.wire.urls import parse_url
from tests.support.relaying import relaying

MODELS = {"data": [{"id": "demo"}]}


async def ask(answers: dict[str, object]) -> EngineKind | None:
    facts = await facts_of(answers)
    return None if facts is None else facts.kind


async def facts_of(answers: dict[str, object]) -> Facts | None:
    """Probes an engine that answers the paths in `answers`, and others with 404.

    Returns None if it is not an engine.
    """

    async def script(stream: trio.SocketStream) -> None:
        data = b""
        while piece := await stream.receive_some():
            data += bytes(piece)
            while b"\r\n\r\n" in data:
                head, _, data = data.partition(b"\r\n\r\n")
                path = head.split(b" ")[1].decode()
                data = b"" if path.endswith("render") else data
                answer = answers.get(path)
                body = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                status = 200 if path in answers else 404
                line = b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
                await stream.send_all(line + body)

    async with relaying(script) as (exchanges, engine, _):
        target = parse_url("http://127.0.0.1:1")
        try:
            return await Probe(exchanges, engine, target, b"", b"1234").ask()
        except NotAnEngine:
            return None


@pytest.mark.parametrize(
    "answers",
    [
        {"/v1/models": {"data": 5}},
        {"/v1/models": {"data": {"id": "demo"}}},
        {"/v1/models": {"data": [{"id": "\ud800"}]}},
        {"/v1/models": MODELS, "/server_info": {"page_size": 1, "dp_size": 10**12}},
        {
            "/v1/models": MODELS,
            "/version": {"version": "1"},
            "/kv_event_sources": {
                "0": {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": "tcp://[x:99999999",
                }
            },
        },
    ],
)
async def test_an_engine_that_makes_no_sense_is_none(answers: dict[str, object]) -> None:
    assert await ask(answers) is None


async def test_an_engine_that_says_little_is_one() -> None:
    assert await ask({"/v1/models": MODELS}) is EngineKind.OPENAI


@pytest.mark.parametrize("rank", ["9" * 5000, "\u0663", "-1", ""])
async def test_ranks_that_are_none_are_passed_over(rank: str) -> None:
    source = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}
    answers = {
        "/version": {"version": "1"},
        "/v1/models": MODELS,
        "/kv_event_sources": {rank: source},
    }
    assert await ask(answers) is EngineKind.VLLM


async def test_the_blocks_of_a_rank_are_its_share_of_all() -> None:
    labels = 'block_size="32",num_gpu_blocks="512"'
    lines = [f'vllm:cache_config_info{{{labels},engine="{rank}"}} 1.0\n' for rank in (4, 5)]
    answers = {"/version": {"version": "1"}, "/v1/models": MODELS, "/metrics": "".join(lines)}
    facts = await facts_of(answers)
    assert facts is not None and (facts.ranks, facts.blocks) == (range(4, 6), 256)


async def test_models_with_names_that_nobody_could_ask_for_are_passed_over() -> None:
    """Such names break metrics and the index, and half a character ended kvd."""
    adapters = [{"id": name, "parent": "demo"} for name in ("\udc80", "a\n", "\x00", "sql")]
    facts = await facts_of({"/v1/models": {"data": [*adapters, *MODELS["data"]]}})
    assert facts is not None and facts.names == ["demo", "sql"]


@pytest.mark.parametrize("parent", ["\ud800", "a\n", 5, {"id": "demo"}])
async def test_adapters_of_a_model_with_such_a_name_are_passed_over(parent: object) -> None:
    """An adapter of SGLang is asked for by its model's name and its own."""
    models = {"data": [{"id": "sql", "parent": parent}, *MODELS["data"]]}
    facts = await facts_of({"/v1/models": models, "/server_info": {"page_size": 1}})
    assert facts is not None and facts.names == ["demo"]


@pytest.mark.parametrize("tokens", [10**18, 2**64, 10**400], ids=lambda tokens: str(tokens)[:20])
async def test_an_impossible_number_of_tokens_is_ignored(tokens: int) -> None:
    model = {"id": "demo", "max_model_len": tokens}
    info = {"page_size": 1, "max_total_num_tokens": tokens, "dcp_size": tokens}
    facts = await facts_of({"/v1/models": {"data": [model]}, "/server_info": info})
    assert facts is not None
    assert (facts.block_size, facts.blocks, facts.context) == (1, None, None)


async def test_of_a_long_version_the_beginning_is_kept() -> None:
    answer = {"version": "1.2" + "3" * 5000, "page_size": 1}
    for path in ("/version", "/server_info"):
        facts = await facts_of({"/v1/models": MODELS, path: answer})
        assert facts is not None and facts.version.startswith("1.23"), path
        assert len(facts.version) == MAX_VERSION, path


def test_any_text_may_be_a_version() -> None:
    asked = read(Api.MESSAGES, [], b'{"model":"demo","messages":[]}')
    versions = {"0.28.9": False, "0.29.0": True, "1.0rc1": True, "dev": False, "9" * 5000: True}
    for version, rendered in versions.items():
        facts = Facts(EngineKind.VLLM, version, (), 1, None, range(1), {}, {}, renders=True)
        assert renders(facts, asked) is rendered, version[:20]


def test_numbers_too_long_to_read_are_left_out() -> None:
    line = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{"9" * 5000}"}} 1.0'
    assert cache_configs(line) == [{"block_size": 16}]
    ids = longest_ids(b"[[" + b"1" * 5000 + b"]]")
    assert ids is not None and read_tokens(TokenSource.IDS, b'{"token_ids":%b}' % ids) is None


def test_which_first_events_are_errors() -> None:
    overloaded = b'{"type": "error", "error": {"type": "overloaded_error", "message": ""}}'
    for data, status in (
        (b'{"error": {"code": 503}}', 503),
        (overloaded, 503),
        (b'{"error": {"code": 7}}', None),
        (b'{"error": {"type": ["overloaded_error"]}}', None),
        (b'[{"error": {"code": 503}}]', None),
    ):
        found = first_error(b": hello\n\nevent: error\ndata: %b\n\n" % data)
        assert (None if found is None else found.status) == status
        assert found is None or found.data == data
    assert first_error(b"data: " + b"[" * 30_000 + b"\n\n") is None
    opened = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    found = first_error(opened + b"data: %b\n\ndata: [DONE]\n\n" % overloaded)
    assert found is not None and found.status == 503


def test_an_engine_says_nothing_in_the_gateways_name() -> None:
    head = b"HTTP/1.1 200 OK\r\nX-Kvd-Endpoint: http://elsewhere\r\nx-engine: 1\r\n\r\n"
    assert read_head(head).lines == b"x-engine: 1\r\n"
