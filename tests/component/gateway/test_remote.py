"""Choices by other kvds, over Unix sockets, served by the selection service's real routes."""

from __future__ import annotations

import json
import os
import socket
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio

from kvd.errors import Unavailable
from kvd.faces.selection.routes import selection_routes
from kvd.gateway.booking_steps import MAX_ROW, MAX_STEPS, BookingSteps, StepsFailed
from kvd.gateway.choices import Question
from kvd.gateway.exchanges import Exchanges, RelayLimits
from kvd.gateway.remote import RemoteChoices, body_of
from kvd.gateway.remote_kvd import RemoteKvd, described, matches
from kvd.http.access import AccessLog
from kvd.http.app import build_app
from kvd.http.auth import AccessPolicy, Authorizer
from kvd.http.context import ServerContext
from kvd.http.front import Front
from kvd.http.listeners import open_listeners
from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope
from kvd.net.dialing import Dialer
from kvd.selection.phases import PREFILL_SUFFIX, Phase
from kvd.selection.worker_record import Role, WorkerLifecycle, WorkerRecord
from kvd.wire.egress import EgressPolicy
from kvd.wire.urls import UNIX_PREFIX
from kvd_core.base.hashing import sequence_hashes
from kvd_core.ledger.ledger import Ledger
from kvd_core.selector.selector import Pool
from tests.support.ports import find_free_port
from tests.support.resolving import Names
from tests.support.selecting import Service
from tests.support.serving import PATIENT
from tests.support.zmtp_fakes import NOT_MY_FAULT_S, until

BLOCK_SIZE = 4
NAME = "kvd.test"
PROMPT = list(range(1, 9))  # local hashes of blocks


class KvdProcess:
    """A selection service at unix:/PATH or HOST:PORT, which can end and start with nothing."""

    def __init__(self, bind: str, nursery: trio.Nursery) -> None:
        self.bind = bind
        self.service = Service()
        self._nursery = nursery
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    @property
    def booked(self) -> set[str]:
        return set(self.service.selections.reservations.owner_of)

    @property
    def workers(self) -> set[int]:
        return set(self.service.selections.workers.entries)

    async def start(self, *routes: Route) -> None:
        """Starts a new service, with other routes if any are given."""
        self.service = Service()
        served = routes or selection_routes(self.service.selections)
        self._scope = await self._nursery.start(self._serve, served)

    async def end(self) -> None:
        """Ends it at once, with all its connections."""
        self._scope.cancel()
        await self._ended.wait()

    async def _serve(
        self, routes: Sequence[Route], *, task_status: trio.TaskStatus[trio.CancelScope]
    ) -> None:
        context = ServerContext(
            Authorizer(AccessPolicy(allowed_hosts=(NAME,))), access=AccessLog("selection")
        )
        app = build_app(tuple(routes), PATIENT, context, lambda path: "not found")
        self._ended = trio.Event()
        with trio.CancelScope() as scope:
            sockets = await open_listeners(self.bind)
            try:
                front = Front(tuple(routes), app, PATIENT, context)
                async with trio.open_nursery() as nursery:
                    await nursery.start(front.serve, sockets, trio.Event())
                    task_status.started(scope)
                    await trio.sleep_forever()
            finally:
                if self.bind.startswith(UNIX_PREFIX):
                    os.unlink(self.bind.removeprefix(UNIX_PREFIX))
                self._ended.set()


class Gateway:
    """A gateway's choices, and questions for them."""

    def __init__(self, choices: RemoteChoices) -> None:
        self.choices = choices
        self._number = 0

    def question(self, allowed: Sequence[int] = (1, 2), session: str | None = None) -> Question:
        self._number += 1
        return Question(
            "m", None, BLOCK_SIZE, look(PROMPT), f"r{self._number}", frozenset(allowed), session
        )


def look(blocks: Sequence[int]) -> Callable[[Pool], None]:
    local = array("Q", blocks)
    hashes = array("Q", sequence_hashes(local))
    return lambda pool: pool.match(local.tobytes(), hashes.tobytes(), len(blocks) * BLOCK_SIZE)


