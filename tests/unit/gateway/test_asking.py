"""A request's session, length of output, urgency and salt are read from its head and body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvd.gateway.errors import GatewayError, Reason
from kvd.gateway.requests import (
    MAX_NESTED_BYTES,
    MAX_PROMPTS,
    MAX_TEXTS_BYTES,
    TRUNCATES,
    Api,
    read,
)
from kvd.http.messages import Headers

HINTS = {"osl": 50, "priority": 7}


def asked(headers: Headers | None = None, **members: Any) -> Any:
    return read(Api.CHAT, headers or [], json.dumps(members).encode())


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({}, None),
        ({"max_tokens": 9}, 9),
        ({"max_completion_tokens": 3, "max_tokens": 9}, 3),
        ({"max_output_tokens": 4}, 4),
        ({"max_tokens": None, "nvext": {"agent_hints": {"osl": 50}}}, 50),
        ({"max_tokens": 10, "nvext": {"agent_hints": {"osl": 50}}}, 10),
        ({"max_tokens": 100, "nvext": {"agent_hints": {"osl": 50}}}, 50),
        ({"max_tokens": 0}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": "9"}, None),
        ({"max_tokens": 2**70}, 2**32 - 1),
    ],
)
def test_the_expected_output(members: dict[str, Any], expected: int | None) -> None:
    assert asked(**members).expected_output_tokens == expected


@pytest.mark.parametrize(
    ("api", "members", "reads_cache"),
    [
        (Api.COMPLETIONS, {"logprobs": 3, "echo": False, "prompt_logprobs": None}, True),
        (Api.COMPLETIONS, {"prompt_logprobs": 0}, False),
        (Api.COMPLETIONS, {"echo": True}, True),
        (Api.COMPLETIONS, {"echo": True, "logprobs": 0}, False),
        (Api.CHAT, {"logprobs": True}, True),
        (Api.CHAT, {"prompt_logprobs": 0}, False),
        (Api.CHAT, {"echo": True}, False),
    ],
)
def test_what_is_computed_whatever_is_cached(
    api: Api, members: dict[str, Any], reads_cache: bool
) -> None:
    assert read(api, [], json.dumps(members).encode()).reads_cache is reads_cache


@pytest.mark.parametrize(
    ("hints", "jump"),
    [
        ({}, None),
        ({"priority": 7}, 7.0),
        ({"priority": -7}, 0.0),
        ({"latency_sensitivity": 0.5, "priority": 7}, 0.5),
        ({"priority": 2**70}, 2.0**32 - 1),
        ({"priority": "7"}, None),
        ("no object", None),
    ],
)
def test_hints_of_agents(hints: Any, jump: float | None) -> None:
    assert asked(nvext={"agent_hints": hints}).priority_jump == jump


def test_the_priority_of_engines() -> None:
    assert asked().priority == 0
    assert asked(priority=-3).priority == -3
    assert asked([(b"x-vllm-priority", b"-5")], priority=-3).priority == -5
    assert asked([(b"x-vllm-priority", b"high")], priority=2).priority == 2
    assert asked(priority=2**40).priority == 0


def test_the_session_is_named_by_the_first_that_does() -> None:
    body = {
        "session_id": "body",
        "prompt_cache_key": "key",
        "conversation": {"id": "conv_1"},
        "metadata": {"session_id": "meta", "user_id": "u_session_old"},
        "user": "somebody",
    }
    headers: Headers = [
        (b"session_id", b"codex"),
        (b"x-claude-code-session-id", b"claude"),
        (b"x-claude-code-agent-id", b"sub"),
        (b"x-session-id", b"given"),
    ]
    found = []
    while headers:
        found.append(asked(headers, **body).session)
        headers.pop()
        if headers[-1:] == [(b"x-claude-code-agent-id", b"sub")]:
            found.append(asked(headers, **body).session)
            headers.pop()
    for name in ("session_id", "prompt_cache_key", "conversation", "metadata"):
        found.append(asked(**body).session)
        del body[name]
    assert found == [
        "given", "claude:sub", "claude", "codex", "body", "key", "conv_1", "meta",
    ]  # fmt: skip
    assert asked(metadata={"user_id": "u_session_old"}).session == "old"
    assert asked(conversation="conv_2").session == "conv_2"
    assert asked(**body).session is None
    assert len(asked(session_id="x" * 1000).session) < 256


def test_the_salt_and_what_a_response_follows() -> None:
    one = asked(cache_salt="s", previous_response_id="resp_1")
    assert (one.salt, one.previous) == ("s", "resp_1")
    other = asked(cache_salt="", previous_response_id=7)
    assert (other.salt, other.previous) == (None, None)


def completion(prompt: str) -> Any:
    return read(Api.COMPLETIONS, [], b'{"prompt":%b}' % prompt.encode())


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [
        ("[1, 2]", "[1, 2]", None),
        ("[[1], [2, 3,4] , []]", " [2, 3,4]", None),
        ("[ [5]]", "[5]", None),
        ("[[]]", "[]", None),
        ("[]", None, None),
        ('"one"', None, '"one"'),
        ('["one"]', None, '"one"'),
        ('["a", "b,]c", ""]', None, '"b,]c"'),
        ('[1.5, "a"]', '[1.5, "a"]', None),
        ('["a", 1]', None, None),
        (f'["a", {"1" * 5000}]', None, None),
        ("null", None, None),
        ("[" + "[1]," * MAX_PROMPTS + "[2]]", None, None),
        ('["' + "a" * MAX_TEXTS_BYTES + '"]', None, None),
    ],
)
def test_of_several_prompts_the_longest_counts(
    prompt: str, ids: str | None, text: str | None
) -> None:
    asked = completion(prompt)
    assert asked.token_ids == (None if ids is None else ids.strip().encode())
    assert asked.prompt_text == (None if text is None else text.encode())


@pytest.mark.parametrize(
    ("members", "single"),
    [
        ('"prompt":"a, \\"b\\", \\"c"', True),
        ('"prompt":["a, \\"b\\", \\"c\\", d"],"n":null', True),
        ('"prompt":["a \\"b\\","]', True),
        ('"prompt":[ "a" , "b"]', False),
        ('"prompt":[1, 2],"n":1', True),
        ('"prompt":[1, 2],"n":2', False),
        ('"prompt":[ [1, 2]]', True),
        ('"prompt":[[1],[2]]', False),
        ('"prompt":"[[1],[2]]"', True),
    ],
)
def test_one_answer_to_one_prompt(members: str, single: bool) -> None:
    assert read(Api.COMPLETIONS, [], f"{{{members}}}".encode()).is_single is single


def test_ids_that_an_engine_truncates_are_not_those_of_the_prompt() -> None:
    for prompt in ([1, 2, 3], [[1, 2, 3]]):
        for members, has_ids in (({}, True), ({TRUNCATES: None}, True), ({TRUNCATES: 2}, False)):
            body = json.dumps({"prompt": prompt, **members}).encode()
            assert (read(Api.COMPLETIONS, [], body).token_ids is not None) is has_ids


def test_hints_are_bounded() -> None:
    with pytest.raises(GatewayError, match=f"metadata: longer than {MAX_NESTED_BYTES} bytes"):
        asked(metadata={"a": "x" * MAX_NESTED_BYTES})
    assert asked(metadata="x" * MAX_NESTED_BYTES).session is None


def test_an_error_does_not_repeat_all_that_was_sent() -> None:
    assert len(str(GatewayError(Reason.MODEL_NOT_FOUND, "x" * 100_000))) == 1003


@pytest.mark.parametrize("name", ["kv_transfer_params", "bootstrap_host", "routed_dp_rank"])
def test_what_is_the_gateways_to_set(name: str) -> None:
    with pytest.raises(GatewayError) as refused:
        asked(**{name: 1})
    assert refused.value.reason is Reason.FORBIDDEN_PARAMETER
    assert refused.value.param == name
    assert asked(**{name: None}).model is None
