"""`kvd gateway` in front of prefill and decode engines: which prefills, and what faults cost."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from examples.engine.options import EngineOptions, Fault
from tests.support.gateway_load import BROKEN, CLIENTS, EngineProcess, Load
from tests.support.gateways import (
    Answered,
    Client,
    Running,
    engines,
    gateway_of,
    serving,
    tls_of,
    trusting,
    wait_heard,
    wait_metric,
    wait_serving,
)
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.zmtp_fakes import NOT_MY_FAULT_S, until

Start = Callable[..., Server]
PROMPT = " ".join(f"w{number}" for number in range(100))
TOKENS = 105  # of PROMPT as a chat: 100 words, the role, two marks, two where the answer begins
ANY = ("--gateway-remote-prefill-tokens", "0")
BODY = b'{"model":"demo","max_tokens":4,"stream":true,"prompt":"%b"}' % PROMPT.encode()
VLLM = (EngineOptions(), EngineOptions())
SGLANG = (
    EngineOptions(kind="sglang", mode="prefill"),
    EngineOptions(kind="sglang", mode="prefill"),
    EngineOptions(kind="sglang", mode="decode"),
    EngineOptions(kind="sglang", mode="decode"),
)


# Counted ways, by the status after a failed prefill: SGLang's decode engines compute no prompts.
FALLEN_BACK = {200: {"fallback": 1}, 502: {}}


def fresh(*options: EngineOptions) -> list[EngineOptions]:
    """Returns copies of options, whose faults are their own."""
    return [EngineOptions(kind=each.kind, mode=each.mode) for each in options]


def counts(running: list[Running]) -> list[tuple[int, int, int]]:
    """Returns each engine's numbers of requests, prompts handed over, and prompts taken over."""
    servers = (each.server for each in running)
    return [(one.requests, one.prefilled, one.taken_over) for one in servers]


async def ways(client: Client) -> dict[str, float]:
    """Returns how many requests went each way, and how many prefills failed."""
    metrics = await client.metrics()
    found = {}
    for name, value in metrics.items():
        for family in ("ways", "prefill_failures"):
            if name.startswith(f"kvd_gateway_{family}_total{{"):
                found[name.split('"')[1]] = value
    return found


def used(answered: Answered) -> tuple[int, int]:
    """Returns the tokens of a prompt, and how many of them the engine had cached."""
    usage = answered.json["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


class KeptRequests:
    """Asks the gateway's selection service, on an address of its own, what it has booked."""

    def __init__(self) -> None:
        self.port = find_free_port()
        self.flags = (*ANY, "--selection-bind", f"127.0.0.1:{self.port}")

    async def __call__(self) -> list[tuple[int, int]]:
        """Returns tokens under prefill and blocks in use, of each rank that has any."""
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            fleets = (await http.get(f"http://127.0.0.1:{self.port}/loads")).json()
        rows = [row for fleet in fleets for row in fleet["loads"]]
        booked = [(row["potential_prefill_tokens"], row["potential_decode_blocks"]) for row in rows]
        return sorted(each for each in booked if each != (0, 0))

    async def end(self) -> None:
        """Waits until nothing is booked."""
        with trio.fail_after(NOT_MY_FAULT_S):
            while await self():  # noqa: ASYNC110 - another process
                await trio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_vllm_prefills_in_turn(kvd_process: Start, stream: bool) -> None:
    booked = KeptRequests()
    async with serving(kvd_process, *VLLM, flags=booked.flags, prefills=1) as (client, running):
        prefill, decode = (each.server for each in running)
        answered = await client.chat(PROMPT, stream=stream, min_tokens=2, logprobs=True)
        assert (answered.status, answered.clean) == (200, True)
        assert answered.headers["x-kvd-endpoint"] == running[1].url
        assert answered.headers["x-kvd-prefill"] == running[0].url
        assert counts(running) == [(1, 1, 0), (1, 0, 1)]
        assert (prefill.computed, decode.computed) == (TOKENS, 1)
        assert len(prefill.leases) == 0
        first, second = json.loads(prefill.received[0]), json.loads(decode.received[0])
        assert (first["max_tokens"], first["stream"]) == (1, False)
        assert first.keys().isdisjoint({"min_tokens", "logprobs"})
        assert first["messages"] == second["messages"]
        assert second["kv_transfer_params"].pop("do_remote_prefill")
        assert second["kv_transfer_params"]["not of this version"] == {"é": [None, 1e-07]}
        assert (second["max_tokens"], second["stream"], second["min_tokens"]) == (4, stream, 2)
        assert prefill.heads[0][b"x-request-id"] == decode.heads[0][b"x-request-id"]
        assert await ways(client) == {"remote": 1}
        await booked.end()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "members"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3}),
        ("/v1/messages?beta=true", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 3}),
    ],
)
async def test_prompts_of_each_api_are_handed_over(
    kvd_process: Start, path: str, members: dict[str, Any], stream: bool
) -> None:
    async with serving(kvd_process, *VLLM, flags=ANY, prefills=1) as (client, running):
        body = {"model": "demo", "max_tokens": 3, "stream": stream} | members
        answered = await client.post(path, body)
        assert (answered.status, answered.clean) == (200, True)
        assert answered.headers["x-kvd-prefill"] == running[0].url
        assert b"word2" in answered.body
        assert counts(running) == [(1, 1, 0), (1, 0, 1)]
        assert running[1].server.computed == 1