def record(worker_id: int, block_size: int = BLOCK_SIZE) -> WorkerRecord:
    endpoint = f"http://gpu{worker_id}:8000"
    return WorkerRecord(
        worker_id, "m", endpoint=endpoint, block_size=block_size, without_kv_events=True
    )


@asynccontextmanager
async def asking(
    folder: Path, kvds: int = 1, deadline_s: float = NOT_MY_FAULT_S
) -> AsyncIterator[tuple[Gateway, list[KvdProcess]]]:
    """Yields a gateway of engines 1 and 2, and the running kvds that it asks."""
    async with trio.open_nursery() as nursery:
        binds = [f"{UNIX_PREFIX}{folder}/{number}.sock" for number in range(kvds)]
        running = [KvdProcess(bind, nursery) for bind in binds]
        for each in running:
            await each.start()
        exchanges = Exchanges(RelayLimits())
        dialer = Dialer(EgressPolicy(), 1.0, 1.0)
        choices = RemoteChoices(binds, exchanges, dialer, deadline_s)
        nursery.start_soon(exchanges.run)
        nursery.start_soon(choices.run)
        for worker_id in (1, 2):
            assert await choices.register(record(worker_id)) == []
        await until(lambda: all(each.workers == {1, 2} for each in running))
        await until(lambda: is_up(choices, *range(kvds)))
        yield Gateway(choices), running
        nursery.cancel_scope.cancel()


def is_up(choices: RemoteChoices, *numbers: int) -> bool:
    shown = choices.shown()
    return all(shown[number]["up"] for number in numbers)


async def test_a_booking_lives_as_long_as_the_request(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, [kvd]):
        question = gateway.question()
        first = await gateway.choices.choose(question)
        assert (first.prefill_tokens, first.by_load) == (len(PROMPT) * BLOCK_SIZE, False)
        [booked] = kvd.booked
        gateway.choices.note_prefilled(question.reservation_id)
        reservations = kvd.service.selections.reservations
        await until(lambda: reservations.find(booked)[1].prefill_complete)
        gateway.choices.note_cached(question.reservation_id, 32, 0, 12)
        gateway.choices.free(question.reservation_id)
        await until(lambda: not kvd.booked)
        [(rank, account)] = kvd.service.selections.regret.rows()
        assert rank[1:] == (first.worker_id, first.dp_rank)
        assert (account.cached_tokens, account.surplus_tokens) == (12, 12)
        # The engine publishes no events, so the prompt is predicted to be cached there.
        again = await gateway.choices.choose(gateway.question())
        assert (again.worker_id, again.prefill_tokens) == (first.worker_id, 0)


async def test_two_engines_are_booked_for_one_request(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, [kvd]):
        assert await gateway.choices.register(replace(record(1), role=Role.PREFILL)) == []
        question = gateway.question()._replace(phase=Phase.BOTH)
        assert gateway.choices.least_prefill_tokens(question) == len(PROMPT) * BLOCK_SIZE
        placed = await gateway.choices.choose(question)
        assert placed.prefill is not None
        assert (placed.worker_id, placed.prefill.worker_id) == (2, 1)
        assert placed.prefill.prefill_tokens == len(PROMPT) * BLOCK_SIZE
        decode, prefill = sorted(kvd.booked)
        assert prefill == decode + PREFILL_SUFFIX
        gateway.choices.note_cached(question.reservation_id, 32, 0, 12, prefill=True)
        gateway.choices.note_prefilled(question.reservation_id)
        await until(lambda: kvd.booked == {decode})
        [(rank, account)] = kvd.service.selections.regret.rows()
        assert (rank[1], account.cached_tokens) == (1, 12)
        gateway.choices.free(question.reservation_id)
        await until(lambda: not kvd.booked)


async def test_two_engines_are_chosen_by_load_without_a_kvd(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, [kvd]):
        assert await gateway.choices.register(replace(record(1), role=Role.PREFILL)) == []
        await kvd.end()
        placed = await gateway.choices.choose(gateway.question()._replace(phase=Phase.BOTH))
        assert placed.by_load and placed.prefill is not None
        assert (placed.worker_id, placed.prefill.worker_id) == (2, 1)
        assert (await gateway.choices.choose(gateway.question())).worker_id == 2


