"""The engines behind a gateway: from names, files and calls; whether their events are believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from examples.engine.options import EngineOptions
from tests.support.gateways import (
    Client,
    Running,
    engines,
    gateway_of,
    serving,
    tls_of,
    trusting,
    wait_serving,
)
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.zmtp_fakes import NOT_MY_FAULT_S

Start = Callable[..., Server]
PROMPT = " ".join(f"w{number}" for number in range(100))


async def rows(client: Client) -> dict[str, dict[str, object]]:
    return {row["url"]: row for row in (await client.get("/status")).json["upstreams"]}


async def test_engines_come_and_go_by_calls(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions(), EngineOptions(step_s=0.01)) as (client, found):
        one, other = found
        taken = await client.http.delete(f"/upstreams/{(await rows(client))[one.url]['worker_id']}")
        assert taken.status_code == 404  # it comes from the settings, not a call
        async with engines(EngineOptions()) as (third,):
            added = await client.post("/upstreams", {"url": third.url})
            assert added.status == 201
            assert (await client.post("/upstreams", {"url": third.url})).status == 409
            await wait_serving(client, 3)
            left = await client.http.delete(f"/upstreams/{added.json['worker_id']}")
            assert left.json() == {"url": third.url, "worker_id": added.json["worker_id"]}
            assert third.url not in await rows(client)
            again = await client.http.delete(f"/upstreams/{added.json['worker_id']}")
            assert again.status_code == 404
        assert (await client.chat(PROMPT)).status == 200
        assert other.server.requests + one.server.requests == 1


@pytest.mark.parametrize("behind_tls", [False, True])
async def test_an_engine_that_leaves_ends_what_it_answers(
    kvd_process: Start, certificate: Path, behind_tls: bool
) -> None:
    slow, tls = EngineOptions(step_s=0.01), tls_of(certificate) if behind_tls else None
    async with (
        engines(slow, tls=tls) as (one,),
        gateway_of(kvd_process, [], trusting(certificate)) as client,
    ):
        added = await client.post("/upstreams", {"url": one.url})
        await wait_serving(client, 1)
        body = {"model": "demo", "prompt": [1], "max_tokens": 100, "stream": True}
        received = b""
        async with client.http.stream("POST", "/v1/completions", json=body) as response:
            async for piece in response.aiter_raw():
                if not received:
                    path = f"/upstreams/{added.json['worker_id']}"
                    assert (await client.http.delete(path)).status_code == 200
                    assert (await client.chat(PROMPT)).status == 503  # there is no engine
                received += piece
        assert received.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "body",
    [
        {"url": "http://127.0.0.1:1/v1"},
        {"url": "https://127.0.0.1:1/v1"},
        {"url": "dns:localhost:1"},
        {"url": "http://127.0.0.1:1", "role": "decode"},
        {"url": 7},
        {},
    ],
)
async def test_what_is_no_engine_is_refused(kvd_process: Start, body: object) -> None:
    async with gateway_of(kvd_process, []) as client:
        assert (await client.post("/upstreams", body)).status in (400, 422)
        assert await rows(client) == {}


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_gateway_is_no_engine_of_its_own(
    kvd_process: Start, tmp_path: Path, processes: str
) -> None:
    """Requests would come back to it, each of them several times."""
    fleet = tmp_path / "fleet.toml"
    fleet.touch()
    flags = "--fleet-file", str(fleet), "--processes", processes
    async with engines(EngineOptions()) as (one,), gateway_of(kvd_process, [], flags) as client:
        own = str(client.http.base_url).rstrip("/")
        written = fleet.with_suffix(".new")
        written.write_text(f'[[upstream]]\nurl = "{one.url}"\n[[upstream]]\nurl = "{own}"\n')
        written.rename(fleet)
        await wait_serving(client, 1)
        with trio.fail_after(NOT_MY_FAULT_S):
            while not await leads_back(client, own):  # noqa: ASYNC110
                await trio.sleep(0.02)
        assert (await client.chat(PROMPT)).status == 200
        assert (await rows(client))[own]["standing"] == "unknown"


async def test_a_model_leaves_a_ring_of_gateways_with_its_engine(kvd_process: Start) -> None:
    async with (
        engines(EngineOptions(), EngineOptions(model="other")) as (one, other),
        gateway_of(kvd_process, [other.url]) as first,
    ):
        assert (await first.post("/upstreams", {"url": one.url})).status == 201
        await wait_serving(first, 2)
        async with gateway_of(kvd_process, [url_of(first)]) as second:
            assert (await first.post("/upstreams", {"url": url_of(second)})).status == 201
            with trio.fail_after(NOT_MY_FAULT_S):
                while not await leads_back(first, url_of(second)):  # noqa: ASYNC110
                    await trio.sleep(0.02)
            worker_id = (await rows(first))[one.url]["worker_id"]
            assert (await first.http.delete(f"/upstreams/{worker_id}")).status_code == 200
            listed = (await first.get("/v1/models")).json["data"]
            assert [each["id"] for each in listed] == ["other"]


async def leads_back(client: Client, url: str) -> bool:
    """Returns whether a gateway has found that an engine's models come by way of itself.

    Before the gateway knows a model, such an engine lists none.
    """
    return "from this gateway" in str((await rows(client)).get(url, {}).get("problem"))


def url_of(client: Client) -> str:
    return str(client.http.base_url).rstrip("/")


async def test_gateways_in_front_of_each_other(kvd_process: Start) -> None:
    """A request that no engine answers would go round between them until its client leaves."""
    async with (
        engines(EngineOptions(), EngineOptions()) as (one, other),
        gateway_of(kvd_process, [one.url]) as first,
        gateway_of(kvd_process, [url_of(first)]) as second,
        gateway_of(kvd_process, [url_of(second), other.url]) as third,
    ):
        back = url_of(third)
        assert (await first.post("/upstreams", {"url": back})).status == 201
        await wait_serving(first, 2)
        for number in range(4):  # by whichever way they come
            assert (await third.chat(f"{number} {PROMPT}")).status == 200
        one.end()
        other.end()
        refused = await first.chat(PROMPT)
        assert (refused.status, refused.json["error"]["code"]) == (503, "request_loop")
        spent = 'kvd_gateway_refusals_total{code="request_loop"}'
        assert (await first.metrics())[spent] >= 1
        assert (await second.metrics()).get(spent, 0) == 0


async def test_the_fleet_file_is_followed(kvd_process: Start, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    async with engines(EngineOptions(), EngineOptions()) as (one, other):
        fleet.write_text(f'[[upstream]]\nurl = "{one.url}"\n')
        async with gateway_of(kvd_process, [], ("--fleet-file", str(fleet)), count=1) as client:
            await wait_serving(client, 1)
            renamed = tmp_path / "new.toml"
            renamed.write_text(f'[[upstream]]\nurl = "{other.url}"\n')
            renamed.rename(fleet)

            async def is_other() -> bool:
                return set(await rows(client)) == {other.url}

            with trio.fail_after(60):
                while not await is_other():  # noqa: ASYNC110 - another process
                    await trio.sleep(0.05)
            await wait_serving(client, 1)


async def test_every_address_of_a_name_is_an_engine(kvd_process: Start) -> None:
    async with engines(EngineOptions()) as (one,):
        name = f"dns:localhost:{one.port}"
        async with gateway_of(kvd_process, [name], count=1) as client:
            assert list(await rows(client)) == [one.url]
            status = (await client.get("/status")).json
            assert status["names"] == [{"name": name, "addresses": 1, "problem": None}]
            assert (await client.chat(PROMPT)).status == 200


async def test_a_name_that_means_nothing_is_shown(kvd_process: Start) -> None:
    async with gateway_of(kvd_process, ["dns:no-such-name.invalid:8000"], count=0) as client:
        with trio.fail_after(60):
            while not (await client.get("/status")).json["names"][0]["problem"]:  # noqa: ASYNC110 - another process
                await trio.sleep(0.05)
        assert (await client.chat(PROMPT)).status == 503


# ---- the canary


async def canary(start: Start, *options: EngineOptions) -> dict[str, object]:
    """Returns the first engine's row of /status, once its canary has an outcome."""
    async with serving(start, *options, flags=("--gateway-canary", "true")) as (client, found):
        proven = found[0]
        with trio.fail_after(60):
            while not settled(await rows(client), proven):  # noqa: ASYNC110 - another process
                await trio.sleep(0.05)
        return (await rows(client))[proven.url]