@pytest.mark.parametrize("options", [VLLM, SGLANG], ids=["vllm", "sglang"])
async def test_pools_behind_tls(
    kvd_process: Start, certificate: Path, options: tuple[EngineOptions, ...]
) -> None:
    """Both engines of a request are behind TLS; a lost prefill engine is counted by its cause."""
    flags = (*ANY, *trusting(certificate))
    one_of_each = fresh(options[0], options[-1])
    prefills = int(options is VLLM)
    async with serving(
        kvd_process, *one_of_each, flags=flags, prefills=prefills, tls=tls_of(certificate)
    ) as (client, running):
        for stream in (False, True):
            answered = await client.chat(PROMPT, stream=stream)
            assert (answered.status, answered.clean) == (200, True)
            assert answered.headers["x-kvd-prefill"] == running[0].url
        assert counts(running) == [(2, 2, 0), (2, 0, 2)]
        running[0].end()
        answered = await client.chat(PROMPT)
        assert answered.status == (200 if options is VLLM else 502)
        assert await ways(client) == {"remote": 2, "unreachable": 1, **FALLEN_BACK[answered.status]}


async def test_what_the_prefill_engine_caches_is_expected_and_reported(kvd_process: Start) -> None:
    flags = (*ANY, "--gateway-memory-bytes", "0")
    four = [EngineOptions() for _ in range(4)]
    async with serving(kvd_process, *four, flags=flags, prefills=2) as (client, running):
        messages, prefills = [PROMPT], set()
        for turn in range(4):
            answered = await client.chat(*messages)
            prefills.add(answered.headers["x-kvd-prefill"])
            assert (int(answered.headers["x-kvd-matched-tokens"]) > 0) == (turn > 0)
            messages.append(f"{PROMPT} {turn}")
            await wait_heard(client, running)
        assert len(prefills) == 1
        assert sum(one[1] for one in counts(running)) == 4
        metrics = await client.metrics()
        matched = metrics["kvd_gateway_matched_tokens_total"]
        assert matched > 0
        for name in ("reported_matched_tokens", "reported_cached_tokens"):
            assert metrics[f"kvd_gateway_{name}_total"] == matched
        # The prompts without their cached parts, and each one's last token where it is answered.
        computed = metrics["kvd_gateway_prompt_tokens_total"] - matched + 4
        assert sum(each.server.computed for each in running) == computed


async def test_short_prompts_and_known_ones_are_computed_where_they_are_answered(
    kvd_process: Start,
) -> None:
    flags = ("--gateway-remote-prefill-tokens", "50", "--gateway-memory-bytes", "0")
    async with serving(kvd_process, *VLLM, flags=flags, prefills=1) as (client, running):
        seen = []
        for messages in ([PROMPT], [PROMPT, "and a few words"], ["short"]):
            answered = await client.chat(*messages)
            seen.append(answered.headers["x-kvd-prefill"])
            await wait_heard(client, running)
        assert seen == [running[0].url, "short", "short"]
        assert counts(running) == [(1, 1, 0), (3, 0, 1)]
        assert await ways(client) == {"remote": 1, "short": 2}


