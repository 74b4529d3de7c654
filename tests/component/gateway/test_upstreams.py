"""What the gateway knows of an engine changes with its answers, not with passing faults."""

from __future__ import annotations

import json
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
import trio
import trio.testing

from examples.engine.options import EngineOptions, Fault
from kvd.gateway.choices import Placement, Question
from kvd.gateway.dns_names import Wanted
from kvd.gateway.exchanges import RelayLimits
from kvd.gateway.following import MAX_FAILURES
from kvd.gateway.probing import EngineKind
from kvd.gateway.upstream import Upstream, UpstreamState
from kvd.gateway.upstreams import SETTINGS, Served
from kvd.selection.worker_record import WorkerRecord
from kvd_core.relay.relay import ExchangeOutcome
from tests.support.gateways import CHAT, Running, engines, scripted_engine
from tests.support.inner_gateways import InnerGateway, inner_gateway
from tests.support.relaying import Script
from tests.support.resolving import Names
from tests.support.serving import Client
from tests.support.zmtp_fakes import NOT_MY_FAULT_S, until

VLLM: dict[str, object] = {
    "/health": {},
    "/version": {"version": "0.33.0"},
    "/v1/models": {"data": [{"id": "demo"}]},
    "/metrics": 'vllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1\n',
}
RESPONSES = "/v1/responses"
BODY = b'{"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "%b"}]}'


class Answering:
    """An engine whose answers about itself a test changes: by path, 404 for others."""

    def __init__(self) -> None:
        self.answers = dict(VLLM)
        self.failing: set[str] = set()  # paths answered with 503
        self.silent: set[str] = set()  # paths that are not answered
        self.streams: set[str] = set()  # paths answered by a stream of events

    async def serve(self, stream: trio.SocketStream) -> None:
        # A question that is given up resets its connection, perhaps before the answer is sent.
        with suppress(trio.BrokenResourceError):
            await self._answer(stream)

    async def _answer(self, stream: trio.SocketStream) -> None:
        async with stream:
            data = b""
            while piece := await stream.receive_some():
                data += bytes(piece)
                head, end, _ = data.partition(b"\r\n\r\n")
                if not end:
                    continue
                data = b""
                path = head.split(b" ")[1].decode()
                if path in self.silent:
                    await trio.sleep_forever()
                answer = self.answers.get(path)
                status = 503 if path in self.failing else 200 if path in self.answers else 404
                body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                body = body if status == 200 else b""
                kind = b"text/event-stream" if path in self.streams else b"application/json"
                lines = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
                await stream.send_all(lines % (status, kind, len(body)) + body)


@asynccontextmanager
async def answering() -> AsyncIterator[tuple[Answering, str]]:
    """Yields an engine and its URL."""
    engine = Answering()
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, engine.serve, listeners)
        yield engine, f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Answering, Upstream]]:
    """Yields an engine, and what the gateway in front of it knows of it."""
    async with answering() as (engine, url), inner_gateway(Wanted(url)) as inner:
        await inner.until_serving(url)
        (upstream,) = inner.upstreams
        yield engine, upstream


async def ask(upstream: Upstream) -> None:
    """Has an engine asked what it is, and waits until it was."""
    before = upstream.asked_at
    upstream.ask_at = before
    upstream.failed.set()
    await until(lambda: upstream.asked_at != before and upstream.ask_at > upstream.asked_at)
    await until(lambda: upstream.failed.statistics().tasks_waiting)


async def test_each_address_of_a_name_is_tried() -> None:
    names = Names()
    trio.socket.set_custom_hostname_resolver(names)
    names.known["engine.test"] = ["127.0.0.9", "127.0.0.1"]
    async with answering() as (_, url):
        named = url.replace("127.0.0.1", "engine.test")
        async with inner_gateway(Wanted(named)) as inner:
            await inner.until_serving(named)


