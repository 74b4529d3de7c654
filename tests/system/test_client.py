"""kvd.client in front of a running kvd: both clients, over TCP, TLS and a Unix socket."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from examples.engine.options import EngineOptions
from kvd.client import (
    AsyncClient,
    Choice,
    Client,
    ClientError,
    Refused,
    Unauthorised,
    Unreachable,
    WrongAnswer,
    clients,
    local_hashes,
    sequence_hashes,
)
from kvd.client.connecting import MAX_CONNECTIONS
from tests.support.asking import Faces, make_client_certificates, serving_faces
from tests.support.dropping import Dropping, dropping
from tests.support.engines import BLOCK_SIZE, Engine
from tests.support.gateways import engines
from tests.support.ports import find_free_port
from tests.support.running import running_kvd

TOKEN = "everything-0123456789"
READER = "reader-0123456789"
TEST_SECONDS = 60
TOKENS = list(range(1, 18))  # four full blocks and one token
RESERVING = b"POST /select_and_reserve "
_tokens = count(100)
NAMES = {"indexer": "indexer", "slot-tracker": "slot_tracker"}
NAMES |= {"selection": "selection", "conductor": "conductor"}


class Either:
    """One of the two clients, in a test on trio; the blocking client is called in threads."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client
        self.stats = client.stats

    async def ask(self, make: Callable[[Any], Any]) -> Any:
        """Makes a call: `ask(lambda kvd: kvd.indexer.peers())`."""
        if isinstance(self.client, Client):
            return await trio.to_thread.run_sync(make, self.client)
        return await make(self.client)

    @asynccontextmanager
    async def reserve(self, **wish: Any) -> AsyncIterator[Choice[Any]]:
        if isinstance(self.client, AsyncClient):
            async with self.client.reserve(**wish) as choice:
                yield choice
            return
        with trio.CancelScope(shield=True):
            stack = await trio.to_thread.run_sync(ExitStack)
            block = self.client.reserve(**wish)
            entered = await trio.to_thread.run_sync(stack.enter_context, block)
        error: BaseException | None = None
        try:
            yield entered
        except BaseException as raised:
            error = raised
            raise
        finally:
            with trio.CancelScope(shield=True):
                ended = (type(error), error, None) if error else (None, None, None)
                leave = stack.pop_all().__exit__
                try:
                    await trio.to_thread.run_sync(leave, *ended)
                except BaseException as raised:
                    assert raised is error


Make = Callable[..., AbstractAsyncContextManager[Either]]


@pytest.fixture(params=["blocking", "trio"])
def making(request: pytest.FixtureRequest) -> Make:
    """A function that makes one of the two clients."""

    @asynccontextmanager
    async def make(**options: Any) -> AsyncIterator[Either]:
        with trio.fail_after(TEST_SECONDS):
            if request.param == "trio":
                async with AsyncClient(**options) as client:
                    yield Either(client)
            else:
                with Client(**options) as client:
                    yield Either(client)

    return make


@pytest.fixture(scope="module")
def kvd(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Faces]:
    """A kvd with every face, which asks for tokens."""
    folder = tmp_path_factory.mktemp("client")
    tokens = folder / "tokens"
    tokens.write_text(f"all read,lifecycle,admin {TOKEN}\nreader read {READER}\n")
    with serving_faces(folder, certificate, f'tokens_file = "{tokens}"') as faces:
        yield faces


@pytest.fixture(scope="module")
def open_kvd(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Faces]:
    """A kvd with every face and without tokens, and a worker of each of two models."""
    folder = tmp_path_factory.mktemp("open")
    busy = "router_queue_threshold = 1.0"
    with serving_faces(folder, certificate, busy) as faces, Client(**addresses(faces)) as client:
        for name in ("m", "busy"):
            client.selection.put_worker(
                1 if name == "m" else 2,
                model_name=name,
                endpoint="http://127.0.0.1:8000",
                block_size=BLOCK_SIZE,
                without_kv_events=True,
                max_num_batched_tokens=16 if name == "busy" else None,
            )
        yield faces


def addresses(faces: Faces, kind: str = "tcp") -> dict[str, str]:
    """Returns the client's option for the address of each face."""
    found = {}
    for face, name in NAMES.items():
        for each in faces.addresses[face]:
            scheme, _, rest = each.partition(":")
            urls = {"unix": each, "tls": f"https://{rest}"}
            if (scheme if scheme in urls else "tcp") == kind:
                found[name] = urls.get(scheme, f"http://{each}")
    return found


def port_of(faces: Faces, face: str) -> int:
    return int(faces.plain(face).rpartition(":")[2])


