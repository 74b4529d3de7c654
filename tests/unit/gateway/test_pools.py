"""One request becomes two, for a prefill engine and a decode engine that match."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvd.gateway.errors import GatewayError
from kvd.gateway.pools import (
    EngineRank,
    eligible_engines,
    handed_over,
    judge_host,
    meeting,
    prefill_body,
    taking_over,
)
from kvd.gateway.probing import EngineKind, Facts, ListedModel
from kvd.gateway.requests import MAX_PROMPTS, Api, read
from kvd.gateway.upstream import Upstream
from kvd.selection.worker_record import Role
from kvd.wire.urls import parse_url
from kvd_core.relay.relay import Answer

CHAT = b"/v1/chat/completions"
PARAMS = b'{ "remote_block_ids":[[1, 2]],"n": 18446744073709551615,"t":1e-07,"\xc3\xa9":null}'


def upstream(
    kind: EngineKind, role: Role | None = None, ranks: range = range(1), *, prefills: bool = False
) -> Upstream:
    url = "http://10.1.2.3:8000"
    models = (ListedModel("m", None, None, {}),)
    facts = Facts(kind, "", models, 16, None, ranks, {}, {}, False, role, 8998)
    return Upstream(url, parse_url(url), 1, prefills=prefills, facts=facts)


async def joined(body: bytes, params: bytes = PARAMS) -> bytes:
    return await taking_over(read(Api.CHAT, [], body), body, params)


async def prefilling(path: bytes, members: Any) -> bytes | None:
    body = json.dumps(members).encode()
    return await prefill_body(read(Api.COMPLETIONS, [], body), path, body)


async def test_a_prefill_is_one_token_in_one_piece() -> None:
    sent = {
        "model": "m",
        "messages": [{"role": "user", "content": "\U0001f600 é"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 100,
        "min_tokens": 5,
        "logprobs": True,
        "top_logprobs": 3,
        "n": 1,
        "seed": 2**63 - 1,
        "echo": False,
    }
    body = await prefilling(CHAT, sent)
    assert body is not None
    assert json.loads(body) == {
        "model": "m",
        "messages": sent["messages"],
        "max_completion_tokens": 1,
        "seed": 2**63 - 1,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        (b"/v1/completions", "max_tokens"),
        (b"/v1/messages", "max_tokens"),
        (b"/v1/responses", "max_output_tokens"),
    ],
)
async def test_each_api_limits_its_answer_in_its_own_way(path: bytes, limit: str) -> None:
    body = await prefilling(path, {})
    assert body is not None
    assert json.loads(body).keys() == {limit, "stream", "kv_transfer_params"}


@pytest.mark.parametrize(
    "members",
    [
        {"n": 2},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"previous_response_id": "r"},
    ],
)
async def test_what_is_unsuited(members: dict[str, Any]) -> None:
    assert await prefilling(b"/v1/completions", members) is None


@pytest.mark.parametrize("prompt", ["a", [1, 2], [[1, 2]], ["a"], []])
async def test_one_prompt_in_any_form_is_suited(prompt: Any) -> None:
    assert await prefilling(b"/v1/completions", {"prompt": prompt}) is not None


async def test_a_prefill_has_the_other_members_as_they_are() -> None:
    long = b'{ "stream" :true, "seed":' + b"9" * 5000 + b' ,"a":[1.00] , "n":1 }\n'
    body = await prefill_body(read(Api.CHAT, [], long), CHAT, long)
    assert body is not None
    assert body.startswith(b'{  "seed":' + b"9" * 5000 + b' ,"a":[1.00] ,"max_tokens":1,"stream":f')


async def test_what_is_handed_over_stays_as_it_is() -> None:
    held = b'{"usage":{},"kv_transfer_params":' + PARAMS + b',"x":1}'
    assert handed_over(Answer(200, b"", held, True, False)) == PARAMS
    body = b'{ "model":"m" ,"x":1.00,"messages":[{}] }\n'
    assert await joined(
        body
    ) == b'{ "model":"m" ,"x":1.00,"messages":[{}],"kv_transfer_params":%b}' % (PARAMS)
    assert await joined(b" { } ") == b' {"kv_transfer_params":%b}' % PARAMS


async def test_what_a_client_leaves_empty_is_not_said_twice() -> None:
    body = b'{"kv_transfer_params":null,"bootstrap_room":null,"a":[1]}'
    assert await joined(body, b"{}") == b'{"a":[1],"kv_transfer_params":{}}'


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, b"", b'{"kv_transfer_params":null}', True, False),
        Answer(200, b"", b'{"kv_transfer_params":7}', True, False),
        Answer(200, b"", b"{}", True, False),
        Answer(200, b"", b"[]", True, False),
        Answer(200, b"", b'{"kv_transfer_params":{}}', False, False),
        Answer(500, b"", b'{"kv_transfer_params":{}}', True, False),
    ],
)
def test_an_answer_may_hand_nothing_over(answer: Answer) -> None:
    assert handed_over(answer) is None


@pytest.mark.parametrize(
    ("host", "other", "lines"),
    [
        (b'"localhost"', "10.0.0.2", 1),
        (b'"127.0.0.1"', "10.0.0.2", 1),
        (b'"::1"', "10.0.0.2", 1),
        (b'"localhost"', "10.0.0.1", 0),  # the same machine
        (b'"10.0.0.1"', "10.0.0.2", 0),
        (b'"gpu1"', "10.0.0.2", 0),
        (b"9" * 5000, "10.0.0.2", 0),
        (b"null", "10.0.0.2", 0),
    ],
)
def test_a_host_that_others_do_not_reach_is_told_once(
    host: bytes, other: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = upstream(EngineKind.VLLM, prefills=True), upstream(EngineKind.VLLM)
    prefill.address, decode.address = "10.0.0.1", other
    for _ in range(2):
        judge_host(b'{"remote_host":%b}' % host, prefill, decode)
    assert [record.getMessage() for record in caplog.records].count("prefill_unreachable") == lines


async def met(body: bytes, place: EngineRank) -> dict[str, Any]:
    members = json.loads(await meeting(read(Api.COMPLETIONS, [], body), body, place))
    assert isinstance(members, dict)
    return members


async def test_a_room_says_its_rank() -> None:
    """In SGLang, the room modulo the number of ranks is the rank that prefills."""
    one = upstream(EngineKind.SGLANG, Role.PREFILL, range(4, 7))
    rooms = set()
    for rank in one.facts.ranks if one.facts else ():
        for _ in range(20):
            members = await met(b'{"prompt":"a"}', EngineRank(one, rank))
            assert (members["bootstrap_host"], members["bootstrap_port"]) == ("10.1.2.3", 8998)
            assert members["bootstrap_room"] % 3 == rank - 4
            assert 0 <= members["bootstrap_room"] < 2**63 - 2**32
            rooms.add(members["bootstrap_room"])
    assert len(rooms) == 60


@pytest.mark.parametrize(
    "prompt",
    [
        b'["a" , "b\\",\\"c"]',
        b'["a", "b\\","]',
        b'["a\\\\\\"", "b\\\\"]',
        b'[",", ""]',
        b"[ [1],[2]]",
    ],
)
async def test_each_of_several_prompts_has_a_room(prompt: bytes) -> None:
    sent = await met(
        b'{"prompt":' + prompt + b"}", EngineRank(upstream(EngineKind.SGLANG, Role.PREFILL), 0)
    )
    assert sent["bootstrap_host"] == ["10.1.2.3"] * 2
    assert sent["bootstrap_port"] == [8998] * 2
    assert len(set(sent["bootstrap_room"])) == 2


@pytest.mark.parametrize("prompt", [b'""', b"[1]"])
async def test_rooms_are_bounded(prompt: bytes) -> None:
    """One request with millions of empty prompts held all others up until the watchdog came."""
    place = EngineRank(upstream(EngineKind.SGLANG, Role.PREFILL), 0)
    most = b",".join([prompt] * MAX_PROMPTS)
    assert len((await met(b'{"prompt":[%b]}' % most, place))["bootstrap_room"]) == MAX_PROMPTS
    with pytest.raises(GatewayError, match="more than 4096 prompts"):
        await met(b'{"prompt":[%b,%b]}' % (most, prompt), place)


def test_who_can_be_two_for_a_request() -> None:
    prefill = upstream(EngineKind.VLLM, prefills=True)
    taker, other = upstream(EngineKind.VLLM), upstream(EngineKind.SGLANG)
    eligible = eligible_engines([prefill, taker, other], CHAT)
    assert (eligible.pairs, eligible.alone) == ([prefill, taker], [taker, other])
    assert eligible_engines([prefill, other], CHAT).pairs == []
    assert eligible_engines([taker], CHAT).pairs == []
    assert eligible_engines([prefill, taker], b"/tokenize").pairs == []
    first, second = (
        upstream(EngineKind.SGLANG, Role.PREFILL),
        upstream(EngineKind.SGLANG, Role.DECODE),
    )
    eligible = eligible_engines([first, second, other], CHAT)
    assert (eligible.pairs, eligible.alone) == ([first, second], [other])
    assert eligible_engines([first, second], b"/tokenize").alone == [second]