async def test_only_engines_that_are_allowed_are_chosen(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, _):
        for worker_id in (1, 2):
            placed = await gateway.choices.choose(gateway.question((worker_id,)))
            assert placed.worker_id == worker_id


async def test_engines_of_others_are_not_chosen(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, [kvd]):
        for worker_id in (3, 4, 5):
            await kvd.service.selections.workers.put(record(worker_id))
        for _ in range(6):
            placed = await gateway.choices.choose(gateway.question())
            assert placed.worker_id in (1, 2)
        await until(lambda: len(kvd.booked) == 6)  # bookings at the other kvd have been ended


async def test_without_a_kvd_the_load_decides(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, [kvd]):
        await kvd.end()
        questions = [gateway.question() for _ in range(4)]
        placed = [await gateway.choices.choose(each) for each in questions]
        assert all(each.by_load for each in placed)
        assert sorted(each.worker_id for each in placed) == [1, 1, 2, 2]
        gone = [each for each, at in zip(questions, placed, strict=True) if at.worker_id == 1]
        for each in gone:
            gateway.choices.free(each.reservation_id)
        for _ in gone:
            assert (await gateway.choices.choose(gateway.question())).worker_id == 1
        assert gateway.choices.questions["by_load"] == 6


async def test_a_kvd_that_comes_back_is_told_all_engines(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, [kvd]):
        await kvd.end()
        assert (await gateway.choices.choose(gateway.question())).by_load
        assert await gateway.choices.register(record(3)) == []
        await gateway.choices.deregister(1)
        await kvd.start()
        await until(lambda: is_up(gateway.choices, 0))
        assert kvd.workers == {2, 3}
        assert not (await gateway.choices.choose(gateway.question((2, 3)))).by_load


async def test_a_kvd_that_was_restarted_unnoticed_is_told_when_it_refuses(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, [kvd]):
        await kvd.end()
        await kvd.start()
        placed = await gateway.choices.choose(gateway.question())
        assert (placed.by_load, kvd.workers) == (False, {1, 2})


async def test_steps_are_told_in_rows_and_again_after_a_restart(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, [kvd]):
        reported = 0
        for count in (1, 3 * MAX_ROW):
            questions = [gateway.question() for _ in range(count)]
            for each in questions:
                await gateway.choices.choose(each)
            assert len(kvd.booked) == count
            for each in questions:
                gateway.choices.note_prefilled(each.reservation_id)
                gateway.choices.note_cached(each.reservation_id, 32, 0, 4)
                gateway.choices.free(each.reservation_id)
            await until(lambda: not kvd.booked)
            reports = [account.reports for _, account in kvd.service.selections.regret.rows()]
            reported += count
            assert sum(reports) == reported
        await kvd.end()
        await kvd.start()
        question = gateway.question()
        assert not (await gateway.choices.choose(question)).by_load
        gateway.choices.free(question.reservation_id)  # its kept connection is gone by now
        await until(lambda: not kvd.booked)


async def test_steps_pass_a_proxy_that_answers_one_request_a_connection() -> None:
    seen: list[bytes] = []

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            seen.append(bytes(await stream.receive_some()).partition(b" HTTP")[0])
            head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            await stream.send_all(head)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        address = listeners[0].socket.getsockname()
        steps = BookingSteps(partial(trio.open_tcp_stream, *address), NOT_MY_FAULT_S)
        for number in range(3):
            steps.put(b"DELETE /%d HTTP/1.1\r\n\r\n" % number)
        await steps.send()
        steps.close()
        assert seen == [b"DELETE /0", b"DELETE /1", b"DELETE /2"]
        nursery.cancel_scope.cancel()


async def test_steps_beyond_the_bound_are_dropped_and_counted() -> None:
    async def connect() -> trio.SocketStream:
        raise OSError("nobody is there")

    steps = BookingSteps(connect, NOT_MY_FAULT_S)
    for _ in range(MAX_STEPS + 3):
        steps.put(b"x")
    assert (len(steps), steps.dropped) == (MAX_STEPS, 3)
    with pytest.raises(StepsFailed, match="nobody is there"):
        await steps.send()
    assert len(steps) == MAX_STEPS