@pytest.mark.parametrize(
    "more",
    [{"n": 2}, {"echo": True}, {"prompt_logprobs": 0}, {"prompt": ["a b", "c d"]}],
)
async def test_what_one_engine_must_compute_and_answer(
    kvd_process: Start, more: dict[str, Any]
) -> None:
    async with serving(kvd_process, *VLLM, flags=ANY, prefills=1) as (client, running):
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 1} | more
        answered = await client.post("/v1/completions", body)
        assert (answered.status, answered.headers["x-kvd-prefill"]) == (200, "unsuited")
        assert counts(running) == [(0, 0, 0), (1, 0, 0)]


async def test_other_requests_go_to_the_engines_that_answer(kvd_process: Start) -> None:
    async with serving(kvd_process, *VLLM, flags=ANY, prefills=1) as (client, running):
        for _ in range(3):
            answered = await client.post("/tokenize", {"model": "demo", "prompt": "a b"})
            assert answered.headers["x-kvd-endpoint"] == running[1].url
            assert "x-kvd-prefill" not in answered.headers


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault.CLOSE, "no_answer"),
        (Fault.AFTER_HEAD, "broken"),
        (Fault.GARBAGE, "malformed"),
        (Fault.REFUSE_429, "429"),
        (Fault.REFUSE_503, "503"),
        (Fault.SHUTS_DOWN, "shutting_down"),
        (Fault.KEEPS_NOTHING, "nothing_handed_over"),
    ],
)
async def test_a_prefill_that_fails_costs_the_client_nothing(
    kvd_process: Start, fault: Fault, cause: str
) -> None:
    booked = KeptRequests()
    async with serving(kvd_process, *fresh(*VLLM), flags=booked.flags, prefills=1) as (
        client,
        running,
    ):
        faults = running[0].server.options.faults
        # A kept connection may close at any time, so the gateway asks the same engine once more.
        faults.extend([fault] * (2 if fault is Fault.CLOSE else 1))
        answered = await client.chat(PROMPT)
        assert (answered.status, answered.headers["x-kvd-prefill"]) == (200, "fallback")
        assert used(answered) == (TOKENS, 0)
        assert running[1].server.requests == 1
        faults.clear()
        assert await ways(client) == {"fallback": 1, cause: 1}
        await wait_serving(client, 2)
        again = await client.chat(f"again {PROMPT}")
        assert again.headers["x-kvd-prefill"] == running[0].url
        await booked.end()


async def test_without_a_prefill_engine_prompts_are_computed_where_they_are_answered(
    kvd_process: Start,
) -> None:
    async with serving(kvd_process, *VLLM, flags=ANY, prefills=1) as (client, running):
        running[0].end()
        for number in range(4):
            answered = await client.chat(f"{number} {PROMPT}")
            assert (answered.status, answered.headers["x-kvd-prefill"]) == (200, "fallback")
        assert counts(running)[1] == (4, 0, 0)
        await running[0].start()
        await wait_serving(client, 2)
        assert (await client.chat(PROMPT)).headers["x-kvd-prefill"] == running[0].url


async def test_a_500_of_the_prefill_is_passed_on(kvd_process: Start) -> None:
    """A prompt that breaks one engine must not be sent to the next."""
    booked = KeptRequests()
    async with serving(kvd_process, *fresh(*VLLM), flags=booked.flags, prefills=1) as (
        client,
        running,
    ):
        running[0].server.options.faults.append(Fault.REFUSE_500)
        answered = await client.chat(PROMPT)
        assert (answered.status, answered.json["error"]["message"]) == (500, "simulated 500")
        assert running[1].server.requests == 0
        await booked.end()


async def meet(client: Client, one: Running, fault: Fault, *, stream: bool = False) -> int:
    """Sends requests until one has met a fault; returns their number. None of them may fail."""
    faults = one.server.options.faults
    # A kept connection may close at any time, so the gateway asks the same engine once more.
    given = 2 if fault is Fault.CLOSE else 1
    faults.extend([fault] * given)
    for number in count(1):
        answered = await client.chat(f"{number} {PROMPT}", stream=stream)
        assert (answered.status, answered.clean) == (200, True)
        assert answered.headers["x-kvd-prefill"].startswith("http://")
        if len(faults) < given:
            break
    faults.clear()
    return number


