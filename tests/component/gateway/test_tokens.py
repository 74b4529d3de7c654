"""Turns whose tokens are fetched in the background, from an engine that may refuse them."""

from __future__ import annotations

import pytest
import trio

from kvd.gateway import tokens as module
from kvd.gateway.exchanges import Exchanges
from kvd.gateway.probing import EngineKind, Facts, ListedModel
from kvd.gateway.requests import Api, read
from kvd.gateway.stats import GatewayStats
from kvd.gateway.tokens import MAX_LATER, Later, Tokens
from kvd.gateway.upstream import Upstream
from kvd.gateway.upstreams import Served
from kvd.wire.urls import parse_url
from kvd_core.ledger.ledger import Ledger
from kvd_core.selector.selector import Pool
from tests.support.relaying import Script, relaying
from tests.support.zmtp_fakes import NOT_MY_FAULT_S, until

URL = "http://127.0.0.1:8000"
TOKENS_ANSWER = b'HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n{"tokens":[1,2,3,4]}'


def answering(*answers: bytes) -> Script:
    """Returns a script that gives these answers to the first questions, and none to later ones."""

    async def script(stream: trio.SocketStream) -> None:
        for answer in answers:
            await stream.receive_some()
            await stream.send_all(answer)
        while await stream.receive_some():
            pass

    return script


def later(engine: int, number: int) -> Later:
    """Returns a turn with one message, which differs for each number."""
    body = b'{"model":"m","messages":[{"role":"user","content":"%d"}]}' % number
    facts = Facts(
        EngineKind.VLLM,
        "",
        (ListedModel("m", None, None, {}),),
        4,
        None,
        range(1),
        {},
        {},
        renders=False,
    )
    upstream = Upstream(URL, parse_url(URL), 1, engine=engine, facts=facts)
    pool = Pool(None, Ledger(), facts.block_size)
    return Later(read(Api.CHAT, [], body), Served("m"), b"", body, pool, [upstream])


def tokens_of(exchanges: Exchanges) -> tuple[Tokens, GatewayStats]:
    stats = GatewayStats()
    return Tokens(exchanges, stats, 1 << 20), stats


async def test_one_turn_is_asked_for_after_the_other() -> None:
    async with relaying(answering(TOKENS_ANSWER, TOKENS_ANSWER, TOKENS_ANSWER)) as (
        exchanges,
        engine,
        _,
    ):
        tokens, stats = tokens_of(exchanges)
        for number in range(3):
            tokens.ask_later(later(engine, number))
        await until(lambda: len(tokens.conversations) == 3)
        assert exchanges.relay.stats()["connected"] == 1
        assert stats.token_source_failures.total() == 0


async def test_what_an_engine_does_not_say_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATER_S", 0.01)
    async with relaying(answering(), answering(TOKENS_ANSWER)) as (exchanges, engine, _):
        tokens, stats = tokens_of(exchanges)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tokens.run)
            tokens.ask_later(later(engine, 1))
            await until(lambda: stats.token_source_failures.total() == 1)
            monkeypatch.setattr(module, "LATER_S", NOT_MY_FAULT_S)
            tokens.ask_later(later(engine, 2))
            await until(lambda: len(tokens.conversations) == 1)
            nursery.cancel_scope.cancel()
        assert len(exchanges.relay) == 0


async def test_an_engine_without_others_is_asked_once() -> None:
    async def hang_up(stream: trio.SocketStream) -> None:
        await stream.receive_some()

    async with relaying(hang_up, hang_up) as (exchanges, engine, _):
        tokens, stats = tokens_of(exchanges)
        turn = later(engine, 1)
        asked = turn.asked, turn.served, turn.basis, turn.body, turn.engines
        assert await tokens.find(*asked) is None
        assert exchanges.relay.stats()["begun"] == 1
        assert stats.token_source_failures.total() == 1


async def test_a_turn_in_the_background_has_as_long_as_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LATER_S", 0.01)

    async def slow(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await trio.sleep(0.1)
        await stream.send_all(TOKENS_ANSWER)

    async with relaying(slow) as (exchanges, engine, _):
        stats = GatewayStats()
        tokens = Tokens(exchanges, stats, 1 << 20, NOT_MY_FAULT_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tokens.run)
            tokens.ask_later(later(engine, 1))
            await until(lambda: len(tokens.conversations) == 1)
            assert stats.token_source_failures.total() == 0
            nursery.cancel_scope.cancel()


async def test_turns_beyond_the_bound_are_not_asked_for() -> None:
    async with relaying(answering()) as (exchanges, engine, _):
        tokens, stats = tokens_of(exchanges)
        for number in range(MAX_LATER + 3):
            tokens.ask_later(later(engine, number))
        assert (stats.not_remembered, len(exchanges.relay)) == (2, 1)