def settled(shown: dict[str, dict[str, object]], engine: Running) -> bool:
    return bool(engine.server.requests) or shown[engine.url]["advice"] is not None


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_an_engine_proves_that_its_events_are_its_own(kvd_process: Start, kind: str) -> None:
    row = await canary(kvd_process, EngineOptions(kind=kind))
    assert row["advice"] is None
    assert row["events"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_an_engine_without_events_is_told_what_to_add(kvd_process: Start, kind: str) -> None:
    row = await canary(kvd_process, EngineOptions(kind=kind, events=False))
    assert "add --kv-events-config '{" in str(row["advice"])
    assert '"replay_endpoint": "tcp://*:5657"' in str(row["advice"])  # else a gap stays
    assert not row["events"]


async def test_events_of_another_engine_are_not_believed(kvd_process: Start) -> None:
    """Each engine announces the address at which the other one publishes."""
    async with engines(EngineOptions(), EngineOptions()) as found:
        one, other = (each.server for each in found)
        one.announced, other.announced = other.announced, one.announced
        flags = ("--gateway-canary", "true")
        async with gateway_of(kvd_process, [each.url for each in found], flags) as client:
            with trio.fail_after(90):
                while any(each["events"] for each in (await rows(client)).values()):  # noqa: ASYNC110 - another process
                    await trio.sleep(0.05)
            for row in (await rows(client)).values():
                assert "tokens and events do not agree" in str(row["advice"])
            answered = await client.chat(PROMPT)
            assert answered.headers["x-kvd-decision"] == "predicted"


@pytest.mark.parametrize("lost", [False, True])
async def test_an_engine_whose_events_do_not_come_serves(kvd_process: Start, lost: bool) -> None:
    """Nothing listens where it says that it publishes, from the start or later."""
    async with engines(EngineOptions()) as (one,):
        publisher = one.server.publisher
        assert publisher is not None
        if not lost:
            one.server.announced = f"tcp://127.0.0.1:{find_free_port()}"
        flags = ("--engine-stale-s", "0.2")  # then kvd finds out why it receives none
        async with gateway_of(kvd_process, [one.url], flags) as client:
            assert (await rows(client))[one.url]["standing"] == "serving"
            if lost:
                await publisher.subscribed()
                one.server.publisher = None
                publisher._socket.close()
            with trio.fail_after(NOT_MY_FAULT_S):
                while (advice := (await rows(client))[one.url]["advice"]) is None:  # noqa: ASYNC110 - another process
                    await trio.sleep(0.05)
            assert "its events are not received" in str(advice)
            assert one.server.announced in str(advice)
            assert (await client.chat(PROMPT)).status == 200


async def test_an_engine_that_serves_another_model_now(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions(), EngineOptions()) as (client, running):
        running[0].server.options.model = "other"
        for number in range(4):
            assert (await client.chat(f"{number}")).status == 200
        assert running[0].server.requests > 0  # it refused one, so its models were asked for anew
        with trio.fail_after(NOT_MY_FAULT_S):
            while (await client.chat("x", model="other")).status != 200:  # noqa: ASYNC110 - another process
                await trio.sleep(0.02)
        answered = await client.chat("x", model="nobody's")
        assert (answered.status, answered.json["error"]["code"]) == (404, "model_not_found")


async def test_a_name_that_two_models_have(kvd_process: Start) -> None:
    """While a name moves from one model to the next, engines of both serve it."""
    old, new = (EngineOptions(model=name, aliases=("best",)) for name in ("old", "new"))
    async with serving(kvd_process, old, new) as (client, running):
        for left in running:
            assert (await client.chat("x", model="best")).status == 200
            left.end()
            assert (await client.chat("x", model="best")).status == 200
            await left.start()
            await wait_serving(client, 2)
        for each in ("old", "new"):
            assert (await client.chat("x", model=each)).status == 200


async def test_a_name_that_some_engines_of_a_model_have(kvd_process: Start) -> None:
    options = EngineOptions(), EngineOptions(aliases=("also",))
    async with serving(kvd_process, *options) as (client, running):
        for number in range(4):
            assert (await client.chat(f"{number}", model="also")).status == 200
        assert [each.server.requests for each in running] == [0, 4]


async def test_a_prompt_goes_where_it_fits(kvd_process: Start) -> None:
    options = EngineOptions(max_model_len=100), EngineOptions(max_model_len=1000)
    async with serving(kvd_process, *options) as (client, running):
        for number in range(4):
            ids = [number * 300 + at for at in range(98)]
            body = {"model": "demo", "prompt": ids, "max_tokens": 3}
            assert (await client.post("/v1/completions", body)).status == 200
        assert [each.server.requests for each in running] == [0, 4]
        ids = list(range(5000, 6001))
        answered = await client.post("/v1/completions", {"model": "demo", "prompt": ids})
        assert (answered.status, answered.json["error"]["type"]) == (400, "BadRequestError")


async def test_before_any_engine_has_said_what_it_serves(kvd_process: Start) -> None:
    for urls in ([f"http://127.0.0.1:{find_free_port()}"], []):
        async with gateway_of(kvd_process, urls, count=0) as client:
            for model in ("demo", None):
                answered = await client.chat("x", model=model)
                assert (answered.status, answered.json["error"]["code"]) == (503, "no_upstream")
                assert answered.headers["retry-after"] == "1"