@asynccontextmanager
async def through_proxy(making: Make, faces: Faces, **options: Any) -> AsyncIterator[Any]:
    """Yields a client whose calls of the selection service go through a proxy, and the proxy."""
    async with dropping(port_of(faces, "selection")) as proxy:
        where = addresses(faces) | {"selection": proxy.url}
        async with making(**where, **options) as either:
            yield either, proxy


def novel(tokens: int) -> list[int]:
    """Returns a prompt of new tokens, of which no worker has any block."""
    return [next(_tokens) for _ in range(tokens)]


async def live(either: Either, model_name: str = "m") -> list[int]:
    """Returns the numbers of each rank's live requests, and of selections that wait."""
    (row,) = await either.ask(lambda kvd: kvd.selection.loads(model_name=model_name))
    return [*(each.active_requests for each in row.loads), row.pending_count]


async def until_live(either: Either, wanted: list[int], model_name: str) -> None:
    while await live(either, model_name) != wanted:  # noqa: ASYNC110
        await trio.sleep(0.01)


# ---- the four faces, over every kind of address


@pytest.mark.parametrize("kind", ["tcp", "tls", "unix"])
async def test_every_face_answers(making: Make, kvd: Faces, kind: str, certificate: Path) -> None:
    where = addresses(kvd, kind)
    async with making(**where, token=TOKEN, ca_file=certificate / "cert.pem") as either:
        for face in NAMES.values():
            await either.ask(lambda kvd: getattr(kvd, face).health())  # noqa: B023
            document = await either.ask(lambda kvd: getattr(kvd, face).document())  # noqa: B023
            assert document["openapi"] == "3.1.0"
            text = await either.ask(lambda kvd: getattr(kvd, face).metrics())  # noqa: B023
            assert "# HELP" in text
            picture = await either.ask(lambda kvd: getattr(kvd, face).picture())  # noqa: B023
            assert {shown.name for shown in picture.faces} == set(NAMES)
            await either.ask(lambda kvd: getattr(kvd, face).diagnose())  # noqa: B023
        assert either.stats.calls == 20
        assert either.stats.retries == 0


async def test_the_indexer_is_asked_by_tokens_and_by_hashes(making: Make, kvd: Faces) -> None:
    engine = Engine()
    try:
        async with making(**addresses(kvd), token=TOKEN) as either:

            async def ask(make: Callable[[Any], Any]) -> Any:
                return await either.ask(lambda kvd: make(kvd.indexer))

            await ask(
                lambda face: face.register(
                    "m",
                    7,
                    engine.endpoint,
                    block_size=BLOCK_SIZE,
                    replay_endpoint=engine.replay_endpoint,
                )
            )
            await trio.to_thread.run_sync(engine.subscribed.wait)
            engine.store(TOKENS)
            salted = local_hashes(TOKENS, BLOCK_SIZE, cache_salt="s")
            hashes = local_hashes(TOKENS, BLOCK_SIZE)
            while 7 not in (await ask(lambda face: face.query("m", TOKENS))).scores:  # noqa: ASYNC110
                await trio.sleep(0.01)
            scores = await ask(lambda face: face.query("m", TOKENS, streams=True))
            assert scores.scores == {7: {0: 16}}
            assert scores.frequencies == (1, 1, 1, 1)
            assert scores.streams == {7: {0: "exact"}}
            by_hash = await ask(lambda face: face.query_by_hash("m", hashes, streams=True))
            assert by_hash == scores
            unlike = await ask(lambda face: face.query_by_hash("m", salted))
            assert unlike.scores == {7: {0: 0}}
            tiered = await ask(lambda face: face.query_tiered_by_hash("m", hashes))
            ((rank, blocks),) = tiered.tiered.device.scores
            assert (rank.worker_id, rank.dp_rank, blocks) == (7, 0, 4)
            (instance,) = await ask(lambda face: face.workers(model_name="m"))
            assert instance.listeners[0].endpoint == engine.endpoint
            (partition,) = (await ask(lambda face: face.dump())).values()
            dumped = [
                b.tokens_hash for row in partition.events for b in row.event.data.stored.blocks
            ]
            assert dumped == hashes
            (branch,) = (await ask(lambda face: face.branches("m"))).branches
            assert branch.blocks == 4
            holdings = await either.ask(
                lambda kvd: kvd.conductor.query_by_hash(
                    "m", sequence_hashes(hashes), block_size=BLOCK_SIZE
                )
            )
            assert holdings["default"]["7"].gpu == 16
            assert holdings["default"]["7"].ranks == {0: 16}
            assert holdings["default"]["7"].media == {}
            view = await either.ask(lambda kvd: kvd.conductor.global_view())
            assert [each.instance_id for each in view.model_contexts] == ["7"]
            await ask(lambda face: face.unregister("m", 7))
            with pytest.raises(Refused) as refused:
                await ask(lambda face: face.query("m", TOKENS))
            assert refused.value.status == 404
            assert "no indexer for model=m" in refused.value.text
    finally:
        engine.close()