async def test_an_engine_that_comes_while_others_are_told_is_told_too(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, [kvd]):
        for worker_id in range(3, 20):
            await gateway.choices.register(record(worker_id))
        await kvd.end()
        await kvd.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.choices.choose, gateway.question(range(1, 20)))
            await until(lambda: bool(kvd.workers))  # registration has begun and is not done
            await gateway.choices.register(record(20))
            assert kvd.workers == set(range(1, 21))


async def test_the_next_replica_is_asked(tmp_path: Path) -> None:
    async with asking(tmp_path, kvds=2) as (gateway, [first, second]):
        question = gateway.question()
        await gateway.choices.choose(question)
        assert (len(first.booked), len(second.booked)) == (1, 0)
        await first.end()
        other = gateway.question()
        assert not (await gateway.choices.choose(other)).by_load
        assert len(second.booked) == 1
        gateway.choices.free(other.reservation_id)
        await until(lambda: not second.booked)
        await first.start()
        await until(lambda: is_up(gateway.choices, 0))
        await gateway.choices.choose(gateway.question())
        assert (len(first.booked), len(second.booked)) == (1, 0)


async def test_a_kvd_that_hangs_costs_one_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(tmp_path, kvds=2, deadline_s=0.1) as (gateway, [first, second]):
        note_failed = RemoteKvd.note_failed

        def be_patient(kvd: RemoteKvd, why: str) -> None:
            gateway.choices._deadline_s = NOT_MY_FAULT_S  # for the second one to answer
            note_failed(kvd, why)

        monkeypatch.setattr(RemoteKvd, "note_failed", be_patient)
        await first.end()
        hangs = [
            Route(method, path, silent, scope=Scope.OPEN)
            for method, path in (("POST", "/select_and_reserve"), ("GET", "/workers"))
        ]
        await first.start(*hangs)
        gateway.choices._kvds[0].note_reached(2)  # makes it count as up
        assert not (await gateway.choices.choose(gateway.question())).by_load
        assert len(second.booked) == 1
        assert gateway.choices.questions["late"] <= 1
        assert not is_up(gateway.choices, 0)


async def test_a_kvd_that_hangs_holds_up_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.gateway.remote_kvd.UPDATE_S", 10 * NOT_MY_FAULT_S)
    async with asking(tmp_path, deadline_s=0.1) as (gateway, [kvd]):
        await kvd.end()
        with trio.socket.socket(socket.AF_UNIX) as hanging:
            await hanging.bind(kvd.bind.removeprefix(UNIX_PREFIX))
            hanging.listen()
            gateway.choices._kvds[0].note_reached(2)  # makes it count as up
            with trio.fail_after(NOT_MY_FAULT_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(gateway.choices.register, record(3))
                    assert (await gateway.choices.choose(gateway.question())).by_load
            (shown,) = gateway.choices.shown()
            assert shown["problem"] == "it has not answered in time"  # not that of the update


async def test_bookings_end_with_the_gateway(tmp_path: Path) -> None:
    """Those of requests that the stop has cut: their last steps wait as the choices are ended."""
    async with trio.open_nursery() as outer:
        kvd = KvdProcess(f"{UNIX_PREFIX}{tmp_path}/kvd.sock", outer)
        await kvd.start()
        exchanges, dialer = Exchanges(RelayLimits()), Dialer(EgressPolicy(), 1.0, 1.0)
        choices = RemoteChoices([kvd.bind], exchanges, dialer, NOT_MY_FAULT_S)
        gateway = Gateway(choices)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchanges.run)
            nursery.start_soon(choices.run)
            await choices.register(record(1))
            await until(lambda: kvd.workers == {1} and is_up(choices, 0))
            questions = [gateway.question([1]) for _ in range(2)]
            for question in questions:
                await choices.choose(question)
            assert len(kvd.booked) == len(questions)
            for question in questions:
                choices.free(question.reservation_id)
            nursery.cancel_scope.cancel()
        assert not kvd.booked
        outer.cancel_scope.cancel()