@pytest.mark.parametrize("fault", [Fault.CLOSE, Fault.AFTER_HEAD, Fault.REFUSE_503])
async def test_a_decode_that_fails_begins_with_the_prefill_again(
    kvd_process: Start, fault: Fault
) -> None:
    three = fresh(*VLLM, VLLM[0])
    async with serving(kvd_process, *three, flags=ANY, prefills=1) as (client, running):
        asked = await meet(client, running[1], fault)
        prefill, *decodes = counts(running)
        assert prefill == (asked + 1, asked + 1, 0)
        # An engine that breaks off has taken the prompt over; one that closes or refuses has not.
        left = 0 if fault is Fault.AFTER_HEAD else 1
        assert sum(one[2] for one in decodes) == asked + 1 - left
        assert len(running[0].server.leases) == left
        assert await ways(client) == {"remote": asked}


async def test_a_decode_that_leaves_during_the_prefill_is_replaced(kvd_process: Start) -> None:
    """The relay knows the engine that comes next by the number of the one that has left."""
    held = trio.Event()
    async with (
        engines(*[EngineOptions() for _ in range(3)]) as (prefill, first, second),
        gateway_of(kvd_process, [], ("--prefill", prefill.url, *ANY), 1) as client,
        trio.open_nursery() as nursery,
    ):
        added = await client.post("/upstreams", {"url": first.url})
        await wait_serving(client, 2)

        async def hold(task_status: trio.TaskStatus[None]) -> None:
            async with prefill.server.computing:
                task_status.started()
                await held.wait()

        async def ask() -> None:
            answered = await client.chat(PROMPT)
            assert answered.status == 200
            assert answered.headers["x-kvd-endpoint"] == second.url

        await nursery.start(hold)
        nursery.start_soon(ask)
        await until(lambda: prefill.server.requests == 1)
        await client.http.delete(f"/upstreams/{added.json['worker_id']}")
        await wait_metric(client, "dynamo_kvindexer_workers", 1)
        await client.post("/upstreams", {"url": second.url})
        await wait_serving(client, 2)
        held.set()


@pytest.mark.parametrize("breaks", [False, True])
async def test_what_cannot_be_taken_over_is_computed_by_the_same_engine(
    kvd_process: Start, breaks: bool
) -> None:
    """A prompt that breaks the engine that answers must not be sent to the next."""
    booked = KeptRequests()
    three = fresh(*VLLM, VLLM[0])
    async with serving(kvd_process, *three, flags=booked.flags, prefills=1) as (client, running):
        running[0].server.options.faults.append(Fault.FORGETS)
        for each in running[1:] if breaks else ():
            each.server.options.faults.extend([Fault.REFUSE_500] * 2)
        answered = await client.chat(PROMPT)
        assert answered.status == (500 if breaks else 200)
        assert answered.headers["x-kvd-prefill"] == "fallback"
        assert sorted(one[0] for one in counts(running)[1:]) == [0, 2]
        assert await ways(client) == {"fallback": 1, "not_taken_over": 1}
        await booked.end()


async def leave(client: Client, entered: Callable[[], bool]) -> None:
    """Sends a request, and leaves once `entered` is true."""
    stream = await trio.open_tcp_stream("127.0.0.1", client.http.base_url.port)
    async with stream:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        await stream.send_all(head % len(BODY) + BODY)
        await until(entered)