async def test_the_slot_tracker_counts(making: Make, kvd: Faces) -> None:
    rolling = sequence_hashes(local_hashes(TOKENS, BLOCK_SIZE))
    assert max(rolling) >= 2**63  # /add takes it with a sign
    async with making(**addresses(kvd, "unix"), token=TOKEN) as either:

        async def ask(make: Callable[[Any], Any]) -> Any:
            return await either.ask(lambda kvd: make(kvd.slot_tracker))

        await ask(lambda face: face.register("m", 7, block_size=BLOCK_SIZE, dp_size=2))
        for _ in range(2):  # the same booking, twice
            await ask(
                lambda face: face.add(
                    "m",
                    "a/b ?",
                    worker_id=7,
                    dp_rank=1,
                    sequence_hashes=rolling,
                    new_isl_tokens=16,
                    idempotency_key="k",
                )
            )
        loads = await ask(lambda face: face.loads(model_name="m"))
        assert [each.active_prefill_tokens for each in loads] == [0, 16]
        request = await ask(lambda face: face.request("m", "a/b ?"))
        assert (request.request_id, request.blocks) == ("a/b ?", 4)
        potential = await ask(lambda face: face.potential_loads("m", rolling, new_isl_tokens=4))
        assert [each.potential_decode_blocks for each in potential] == [4, 4]
        await ask(lambda face: face.prefill_complete("m", "a/b ?"))
        await ask(lambda face: face.free("m", "a/b ?"))
        loads = await ask(lambda face: face.loads())
        assert {each.active_decode_blocks for each in loads} == {0}
        assert [each.dp_size for each in await ask(lambda face: face.workers())] == [2]
        await ask(lambda face: face.unregister("m", 7))
        assert await ask(lambda face: face.replicas()) == ()


async def test_the_selection_service_is_told_and_asked(making: Make, kvd: Faces) -> None:
    async with making(**addresses(kvd), token=TOKEN) as either:

        async def ask(make: Callable[[Any], Any]) -> Any:
            return await either.ask(lambda kvd: make(kvd.selection))

        worker_id = 1 if isinstance(either.client, Client) else 2
        record = {
            "worker_id": worker_id,
            "endpoint": "http://127.0.0.1:8000",
            "block_size": BLOCK_SIZE,
            "without_kv_events": True,
        }
        (worker,) = await ask(lambda face: face.set_workers([record], model_name="m"))
        assert (worker.worker_id, worker.lifecycle) == (worker_id, "schedulable")
        worker = await ask(lambda face: face.change_worker(worker_id, total_kv_blocks=100))
        assert worker.total_kv_blocks == 100
        assert (await ask(lambda face: face.ready())).schedulable_workers == 1
        prompt: dict[str, Any] = {"model_name": "m", "token_ids": TOKENS}
        chosen = await ask(lambda face: face.select(**prompt, explain=True))
        assert [each.worker_id for each in chosen.candidates] == [worker_id]
        booked = await ask(
            lambda face: face.book(
                chosen.worker_id,
                **prompt,
                reservation_id="r",
                effective_prefill_tokens=chosen.effective_prefill_tokens,
            )
        )
        assert booked.endpoint == "http://127.0.0.1:8000"
        await ask(lambda face: face.output_block("r", decay_fraction=0.5))
        await ask(lambda face: face.prefill_complete("r"))
        await ask(lambda face: face.report("r", prompt_tokens=17, cached_tokens=0, ttft_ms=5.0))
        reservation = await ask(lambda face: face.reservation("r"))
        assert (reservation.prefill_complete, reservation.output_blocks) == (True, 1)
        accounts = (await ask(lambda face: face.regret())).ranks
        # A removed worker keeps its account for a while, such as that of the other client's test.
        assert [each.reports for each in accounts if each.worker_id == worker_id] == [1]
        overlaps = await ask(lambda face: face.overlap_scores(**prompt))
        assert overlaps.num_blocks == 4
        (potential,) = await ask(lambda face: face.potential_loads(**prompt))
        assert potential.active_requests == 1
        await ask(lambda face: face.free("r"))
        set_to = await ask(lambda face: face.set_router_policy("m", "kvd,hold_up=0.2"))
        assert set_to.weights["hold_up"] == 0.2
        policies = await ask(lambda face: face.router_policies())
        assert [each.model for each in policies.router_policies] == ["m"]
        await ask(lambda face: face.revert_router_policy("m"))
        mode = await ask(lambda face: face.set_router_mode("m", "random"))
        assert mode.router_mode == "random"
        await ask(lambda face: face.revert_router_mode("m"))
        busy = await ask(
            lambda face: face.set_busy_threshold("m", active_prefill_tokens_threshold=9)
        )
        assert busy.active_prefill_tokens_threshold == 9
        await ask(lambda face: face.revert_busy_threshold("m"))
        assert (await ask(lambda face: face.busy_thresholds())).thresholds == ()
        assert (await ask(lambda face: face.router_modes())).router_modes == ()
        await ask(lambda face: face.remove_worker(worker_id))
        ready = await ask(lambda face: face.ready())  # a 503 that is an answer
        assert not ready.ready and ready.not_ready_reasons