async def test_a_stored_response_may_have_no_further_events() -> None:
    async with answering() as (engine, url), inner_gateway(Wanted(url)) as inner:
        await inner.until_serving(url)
        path = f"{RESPONSES}/r?stream=true&starting_after=9"
        engine.answers[path] = ""
        engine.streams.add(path)
        async with inner.running.client() as client:
            reply = await client.request("GET", path)
            assert (reply.status, reply.body) == (200, b"")
        assert inner.serving() == {url}


async def test_an_engine_with_two_urls_counts_once() -> None:
    names = Names()
    trio.socket.set_custom_hostname_resolver(names)
    names.known["engine.test"] = ["127.0.0.1"]
    async with answering() as (engine, url), answering() as (other, other_url):
        for each in (engine, other):  # started at once, but at addresses of their own
            each.answers["/metrics"] = f"{VLLM['/metrics']}process_start_time_seconds 1.7e+09\n"
        urls = url, url.replace("127.0.0.1", "engine.test")
        async with inner_gateway(*map(Wanted, urls), Wanted(other_url)) as inner:
            await inner.upstreams.all_met()
            [used] = inner.serving() - {other_url}
            [twin] = [each for each in inner.upstreams if each.url not in inner.serving()]
            assert twin.problem == f"it is the same engine as {used}, and would count twice"
            assert inner.upstreams.all_known()
            inner.upstreams.unwant(Wanted(used), SETTINGS)
            await inner.until_serving(twin.url, other_url)


@pytest.mark.parametrize("path", ["/version", "/metrics"])
async def test_what_an_engine_cannot_say_for_a_while_is_as_before(path: str) -> None:
    async with watched() as (engine, upstream):
        before = upstream.facts
        assert before is not None
        assert (before.kind, before.block_size) == (EngineKind.VLLM, 32)
        engine.failing = {path}
        for _ in range(MAX_FAILURES):
            await ask(upstream)
            assert upstream.facts is before
        engine.failing.clear()
        await ask(upstream)
        assert upstream.facts == before
        engine.failing = {path}
        for _ in range(MAX_FAILURES + 1):
            await ask(upstream)
        assert upstream.facts.block_size == 16
        engine.answers["/v1/models"] = {"data": [{"id": "demo"}, {"id": "new", "parent": "demo"}]}
        await ask(upstream)  # what it never says does not keep the rest from being believed
        assert upstream.facts.names == ["demo", "new"]
        assert upstream.state is UpstreamState.SERVING


async def test_of_an_engine_that_cannot_be_chosen_is_known_what_it_serves_now() -> None:
    async with (
        answering() as (_, first),
        answering() as (engine, url),
        inner_gateway(Wanted(first), Wanted(url)) as inner,
    ):
        engine.answers["/v1/models"] = {"data": [{"id": "before"}]}
        await inner.until_serving(first, url)
        upstream = next(each for each in inner.upstreams if each.url == url)
        engine.answers["/v1/models"] = VLLM["/v1/models"]
        engine.answers["/metrics"] = 'vllm:cache_config_info{block_size="64"} 1\n'
        await ask(upstream)
        assert upstream.state is UpstreamState.OUT
        assert upstream.problem == "block_size 64 differs from 32 of its model"
        assert upstream.facts is not None
        assert (upstream.facts.names, upstream.facts.block_size) == (["demo"], 64)
        async with inner.running.client() as client:
            reply = await client.request("POST", CHAT, BODY.replace(b"demo", b"before") % b"a")
        assert reply.status == 404
        assert inner.serving() == {first}


async def test_an_engine_that_was_refused_at_once_has_said_what_it_serves() -> None:
    async with answering() as (one, first), answering() as (_, second):
        one.answers["/metrics"] = 'vllm:cache_config_info{block_size="64"} 1\n'
        async with inner_gateway(Wanted(first), Wanted(second)) as inner:
            await until(lambda: any(each.problem for each in inner.upstreams))
            await until(lambda: len(inner.serving()) == 1)
            async with inner.running.client() as client:
                reply = await client.request("POST", CHAT, BODY.replace(b"demo", b"none") % b"a")
            assert reply.status == 404