async def test_a_client_that_leaves_aborts_the_prefill(kvd_process: Start) -> None:
    booked = KeptRequests()
    slow = EngineOptions(prefill_s=0.5), EngineOptions()
    async with serving(kvd_process, *slow, flags=booked.flags, prefills=1) as (client, running):
        prefill = running[0].server
        await leave(client, lambda: prefill.requests == 1)
        await until(lambda: prefill.aborted == 1)
        assert running[1].server.requests == 0
        await booked.end()
        assert (await client.metrics())[
            'kvd_gateway_relayed_requests_total{outcome="client_gone"}'
        ] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_sglang_works_at_once(kvd_process: Start, stream: bool) -> None:
    booked = KeptRequests()
    async with serving(kvd_process, *fresh(*SGLANG), flags=booked.flags) as (client, running):
        for number in range(6):
            answered = await client.chat(f"{number} {PROMPT}", stream=stream)
            assert (answered.status, answered.clean) == (200, True)
            assert answered.headers["x-kvd-endpoint"] in [each.url for each in running[2:]]
            assert answered.headers["x-kvd-prefill"] in [each.url for each in running[:2]]
        seen = counts(running)
        assert [sum(one[at] for one in seen[:2]) for at in range(3)] == [6, 6, 0]
        assert [sum(one[at] for one in seen[2:]) for at in range(3)] == [6, 0, 6]
        assert sum(each.server.aborted for each in running) == 0
        rooms = set()
        for each in running[:2]:
            rooms |= {json.loads(body)["bootstrap_room"] for body in each.server.received}
            heads = each.server.heads
            assert all(b"x-data-parallel-rank" not in head for head in heads)
        assert len(rooms) == 6
        assert await ways(client) == {"remote": 6}
        await booked.end()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [Fault.CLOSE, Fault.AFTER_HEAD, Fault.REFUSE_503])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_pair_of_sglang_is_tried_anew(
    kvd_process: Start, side: str, fault: Fault, stream: bool
) -> None:
    async with serving(kvd_process, *fresh(*SGLANG)) as (client, running):
        asked = await meet(client, running[0 if side == "prefill" else 2], fault, stream=stream)
        seen = counts(running)
        # An engine that breaks off has taken the prompt over, or handed it over.
        broke = fault is Fault.AFTER_HEAD
        assert sum(one[2] for one in seen) == asked + (broke and side == "decode")
        assert sum(one[0] for one in seen[2:]) >= asked + (not broke or side == "decode")
        assert (await ways(client))["remote"] == asked


@pytest.mark.parametrize("dies", [0, 2])
async def test_an_engine_of_a_pair_dies_at_work(kvd_process: Start, dies: int) -> None:
    """The other engine of the pair then answers with an error, which no client may see."""
    booked = KeptRequests()
    options = fresh(*SGLANG)
    for each in options[:2]:
        each.prefill_s = 0.002
    async with serving(kvd_process, *options, flags=booked.flags) as (client, running):
        answers: list[Answered] = []

        async def ask(number: int) -> None:
            answers.append(await client.chat(f"{number} {PROMPT}"))

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(ask, number)
            await until(lambda: running[dies].server.requests > 0)
            running[dies].end()
        assert [answered.status for answered in answers] == [200] * 4
        await booked.end()


@asynccontextmanager
async def killable(
    start: Start, folder: Path, kind: str
) -> AsyncIterator[tuple[Client, list[EngineProcess]]]:
    """Yields a client of a gateway, and two engines that prefill and two that decode."""
    with ExitStack() as stack:
        engines = []
        for mode in ("prefill", "prefill", "decode", "decode"):
            options = ("--mode", mode) if kind == "sglang" else ()
            engines.append(EngineProcess(folder, "--kind", kind, *options))
            stack.callback(engines[-1].end)
        prefills = engines[:2] if kind == "vllm" else []
        flags = [*ANY, *(part for each in prefills for part in ("--prefill", each.url))]
        upstreams = [each.url for each in engines[len(prefills) :]]
        async with gateway_of(start, upstreams, flags, len(engines)) as client:
            yield client, engines


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_engines_of_a_pool_are_killed_under_load(
    kvd_process: Start, tmp_path: Path, kind: str, side: str
) -> None:
    """Only streams that have begun are cut, and only if the engine that answers is killed."""
    async with killable(kvd_process, tmp_path, kind) as (client, engines):
        load = Load(client)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            await load.until(20)
            one, other = engines[:2] if side == "prefill" else engines[2:]
            one.end()
            await load.until(60)
            await trio.to_thread.run_sync(one.start)
            await wait_serving(client, 4)
            at = load.answered
            other.end()
            await load.until(at + 40)
            load.end()
        if side == "prefill":
            assert load.outcomes.keys() == {"whole"}
        else:
            assert load.outcomes.keys() <= {"whole", "cut"}
        assert load.outcomes["cut"] <= 2 * CLIENTS
        assert (await client.metrics()).get(BROKEN, 0) == load.outcomes["cut"]