async def test_the_conductor_is_told_and_asked(making: Make, kvd: Faces) -> None:
    endpoint = f"tcp://127.0.0.1:{find_free_port()}"
    async with making(**addresses(kvd), token=TOKEN) as either:

        async def ask(make: Callable[[Any], Any]) -> Any:
            return await either.ask(lambda kvd: make(kvd.conductor))

        registered = await ask(
            lambda face: face.register("m", "e", endpoint, type="vLLM", block_size=BLOCK_SIZE)
        )
        assert registered.instance_id == "e"
        (service,) = (await ask(lambda face: face.services())).services
        assert (service.endpoint, service.dp_rank, service.events) == (endpoint, 0, 0)
        found = await ask(lambda face: face.query("m", TOKENS, block_size=BLOCK_SIZE))
        assert found["default"]["e"].longest_matched == 0
        gone = await ask(lambda face: face.unregister("e"))
        assert gone.removed_instances == ("e|default|0",)


async def test_the_gateway_is_told_and_asked(making: Make, tmp_path: Path) -> None:
    async with engines(EngineOptions(model="m"), EngineOptions(model="m")) as (first, second):
        starting = running_kvd(tmp_path, f"--upstream={first.url}", face="gateway")
        with ExitStack() as stack:
            server = await trio.to_thread.run_sync(stack.enter_context, starting)
            async with making(gateway=server.base_url) as either:

                async def ask(make: Callable[[Any], Any]) -> Any:
                    return await either.ask(lambda kvd: make(kvd.gateway))

                added = await ask(lambda face: face.add_upstream(second.url))
                assert added.url == second.url
                while (await ask(lambda face: face.ready())).serving < 2:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                status = await ask(lambda face: face.status())
                assert [each.models for each in status.upstreams] == [("m",), ("m",)]
                assert await ask(lambda face: face.remove_upstream(added.worker_id)) == added
                await ask(lambda face: face.health())
            await trio.to_thread.run_sync(stack.close)


# ---- access


async def test_a_token_is_needed(making: Make, kvd: Faces, tmp_path: Path) -> None:
    where = addresses(kvd)
    async with making(**where) as either:
        await either.ask(lambda kvd: kvd.indexer.health())
        with pytest.raises(Unauthorised) as refused:
            await either.ask(lambda kvd: kvd.indexer.peers())
        assert refused.value.status == 401
    (tmp_path / "token").write_text(f"{READER}\n")
    async with making(**where, token_file=tmp_path / "token") as either:
        assert await either.ask(lambda kvd: kvd.indexer.peers()) == ()
        with pytest.raises(Unauthorised) as refused:
            await either.ask(lambda kvd: kvd.indexer.dump())
        assert refused.value.status == 403


async def test_certificates_are_checked_and_shown(
    making: Make, certificate: Path, tmp_path: Path
) -> None:
    make_client_certificates(tmp_path, "client")
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_bytes((certificate / name).read_bytes())
    with serving_faces(tmp_path, tmp_path, client_ca=True) as faces:
        where, ca_file = addresses(faces, "tls"), certificate / "cert.pem"
        shown = {"cert_file": tmp_path / "client.pem", "key_file": tmp_path / "client.key"}
        async with making(**where, ca_file=ca_file, **shown) as either:
            await either.ask(lambda kvd: kvd.indexer.health())
        for options in ({"ca_file": ca_file}, shown):  # shows nothing; trusts nobody
            async with making(**where, **options, attempts=1) as either:
                with pytest.raises(Unreachable):
                    await either.ask(lambda kvd: kvd.indexer.health())


# ---- what goes wrong


async def test_nobody_is_there(making: Make) -> None:
    async with making(indexer=f"http://127.0.0.1:{find_free_port()}", attempts=2) as either:
        with pytest.raises(Unreachable):
            await either.ask(lambda kvd: kvd.indexer.peers())
        assert either.stats.retries == 1
        with pytest.raises(Unreachable):  # must not be sent twice
            await either.ask(lambda kvd: kvd.indexer.register("m", 1, "tcp://h:1", block_size=4))
        assert (either.stats.calls, either.stats.retries) == (2, 1)