async def test_a_name_leads_to_its_next_address_with_all_steps() -> None:
    """The kvd is one of two behind a name: they change places, and then one of them ends."""
    names, port = Names(), find_free_port()
    trio.socket.set_custom_hostname_resolver(names)
    async with trio.open_nursery() as nursery:
        hosts = ["127.0.0.1", "127.0.0.2"]
        kvds = first, second = [KvdProcess(f"{host}:{port}", nursery) for host in hosts]
        for each in kvds:
            await each.start()
        exchanges, dialer = Exchanges(RelayLimits()), Dialer(EgressPolicy(), 1.0, 1.0)
        choices = RemoteChoices([f"http://{NAME}:{port}"], exchanges, dialer, NOT_MY_FAULT_S)
        gateway = Gateway(choices)

        async def ask(kvd: KvdProcess, *hosts: str) -> None:
            """Has the name resolve to these, and a request booked and ended at this kvd."""
            names.known[NAME] = list(hosts)
            assert await choices.register(record(1)) == []
            await until(lambda: kvd.workers == {1} and is_up(choices, 0))
            question = gateway.question([1])
            await choices.choose(question)
            assert [len(each.booked) for each in kvds] == [each is kvd for each in kvds]
            choices.free(question.reservation_id)
            await until(lambda: not kvd.booked)

        names.known[NAME] = hosts[:1]
        nursery.start_soon(exchanges.run)
        nursery.start_soon(choices.run)
        await ask(first, hosts[0])
        await ask(first, hosts[1], hosts[0])  # resolvers rotate the addresses
        await ask(second, hosts[1])
        await second.end()
        await ask(first, hosts[1], hosts[0])
        nursery.cancel_scope.cancel()


async def test_what_is_refused_for_want_of_room_is_refused(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, [kvd]):
        for worker_id in (1, 2):
            await kvd.service.selections.workers.delete(worker_id)
        await gateway.choices.deregister(1)
        await gateway.choices.deregister(2)
        with pytest.raises(Unavailable, match="no schedulable workers for model=m"):
            await gateway.choices.choose(gateway.question(()))


async def test_an_engine_that_does_not_fit_is_named(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, _):
        reasons = await gateway.choices.register(record(3, block_size=8))
        assert reasons == ["block_size 8 differs from 4 of its model"]


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, each) for each in (b"[]", b"{}", b"[[]]", b"5", b"[" * 100_000, b"[5]")]
    + [
        (200, b'[{"worker_id": 1, "not_schedulable_reasons": %b}]' % reasons)
        for reasons in (b"5", b"[5]", b"null")
    ]
    + [(404, b'{"error": "not found"}'), (405, b'{"error": {"message": "not here"}}')],
)
async def test_what_is_no_kvd_is_not_asked(tmp_path: Path, status: int, body: bytes) -> None:
    def answer(request: Request) -> Response:
        return Response(status, body)

    async with asking(tmp_path) as (gateway, [kvd]):
        await kvd.end()
        await kvd.start(
            Route("GET", "/workers", answer),
            Route("POST", "/workers", answer, scope=Scope.ADMIN),
            Route("POST", "/select_and_reserve", answer, scope=Scope.LIFECYCLE),
        )
        placed = await gateway.choices.choose(gateway.question())
        assert placed.by_load
        await gateway.choices.register(record(3))  # has a kvd that is up asked at once
        await until(lambda: "does not answer" in str(gateway.choices.shown()))


