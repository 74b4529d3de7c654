"""The conversation that a request continues is found by its text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvd.gateway.chains import RESPONSE_S, Chains, lasting
from kvd.gateway.requests import Api, ClientRequest, read
from kvd.gateway.stats import GatewayStats
from kvd.gateway.upstreams import Served

SERVED = Served("m")
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def chains(clock: Clock) -> Chains:
    return Chains(GatewayStats(), clock)


def asked(api: Api, **members: Any) -> ClientRequest:
    return read(api, [], json.dumps(members).encode())


def test_a_session_that_is_named_is_that(chains: Chains) -> None:
    one = asked(Api.CHAT, session_id="s", messages=["a"])
    assert chains.session(one, SERVED, "") == "s"
    assert chains.session(one, SERVED, "tenant:") == "tenant:s"


@pytest.mark.parametrize(
    ("api", "name"), [(Api.CHAT, "messages"), (Api.MESSAGES, "messages"), (Api.RESPONSES, "input")]
)
def test_text_leads_on(chains: Chains, api: Api, name: str) -> None:
    def session(
        *messages: str, tenant: str = "", served: Served = SERVED, **more: Any
    ) -> str | None:
        return chains.session(asked(api, **{name: list(messages)}, **more), served, tenant)

    first = session("a")
    assert first is not None
    assert session("a", "b", "c") == first
    assert session("a", "b", "c", "d") == first
    others = [
        session("b"),
        session("a", tenant="t:"),
        session("a", served=Served("m", "adapter")),
        session("a", cache_salt="x"),
        session("a", tools=[1]),
    ]
    assert len({first, *others}) == 6
    assert session() is None


def test_what_has_no_turns_has_no_session(chains: Chains) -> None:
    assert chains.session(asked(Api.COMPLETIONS, prompt="a"), SERVED, "") is None
    assert chains.session(asked(Api.OTHER, input="a"), SERVED, "") is None
    assert chains.session(asked(Api.RESPONSES, input="a"), SERVED, "") is not None


def test_marks_that_move_change_nothing(chains: Chains) -> None:
    history: list[Any] = []
    sessions = set()
    for turn in range(4):
        text = {"type": "text", "text": 'a "cache_control":{}, in \\ a text'}
        last = {"role": "user", "content": [text | MARK]}
        bill = {"type": "text", "text": f"x-anthropic-billing-header: {turn}"}
        system = [bill, {"type": "text", "text": "Be brief."} | MARK]
        one = asked(Api.MESSAGES, system=system, messages=[*history, last])
        sessions.add(chains.session(one, SERVED, ""))
        history += [{"role": "user", "content": [text]}, {"role": "assistant", "content": "b"}]
    assert len(sessions) == 1


@pytest.mark.parametrize(
    "marked",
    [
        {"a": 1} | MARK,
        MARK | {"a": 1},
        {"a": 1} | MARK | {"b": [2, 3]},
        {"a": [1, {"b": 2} | MARK]} | MARK,
        {"cache_control": None, "a": 1},
    ],
)
@pytest.mark.parametrize("style", [{}, {"indent": 1}, {"separators": (",", ":")}])
def test_marks_are_taken_out(marked: dict[str, Any], style: dict[str, Any]) -> None:
    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: bare(each) for name, each in value.items() if name != "cache_control"}
        return [bare(each) for each in value] if isinstance(value, list) else value

    left = lasting(json.dumps([marked], **style).encode())
    assert json.loads(left) == bare([marked])


def test_blocks_for_accounts_are_taken_out() -> None:
    bill = "x-anthropic-billing-header: cc_version=1"
    text = {"type": "text", "text": "Be brief."}
    for span, left in (
        ([{"type": "text", "text": bill}, text], [text]),
        ([{"role": "system", "content": bill}, {"role": "user", "content": bill}],
         [{"role": "user", "content": bill}]),
        ([7, None, bill], [7, None, bill]),
    ):  # fmt: skip
        assert json.loads(lasting(json.dumps(span).encode())) == left
    assert lasting(json.dumps(bill).encode()) == b""
    deep = b"[" * 100_000 + b'"x-anthropic-billing-header"'
    assert lasting(deep) == deep


def test_responses_are_where_they_were_made(chains: Chains, clock: Clock) -> None:
    one = asked(Api.RESPONSES, input="a")
    created = b'event: response.created\ndata: {"response":{"id": "resp_1","object":"response"'
    chains.note_answer(one, 7, created)
    chains.note_answer(one, 8, b'{"id":"resp_2","object":"response","output":[{"id":"resp_x"}]}')
    chains.note_answer(one, 9, b'{"error":{"message":"no"}}')
    chains.note_answer(asked(Api.CHAT, messages=[]), 9, b'{"id":"resp_3"}')
    names = ("resp_1", "resp_2", "resp_3", "resp_x")
    assert [chains.keeper(each) for each in names] == [7, 8, None, None]
    clock.now = RESPONSE_S - 1
    chains.note_answer(one, 8, b'{"id":"resp_2"}')
    clock.now = RESPONSE_S
    assert [chains.keeper(each) for each in names] == [None, 8, None, None]
    assert len(chains.responses) == 1


def test_responses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 100
    monkeypatch.setattr("kvd.gateway.chains.MAX_RESPONSES", bound)
    stats = GatewayStats()
    chains = Chains(stats, Clock())
    one = asked(Api.RESPONSES, input="a")
    for number in range(bound + 3):
        chains.note_answer(one, 1, b'{"id":"resp_%d"}' % number)
    assert (len(chains.responses), stats.responses_forgotten) == (bound, 3)
    assert chains.keeper("resp_2") is None
    assert chains.keeper("resp_3") == 1