async def test_an_answer_of_something_else_is_wrong(making: Make, open_kvd: Faces) -> None:
    where = addresses(open_kvd)
    async with making(indexer=where["selection"]) as either:
        with pytest.raises(WrongAnswer, match=r"0: missing member `endpoints`"):
            await either.ask(lambda kvd: kvd.indexer.workers())
    async with making(**where, max_answer_bytes=100) as either:
        with pytest.raises(WrongAnswer, match="longer than 100 bytes"):
            await either.ask(lambda kvd: kvd.indexer.metrics())
        await either.ask(lambda kvd: kvd.indexer.health())


async def test_a_closed_client_says_so(making: Make, open_kvd: Faces) -> None:
    async with making(**addresses(open_kvd)) as either:
        await either.ask(lambda kvd: kvd.indexer.health())
    with pytest.raises(Unreachable, match="the client is closed"):
        await either.ask(lambda kvd: kvd.indexer.health())


async def test_closing_a_client_ends_calls_that_wait(making: Make, open_kvd: Faces) -> None:
    async with dropping(port_of(open_kvd, "selection")) as proxy, until_all_ended() as nursery:
        proxy.hold(b"GET /regret")
        async with making(selection=proxy.url, timeout_s=TEST_SECONDS) as either:

            async def wait() -> None:
                with pytest.raises(Unreachable):
                    await either.ask(lambda kvd: kvd.selection.regret())

            nursery.start_soon(wait)
            await proxy.held.wait()