async def test_an_engine_too_busy_to_say_what_it_is_has_as_long_as_for_its_health(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with watched() as (engine, upstream):
        monkeypatch.setattr("kvd.gateway.probing.PROBE_S", 0.01)
        monkeypatch.setattr("kvd.gateway.following.HEALTH_S", 0.01)
        engine.silent = {"/version"}
        upstream.ask_at = 0.0
        upstream.failed.set()
        await until(lambda: upstream.failures == MAX_FAILURES - 1)
        assert upstream.state is UpstreamState.SERVING
        assert upstream.problem == "/version has not answered within 0.01 s"
        await until(lambda: upstream.state is UpstreamState.OUT)
        engine.silent.clear()
        await until(lambda: upstream.state is UpstreamState.SERVING)


async def test_no_engine_is_out_for_want_of_a_descriptor() -> None:
    options, limits = EngineOptions(events=False), RelayLimits(idle_s=0.0)
    async with (
        engines(options) as (engine,),
        inner_gateway(Wanted(engine.url), limits=limits) as inner,
    ):
        await inner.until_serving(engine.url)
        (upstream,) = inner.upstreams
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            for _ in range(MAX_FAILURES):
                await inner.upstreams._follower._check(upstream)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (upstream.state, upstream.problem) == (UpstreamState.SERVING, None)


async def test_no_engine_is_out_for_a_prompt_of_too_many_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.gateway.tokens.TOKENS_BYTES", 10)
    options = EngineOptions(events=False)
    async with engines(options) as (engine,), inner_gateway(Wanted(engine.url)) as inner:
        await inner.until_serving(engine.url)
        async with inner.running.client() as client:
            reply = await client.request("POST", CHAT, BODY % (b"word " * 40_000))
        assert reply.status == 200
        assert reply.headers["x-kvd-tokens"] == "none"
        assert inner.serving() == {engine.url}


async def test_engines_in_doubt_serve_while_no_other_does() -> None:
    """A request that no engine answers puts all of them out, though they are well."""
    options = EngineOptions(events=False), EngineOptions(events=False)
    async with (
        engines(*options) as running,
        inner_gateway(*(Wanted(each.url) for each in running)) as inner,
    ):
        urls = [each.url for each in running]
        await inner.until_serving(*urls)
        upstreams, demo = inner.upstreams, Served("demo")
        first, second = upstreams
        first.note_gone("it has closed the connection", ExchangeOutcome.NO_ANSWER)
        assert upstreams.serving(demo) == (second,)
        second.note_gone("it broke off an answer", ExchangeOutcome.BROKEN)
        assert upstreams.serving(demo) == (first, second)
        await inner.until_serving(*urls)
        for each in running:
            each.end()
        first.note_gone("it has closed the connection", ExchangeOutcome.NO_ANSWER)
        second.note_gone("nothing accepts connections there", ExchangeOutcome.UNREACHABLE)
        assert upstreams.serving(demo) == (first,)
        await until(lambda: not upstreams.serving(demo))  # it has been asked for its health


async def test_no_prefill_engine_stands_in_for_engines_in_doubt() -> None:
    options = EngineOptions(events=False), EngineOptions(events=False)
    async with (
        engines(*options) as (one, other),
        inner_gateway(Wanted(one.url, prefills=True), Wanted(other.url)) as inner,
    ):
        await inner.until_serving(one.url, other.url)
        prefill, decode = inner.upstreams
        for gone in (decode, prefill):
            gone.note_gone("it has closed the connection", ExchangeOutcome.NO_ANSWER)
            assert set(inner.upstreams.serving(Served("demo"))) == {prefill, decode}
            await inner.until_serving(one.url, other.url)


async def close(stream: trio.SocketStream) -> None:
    """Closes the connection of a request."""


async def answer_otherwise(stream: trio.SocketStream) -> None:
    await stream.send_all(b"220 ready\r\n\r\n")


@pytest.mark.parametrize("script", [close, answer_otherwise])
async def test_an_engine_that_does_not_answer_a_request_is_in_doubt(script: Script) -> None:
    async with (
        scripted_engine(script) as url,
        inner_gateway(Wanted(url)) as inner,
        inner.running.client() as client,
    ):
        await inner.until_serving(url)
        (upstream,) = inner.upstreams
        changed, seen = upstream.changed, list[tuple[UpstreamState, bool]]()

        def note() -> None:
            seen.append((upstream.state, upstream.in_doubt))
            changed()

        upstream.changed = note
        reply = await client.request("POST", CHAT, BODY % b"a")
        assert reply.status == 502
        assert seen[0] == (UpstreamState.OUT, True)


@asynccontextmanager
async def two_serving() -> AsyncIterator[tuple[list[Running], InnerGateway, Client]]:
    """Runs a gateway in front of two engines without events, which serve."""
    options = EngineOptions(events=False), EngineOptions(events=False)
    async with (
        engines(*options) as running,
        inner_gateway(*(Wanted(each.url) for each in running)) as inner,
        inner.running.client() as client,
    ):
        await inner.until_serving(*(each.url for each in running))
        yield running, inner, client


async def test_an_engine_that_shuts_down_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its health checks succeed until it ends."""
    monkeypatch.setattr("kvd.gateway.following.HEALTH_S", NOT_MY_FAULT_S)
    async with two_serving() as (running, inner, client):
        ends, stays = running
        ends.server.options.faults.extend([Fault.SHUTS_DOWN] * 2)
        (upstream,) = [one for one in inner.upstreams if one.url == ends.url]
        while upstream.state is UpstreamState.SERVING:
            reply = await client.request("POST", CHAT, BODY % b"a")
            assert (reply.status, reply.headers["x-kvd-endpoint"]) == (200, stays.url)
        assert ends.server.requests == 1
        for _ in range(4):
            assert (await client.request("POST", CHAT, BODY % b"a")).status == 200
        assert ends.server.requests == 1
        # It is used all the same if it is the only one.
        upstreams = [one for one in inner.upstreams if one is not upstream]
        for other in upstreams:
            inner.upstreams.unwant(Wanted(other.url), SETTINGS)
        reply = await client.request("POST", CHAT, BODY % b"a")
        assert (reply.status, ends.server.requests) == (500, 2)
        assert b"cannot schedule" in reply.body
        upstream.failed.set()  # as if its next health check were due
        await inner.until_serving(ends.url)


async def test_an_error_that_repeats_a_prompt_is_none_of_an_engine_that_shuts_down() -> None:
    echoed = {"message": "cannot schedule new futures after shutdown"}
    message = f"the template cannot render {json.dumps(echoed)}"
    body = json.dumps({"error": {"message": message, "code": 500}}).encode()

    async def fail(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 500 X\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async with (
        scripted_engine(fail) as url,
        inner_gateway(Wanted(url)) as inner,
        inner.running.client() as client,
    ):
        await inner.until_serving(url)
        reply = await client.request("POST", CHAT, BODY % b"a")
        assert (reply.status, reply.body) == (500, body)
        assert inner.serving() == {url}


async def test_a_stream_that_is_given_up_before_its_first_token_is_tried_elsewhere() -> None:
    asked = 0

    async def give_up(stream: trio.SocketStream) -> None:
        nonlocal asked
        asked += 1
        await stream.send_all(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
            b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        )
        await trio.testing.wait_all_tasks_blocked()
        await stream.send_all(
            b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n'
        )

    body = BODY.replace(b"{", b'{"stream": true, ', 1) % b"a"
    options = EngineOptions(events=False)
    async with (
        scripted_engine(give_up) as url,
        engines(options) as (engine,),
        inner_gateway(Wanted(url), Wanted(engine.url)) as inner,
        inner.running.client() as client,
    ):
        await inner.until_serving(url, engine.url)
        while not asked:
            reply = await client.request("POST", CHAT, body)
            assert (reply.status, reply.headers["x-kvd-endpoint"]) == (200, engine.url)
        assert inner.serving() == {url, engine.url}
        inner.upstreams.unwant(Wanted(engine.url), SETTINGS)
        assert (await client.request("POST", CHAT, body)).status == 502


async def test_an_engine_in_doubt_is_asked_for_the_responses_that_it_keeps() -> None:
    """Another engine, which is well, does not have them."""
    async with two_serving() as (_, inner, client):
        question = {"model": "demo", "input": "a", "max_output_tokens": 1}
        first = await client.request("POST", RESPONSES, json.dumps(question).encode())
        name, url = json.loads(first.body)["id"], first.headers["x-kvd-endpoint"]
        (keeper,) = [one for one in inner.upstreams if one.url == url]
        inner.choices.register = never  # type: ignore[method-assign]
        keeper.note_gone("it has closed the connection", ExchangeOutcome.NO_ANSWER)
        question["previous_response_id"] = name
        second = await client.request("POST", RESPONSES, json.dumps(question).encode())
        assert (second.status, second.headers.get("x-kvd-endpoint")) == (200, url)
        assert (await client.request("GET", f"{RESPONSES}/{name}")).status == 200
        assert keeper.state is UpstreamState.OUT


async def test_the_only_engine_is_asked_for_responses_that_the_gateway_does_not_know() -> None:
    """As after a restart of the gateway."""
    async with two_serving() as (running, inner, client):
        url = running[0].url
        question = json.dumps({"model": "demo", "input": "a", "max_output_tokens": 1}).encode()
        async with httpx.AsyncClient(base_url=url, trust_env=False) as direct:
            name = (await direct.post(RESPONSES, content=question)).json()["id"]
        assert (await client.request("GET", f"{RESPONSES}/{name}")).status == 404
        inner.upstreams.unwant(Wanted(running[1].url), SETTINGS)
        reply = await client.request("GET", f"{RESPONSES}/{name}")
        assert (reply.status, json.loads(reply.body)["id"]) == (200, name)
        reply = await client.request("GET", f"{RESPONSES}/resp_other")
        assert (reply.status, reply.headers.get("x-kvd-endpoint")) == (404, url)
        passed = inner.upstreams.gateway_id.decode()
        reply = await client.request("GET", f"{RESPONSES}/{name}", x_kvd_gateway=passed)
        assert (reply.status, reply.headers["x-kvd-error"]) == (503, "request_loop")


async def never(record: WorkerRecord) -> list[str]:
    """Registers no worker, so that its engine stays in doubt."""
    await trio.sleep_forever()
    return []


@pytest.mark.parametrize("returns", [False, True])
async def test_an_engine_that_leaves_as_it_is_chosen_costs_nothing(returns: bool) -> None:
    """It may also be wanted again at once, and has not said yet what it is."""
    async with two_serving() as (running, inner, client):
        left = await leaving(inner, returns)
        reply = await client.request("POST", CHAT, BODY % b"a")
        (url,) = left
        assert reply.status == 200, reply.body
        assert reply.headers["x-kvd-endpoint"] in {each.url for each in running} - {url}
        assert not inner.selections.reservations.owner_of


async def leaving(inner: InnerGateway, returns: bool) -> list[str]:
    """Has the next engine leave that is chosen; returns the list that its URL will be in."""
    choose, left = inner.choices.choose, list[str]()

    async def chosen(question: Question) -> Placement:
        placement = await choose(question)
        if not left:
            url = inner.upstreams.each[placement.worker_id].url
            left.append(url)
            inner.upstreams.unwant(Wanted(url), SETTINGS)
            if returns:
                inner.upstreams.want(Wanted(url), SETTINGS)
        return placement

    inner.choices.choose = chosen  # type: ignore[method-assign]
    return left