@pytest.mark.parametrize(
    "changed",
    [
        {"worker_id": []},
        {"dp_rank": "0"},
        {"effective_prefill_tokens": None},
        {"dp_rank": True},
        {"effective_prefill_tokens": -1},
        {"prefill": {"worker_id": 2, "dp_rank": 0.5, "effective_prefill_tokens": 8}},
    ],
)
async def test_what_is_no_choice_is_not_followed(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    asked = []

    def choose(request: Request) -> Response:
        asked.append(request.body)
        members = {"worker_id": 1, "dp_rank": 0, "effective_prefill_tokens": 8, **changed}
        return Response(200, json.dumps(members).encode())

    async with asking(tmp_path) as (gateway, [kvd]):
        await kvd.end()
        await kvd.start(
            Route("GET", "/workers", lambda request: Response(200, b"[]")),
            Route("POST", "/select_and_reserve", choose, scope=Scope.LIFECYCLE),
        )
        placed = await gateway.choices.choose(gateway.question())
        assert placed.by_load and len(asked) == 1


@pytest.mark.parametrize("error", ['"closed for you"', '{"message": "closed for you"}'])
async def test_the_refusal_of_a_kvd_is_shown_in_its_words(tmp_path: Path, error: str) -> None:
    def answer(request: Request) -> Response:
        return Response(403, f'{{"error": {error}}}'.encode())

    async with asking(tmp_path) as (gateway, [kvd]):
        await kvd.end()
        await kvd.start(Route("GET", "/workers", answer))
        await gateway.choices.register(record(3))  # asks it at once
        await until(lambda: "403: closed for you'" in str(gateway.choices.shown()))


async def test_a_kvd_that_is_gone_is_shown_as_such_by_steps_too() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        steps = BookingSteps(partial(trio.open_tcp_stream, "127.0.0.1", port), NOT_MY_FAULT_S)
        steps.put(b"DELETE /reservations/1 HTTP/1.1\r\n\r\n")
        with pytest.raises(StepsFailed, match=r"^the connection failed: .*Connection refused$"):
            await steps.send()


async def test_an_engine_that_became_another_is_described_anew(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, [kvd]):
        await gateway.choices.deregister(2)
        assert await gateway.choices.register(record(1, block_size=8)) == []
        [entry] = kvd.service.selections.workers.entries.values()
        assert entry.record == record(1, block_size=8)


async def test_an_engine_that_could_not_be_removed_is_removed_later(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, [kvd]):
        service = kvd.service
        await kvd.end()
        await kvd.start(*map(failing_once, selection_routes(service.selections)))
        kvd.service = service
        await until(lambda: is_up(gateway.choices, 0))
        await gateway.choices.deregister(2)
        assert kvd.workers == {1, 2}
        await until(lambda: kvd.workers == {1})


def failing_once(route: Route) -> Route:
    """Returns a route like this one; the first removal of a worker fails."""
    faults = [RuntimeError("the disk is full")]

    async def handler(request: Request) -> Response:
        if faults:
            raise faults.pop()
        answer = route.handler(request)
        return answer if isinstance(answer, Response) else await answer

    is_removal = (route.method, route.path) == ("DELETE", "/workers/{worker_id}")
    return replace(route, handler=handler) if is_removal else route


async def test_what_a_kvd_shows_is_what_it_was_told(tmp_path: Path) -> None:
    async with asking(tmp_path) as (gateway, [kvd]):
        record = WorkerRecord(
            7,
            "other",
            endpoint="http://gpu7:8000",
            block_size=16,
            data_parallel_start_rank=2,
            data_parallel_size=2,
            total_kv_blocks=1000,
            kv_events_endpoints={2: "tcp://127.0.0.1:1", 3: "tcp://127.0.0.1:2"},
        )
        assert await gateway.choices.register(record) == []
        assert kvd.service.selections.workers.entries[7].record == record
        assert matches(record.shown(WorkerLifecycle.SCHEDULABLE, []), described(record))


def test_a_question_has_what_was_asked_for() -> None:
    question = Question("m", "a", 4, look([1, 2**64 - 1]), "r", frozenset(), "s", 2.5, 2**40)
    pool = Pool(None, Ledger(), 4)
    question.lookup(pool)
    local = [1, 2**64 - 1]
    assert json.loads(body_of(question, "b", pool.hold(), frozenset((2, 1)))) == {
        "model_name": "m",
        "reservation_id": "b",
        "isl_tokens": 8,
        "block_hashes": local,
        "sequence_hashes": sequence_hashes(local),
        "lora_name": "a",
        "session_id": "s",
        "priority_jump": 2.5,
        "expected_output_tokens": 2**32 - 1,
        "allowed_worker_ids": [1, 2],
    }
    pool.match(b"", b"", 5)  # only the number of tokens is known
    members = json.loads(body_of(question, "b", pool.hold(), None))
    assert (members["isl_tokens"], members["block_hashes"], members["sequence_hashes"]) == (
        5,
        [],
        [],
    )
    assert "allowed_worker_ids" not in members


async def silent(request: object) -> Response:
    await trio.sleep_forever()
    raise AssertionError