async def test_closing_a_client_ends_a_call_that_still_connects(
    open_kvd: Faces, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks_up, closed = trio.Event(), threading.Event()
    token, look_up = trio.lowlevel.current_trio_token(), socket.getaddrinfo

    def slow(*arguments: Any, **options: Any) -> Any:
        token.run_sync_soon(looks_up.set)
        closed.wait()
        return look_up(*arguments, **options)

    async with dropping(port_of(open_kvd, "selection")) as proxy, until_all_ended() as nursery:
        proxy.hold(b"GET /regret")
        client = Client(selection=proxy.url, timeout_s=TEST_SECONDS)

        def ask() -> None:
            with pytest.raises(Unreachable):
                client.selection.regret()

        monkeypatch.setattr(socket, "getaddrinfo", slow)
        nursery.start_soon(trio.to_thread.run_sync, ask)
        await looks_up.wait()
        client.close()
        closed.set()


async def test_closing_a_client_leaves_its_connections_encrypted(
    certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may be about to send a token."""
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_bytes((certificate / name).read_bytes())
    shut_down, encryption = socket.socket.shutdown, []

    def observed(self: socket.socket, how: int) -> None:
        encryption.append(self.version() if isinstance(self, ssl.SSLSocket) else None)
        shut_down(self, how)

    with serving_faces(tmp_path, tmp_path) as faces:

        def ask_and_close() -> None:
            where = addresses(faces, "tls")
            with Client(**where, ca_file=certificate / "cert.pem") as client:
                client.indexer.health()
                monkeypatch.setattr(socket.socket, "shutdown", observed)

        await trio.to_thread.run_sync(ask_and_close)
    assert encryption == ["TLSv1.3"]


@asynccontextmanager
async def until_all_ended() -> AsyncIterator[trio.Nursery]:
    """Yields a nursery whose tasks, threads among them, have to end in half the time of a test."""
    with trio.move_on_after(TEST_SECONDS / 2) as scope:
        async with trio.open_nursery() as nursery:
            yield nursery
    assert not scope.cancel_called


async def test_lost_answers_are_asked_for_again(making: Make, open_kvd: Faces) -> None:
    async with through_proxy(making, open_kvd) as (either, proxy):
        proxy.drop(b"GET /loads", 2)
        assert await live(either) == [0, 0]
        assert (either.stats.retries, proxy.dropped) == (2, 2)
        proxy.drop(b"DELETE /reservations/r ", 1)
        await either.ask(
            lambda kvd: kvd.selection.book(1, model_name="m", token_ids=TOKENS, reservation_id="r")
        )
        await either.ask(lambda kvd: kvd.selection.free("r"))  # repeated, finds nothing
        assert either.stats.retries == 3
        with pytest.raises(Refused):
            await either.ask(lambda kvd: kvd.selection.free("r"))
        proxy.drop(b"POST /reservations ", 1)
        with pytest.raises(Unreachable):  # without a key it is not repeated
            await either.ask(
                lambda kvd: kvd.selection.book(
                    1, model_name="m", token_ids=TOKENS, reservation_id="r"
                )
            )
        assert either.stats.retries == 3
        await either.ask(lambda kvd: kvd.selection.free("r"))


async def test_a_silent_daemon_is_given_up(making: Make, open_kvd: Faces) -> None:
    async with through_proxy(making, open_kvd, timeout_s=0.2) as (either, proxy):
        proxy.hold(b"GET /regret")
        with pytest.raises(Unreachable, match=r"no answer within 0\.2 s"):
            await either.ask(lambda kvd: kvd.selection.regret())


async def test_a_busy_daemon_is_asked_again(making: Make, open_kvd: Faces) -> None:
    """A refusal with Retry-After is worth another attempt, which may be accepted."""
    async with making(**addresses(open_kvd)) as either:
        threshold = {"active_prefill_tokens_threshold": 10}
        await either.ask(lambda kvd: kvd.selection.set_busy_threshold("busy", **threshold))
        prompt = {"model_name": "busy", "token_ids": novel(12)}
        before = await overloaded(either)
        async with trio.open_nursery() as nursery:
            async with either.reserve(**prompt) as first:

                async def second() -> None:
                    async with either.reserve(**prompt) as choice:
                        assert choice.worker == 2

                nursery.start_soon(second)
                while await overloaded(either) == before:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            assert first.freed
        assert either.stats.retries >= 1
        assert await live(either, "busy") == [0, 0]
        await either.ask(lambda kvd: kvd.selection.revert_busy_threshold("busy"))


async def overloaded(either: Either) -> float:
    """Returns how many selections were refused because all workers are overloaded."""
    text = await either.ask(lambda kvd: kvd.selection.metrics())
    found = re.findall(r'^kvd_selection_decisions_total\{.*"overloaded".* (\d+)', text, re.M)
    return sum(map(float, found))


# ---- reservations


class OfTheBody(Exception):
    pass


async def test_a_reservation_lasts_as_long_as_its_block(making: Make, open_kvd: Faces) -> None:
    async with making(**addresses(open_kvd)) as either:
        async with either.reserve(model_name="m", token_ids=TOKENS) as choice:
            assert (choice.worker, choice.dp_rank) == (1, 0)
            assert choice.endpoint == "http://127.0.0.1:8000"
            assert choice.selection.reservation_id == choice.reservation_id
            assert await live(either) == [1, 0]

            async def ask(make: Callable[[Any], Any]) -> None:
                await either.ask(lambda kvd: make(choice))

            await ask(lambda choice: choice.prefill_complete())
            await ask(lambda choice: choice.output_block(decay_fraction=0.5))
            await ask(lambda choice: choice.report(prompt_tokens=17, cached_tokens=0))
            shown = await either.ask(lambda kvd: kvd.selection.reservation(choice.reservation_id))
            assert (shown.prefill_complete, shown.output_blocks) == (True, 1)
            assert not choice.freed
        assert choice.freed
        assert await live(either) == [0, 0]
        assert either.stats.unfreed == 0


async def test_reservations_end_by_the_beginning_of_their_ids(
    making: Make, open_kvd: Faces
) -> None:
    async with making(**addresses(open_kvd)) as either:

        async def ask(make: Callable[[Any], Any]) -> Any:
            return await either.ask(lambda kvd: make(kvd.selection))

        prompt: dict[str, Any] = {"model_name": "m", "token_ids": TOKENS}
        for name in ("a.1", "a.2", "a.21", "b.a.1"):
            await ask(lambda face, name=name: face.book(1, reservation_id=name, **prompt))
        assert (await ask(lambda face: face.free_by_prefix("a.", "a.2"))).freed == 1
        assert (await ask(lambda face: face.free_by_prefix("a."))).freed == 2
        assert (await ask(lambda face: face.free_by_prefix("a."))).freed == 0
        with pytest.raises(Refused, match="prefix: expected the beginning of reservation ids"):
            await ask(lambda face: face.free_by_prefix(""))
        assert await live(either) == [1, 0]
        await ask(lambda face: face.free("b.a.1"))
        assert await live(either) == [0, 0]


async def test_what_a_block_raises_comes_out_as_it_is(making: Make, open_kvd: Faces) -> None:
    async with making(**addresses(open_kvd)) as either:
        raised = OfTheBody()
        with pytest.raises(OfTheBody) as caught:
            async with either.reserve(model_name="m", token_ids=TOKENS):
                raise raised
        assert caught.value is raised
        assert await live(either) == [0, 0]


async def test_a_reservation_that_has_ended_already_is_freed(making: Make, open_kvd: Faces) -> None:
    async with making(**addresses(open_kvd)) as either:
        async with either.reserve(model_name="m", token_ids=TOKENS) as choice:
            await either.ask(lambda kvd: kvd.selection.free(choice.reservation_id))
        assert choice.freed
        assert either.stats.unfreed == 0


async def test_a_refused_booking_is_an_error(making: Make, open_kvd: Faces) -> None:
    async with making(**addresses(open_kvd)) as either:
        with pytest.raises(Refused) as refused:
            async with either.reserve(model_name="none", token_ids=TOKENS):
                raise AssertionError("nobody was chosen")
        assert refused.value.status in (404, 503)
        assert either.stats.calls == 1  # there is nothing to free


async def test_a_booking_whose_answer_is_lost_is_found_again(making: Make, open_kvd: Faces) -> None:
    async with through_proxy(making, open_kvd) as (either, proxy):
        proxy.drop(RESERVING, 2)
        async with either.reserve(model_name="m", token_ids=TOKENS):
            assert proxy.dropped == 2
            assert either.stats.retries == 2
            assert await live(either) == [1, 0]  # booked once
        assert await live(either) == [0, 0]


async def test_a_booking_whose_answer_never_comes_is_freed(making: Make, open_kvd: Faces) -> None:
    async with through_proxy(making, open_kvd) as (either, proxy):
        proxy.drop(RESERVING, 100)
        with pytest.raises(Unreachable):
            async with either.reserve(model_name="m", token_ids=TOKENS):
                raise AssertionError("it was lost")
        assert proxy.dropped == 4
        assert await live(either) == [0, 0]
        assert either.stats.unfreed == 0


async def test_a_booking_that_took_too_long_is_freed(making: Make, open_kvd: Faces) -> None:
    async with through_proxy(making, open_kvd, timeout_s=1.0) as (either, proxy):
        proxy.hold(RESERVING)
        with pytest.raises(Unreachable, match="no answer within 1 s"):
            async with either.reserve(model_name="m", token_ids=TOKENS):
                raise AssertionError("it was held back")
        assert proxy.held.is_set()
        assert await live(either) == [0, 0]


async def test_a_booking_whose_answer_is_wrong_is_freed(making: Make, open_kvd: Faces) -> None:
    where = addresses(open_kvd)
    async with making(**where) as direct, making(**where, max_answer_bytes=50) as either:
        with pytest.raises(WrongAnswer):
            async with either.reserve(model_name="m", token_ids=TOKENS):
                raise AssertionError("it cannot be read")
        assert either.stats.unfreed == 0
        assert await live(direct) == [0, 0]


async def test_a_daemon_that_dies_under_a_reservation_is_counted(
    making: Make, open_kvd: Faces
) -> None:
    async with making(**addresses(open_kvd)) as direct:
        async with through_proxy(making, open_kvd) as (either, proxy):
            with pytest.raises(OfTheBody):  # not the error of freeing
                async with either.reserve(model_name="m", token_ids=TOKENS) as choice:
                    await trio.lowlevel.checkpoint()
                    proxy.die()
                    raise OfTheBody
            assert not choice.freed
            assert either.stats.unfreed == 1
        assert await live(direct) == [1, 0]  # until it expires
        await direct.ask(lambda kvd: kvd.selection.free(choice.reservation_id))


# ---- cancelled


@asynccontextmanager
async def on_trio(faces: Faces, **options: Any) -> AsyncIterator[tuple[Either, AsyncClient]]:
    with trio.fail_after(TEST_SECONDS):
        async with AsyncClient(**(addresses(faces) | options)) as client:
            yield Either(client), client


async def test_a_cancelled_block_is_freed(open_kvd: Faces) -> None:
    async with on_trio(open_kvd) as (either, client):
        with trio.CancelScope() as scope:
            async with client.reserve(model_name="m", token_ids=TOKENS) as choice:
                assert await live(either) == [1, 0]
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert choice.freed
        assert await live(either) == [0, 0]


async def test_a_cancelled_wait_books_nothing(open_kvd: Faces) -> None:
    prompt: dict[str, Any] = {"model_name": "busy", "token_ids": novel(17)}

    async def wait() -> None:
        async with client.reserve(**prompt):
            raise AssertionError("the rank is busy")

    async with on_trio(open_kvd) as (either, client), client.reserve(**prompt):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await until_live(either, [1, 1], "busy")
            nursery.cancel_scope.cancel()
        await until_live(either, [1, 0], "busy")
    async with on_trio(open_kvd) as (either, client):
        assert await live(either, "busy") == [0, 0]


async def test_a_booking_is_freed_that_is_cancelled_before_its_answer(open_kvd: Faces) -> None:
    async with (
        dropping(port_of(open_kvd, "selection")) as proxy,
        on_trio(open_kvd, selection=proxy.url) as (either, client),
    ):
        proxy.hold(RESERVING)
        await cancel_when_held(client, proxy)
        assert await live(either) == [0, 0]
        assert client.stats.unfreed == 0


async def cancel_when_held(client: AsyncClient, proxy: Dropping) -> None:
    async def reserve() -> None:
        async with client.reserve(model_name="m", token_ids=TOKENS):
            raise AssertionError("it was held back")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reserve)
        await proxy.held.wait()
        nursery.cancel_scope.cancel()


async def test_those_who_wait_keep_nobody_from_freeing(open_kvd: Faces) -> None:
    """Each waiting selection holds a connection; freeing the rank they wait for needs one, too."""
    waiting = 120
    assert waiting > MAX_CONNECTIONS

    async def wait() -> None:
        async with client.reserve(model_name="busy", token_ids=novel(17)):
            pass

    async with on_trio(open_kvd) as (either, client):
        booked = client.reserve(model_name="busy", token_ids=novel(17))
        async with trio.open_nursery() as nursery, booked:
            for _ in range(waiting):
                nursery.start_soon(wait)
            await until_live(either, [1, waiting], "busy")
        assert await live(either, "busy") == [0, 0]
        assert client.stats.unfreed == 0


async def test_calls_wait_for_a_connection_before_they_begin(
    open_kvd: Faces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A booking that was never sent needs no freeing. If calls waited within httpx, they would
    slow down all others.
    """
    monkeypatch.setattr(clients, "MAX_WAITING_CONNECTIONS", 1)

    async def reserve() -> None:
        async with client.reserve(model_name="m", token_ids=TOKENS):
            raise AssertionError("it was held back")

    async with (
        dropping(port_of(open_kvd, "selection")) as proxy,
        on_trio(open_kvd, selection=proxy.url) as (_, client),
    ):
        proxy.hold(RESERVING)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reserve)
            await proxy.held.wait()
            async with trio.open_nursery() as waiting:
                waiting.start_soon(reserve)
                await trio.testing.wait_all_tasks_blocked()
                waiting.cancel_scope.cancel()
            assert client.stats.calls == 2  # the bookings
            nursery.cancel_scope.cancel()
        assert client.stats.calls == 3 and client.stats.unfreed == 0


async def test_no_more_calls_than_connections_block_at_once(
    open_kvd: Faces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "MAX_CONNECTIONS", 1)
    async with dropping(port_of(open_kvd, "selection")) as proxy:
        proxy.hold(b"GET /loads")
        with Client(selection=proxy.url, timeout_s=0.5) as client:

            def ask() -> None:
                with pytest.raises(Unreachable, match="no answer within"):
                    client.selection.loads()

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(trio.to_thread.run_sync, ask)
            proxy.holds = False
            await trio.to_thread.run_sync(client.selection.loads)


async def test_a_timeout_may_be_endless(making: Make, open_kvd: Faces) -> None:
    async with making(**addresses(open_kvd), timeout_s=math.inf) as either:
        assert await either.ask(lambda kvd: kvd.indexer.workers()) == ()


async def test_many_tasks_share_a_client(open_kvd: Faces) -> None:
    async with on_trio(open_kvd) as (either, client):

        async def reserve(number: int) -> None:
            try:
                async with client.reserve(model_name="m", token_ids=[number] * 8):
                    if number % 3 == 0:
                        raise OfTheBody
                    await trio.lowlevel.checkpoint()
            except OfTheBody:
                assert number % 3 == 0

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(reserve, number)
        assert await live(either) == [0, 0]
        assert client.stats.unfreed == 0


def test_every_error_is_a_client_error() -> None:
    for each in (Unreachable, Refused, Unauthorised, WrongAnswer):
        assert issubclass(each, ClientError)


@pytest.mark.parametrize(
    "options",
    [
        {"indexer": "127.0.0.1:8090"},
        {"indexer": "unix:"},
        {"indexer": "ftp://h"},
        {"indexer": "http://h:port"},
        {"indexer": "http://h:65536"},
        {"indexer": "http://[::1"},
        {"indexer": "http://h\x7f"},
        {"indexer": "http://user@h"},
        {"indexer": "http://h/?a"},
        {"token": "two words"},
        {"token": "t" * 16, "token_file": "/none"},
        {"attempts": 0},
        {"timeout_s": 0},
        {"timeout_s": math.nan},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_at_once(options: dict[str, Any]) -> None:
    for each in (Client, AsyncClient):
        with pytest.raises(ValueError):
            each(**options)


def test_asyncio_is_told_what_to_use() -> None:
    async def query() -> None:
        async with AsyncClient() as kvd:
            await kvd.indexer.query("m", [1])

    async def reserve() -> None:
        async with AsyncClient() as kvd, kvd.reserve(model_name="m", token_ids=[1]):
            pass

    for each in (query, reserve):
        with pytest.raises(RuntimeError, match=r"AsyncClient needs trio; .* asyncio\.to_thread"):
            asyncio.run(each())