async def test_sglang_has_no_other_way(kvd_process: Start) -> None:
    async with serving(kvd_process, *fresh(*SGLANG)) as (client, running):
        for each in running[:2]:
            each.end()
        answered = await client.chat(PROMPT)
        assert (answered.status, answered.json["error"]["code"]) in [
            (502, "upstream_failed"),
            (503, "no_upstream"),
        ]
        await wait_serving(client, 2)
        answered = await client.chat(PROMPT)
        assert (answered.status, answered.headers["retry-after"]) == (503, "1")
        assert "needs both" in answered.json["error"]["message"]


async def test_a_pair_that_is_too_busy_says_so(kvd_process: Start) -> None:
    one, _, two, _ = fresh(*SGLANG)
    async with serving(kvd_process, one, two) as (client, running):
        running[0].server.options.faults.append(Fault.REFUSE_503)
        answered = await client.chat(PROMPT)
        assert (answered.status, answered.headers["retry-after"]) == (503, "1")
        assert answered.json["error"]["message"] == "simulated 503"
        assert (await client.chat(PROMPT)).status == 200


async def test_a_client_that_leaves_aborts_both_of_a_pair(kvd_process: Start) -> None:
    booked = KeptRequests()
    options = fresh(*SGLANG)
    for each in options[:2]:
        each.prefill_s = 0.5
    async with serving(kvd_process, *options, flags=booked.flags) as (client, running):
        await leave(client, lambda: sum(each.server.requests for each in running) == 2)
        await until(lambda: sum(each.server.aborted for each in running[:2]) == 1)
        await booked.end()


async def test_a_client_that_leaves_before_it_is_known_which_of_a_pair_failed(
    kvd_process: Start,
) -> None:
    slow = EngineOptions(kind="sglang", mode="prefill", prefill_s=0.5)
    decode = EngineOptions(kind="sglang", mode="decode", faults=deque([Fault.REFUSE_500]))
    async with serving(kvd_process, slow, decode, flags=ANY) as (client, running):
        stream = await trio.open_tcp_stream("127.0.0.1", client.http.base_url.port or 0)
        async with stream:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            await stream.send_all(head % len(BODY) + BODY)
            await until(lambda: running[1].server.requests == 1)
            await client.metrics()  # the answer has come by then, and waits for the other engine's
        gone = 'kvd_gateway_relayed_requests_total{outcome="client_gone"}'
        await wait_metric(client, "kvd_gateway_running_requests", 0)
        metrics = await client.metrics()
        assert (metrics["kvd_http_bugs_total"], metrics.get(gone)) == (0, 1)


async def test_clients_do_not_hand_over(kvd_process: Start) -> None:
    async with serving(kvd_process, *VLLM, flags=ANY, prefills=1) as (client, running):
        answered = await client.chat(PROMPT, kv_transfer_params={"do_remote_prefill": True})
        assert (answered.status, answered.json["error"]["code"]) == (400, "forbidden_parameter")
        answered = await client.chat(PROMPT, kv_transfer_params=None)
        assert (answered.status, answered.headers["x-kvd-prefill"]) == (200, running[0].url)


async def test_engines_that_cannot_prefill_for_others(kvd_process: Start) -> None:
    async with serving(
        kvd_process,
        EngineOptions(kind="sglang", events=False),
        EngineOptions(),
        prefills=1,
        unusable=1,
    ) as (client, running):
        why = (
            "the engine's disaggregation_mode is null, not prefill: "
            "start it with --disaggregation-mode prefill"
        )
        shown = None
        with trio.fail_after(NOT_MY_FAULT_S):
            while shown != ("prefill", why):
                rows = (await client.get("/status")).json["upstreams"]
                row = next(row for row in rows if row["url"] == running[0].url)
                shown = row["role"], row["problem"]
        assert (await client.chat(PROMPT)).headers["x-kvd-prefill"] == "fallback"
