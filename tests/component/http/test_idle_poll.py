"""The fast paths serve their sockets between two passes of trio."""

from __future__ import annotations

import re
import select
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from threading import Event as ThreadEvent
from threading import Semaphore, Thread
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvd.http import idle_poll
from kvd.http.busy_wait import BusyWait
from kvd.http.fast_path import FastPath, Parkable
from kvd.http.idle_poll import (
    EPOLL,
    RUNNABLE,
    WAKE,
    Turn,
    busy_wait_families,
    polled_when_idle,
)
from kvd.http.messages import Request, Response
from kvd.http.permits import PermitRules
from kvd.http.routes import Route
from kvd.http.rows import ALL, NOTHING, SOME, serve_between
from kvd.net.arrivals import arrivals
from kvd.telemetry.counts import RequestCounts
from kvd.telemetry.metrics import render
from kvd.telemetry.stretches import stretch_counts, stretches_counted
from tests.support.exposition import parse
from tests.support.loglines import logged
from tests.support.serving import PATIENT, ROUTES, Running, eventually, serving

REQUEST = b"GET /health HTTP/1.1\r\nhost: kvd\r\n\r\n"
MANY = 300

# So long that no deadline of a front passes during a test.
CALM: dict[str, float] = dict.fromkeys(("head_s", "body_s", "send_s", "idle_s", "linger_s"), 1000.0)


class Passes(trio.abc.Instrument):
    """Counts how often trio has waited for I/O."""

    def __init__(self) -> None:
        self.count = 0

    def after_io_wait(self, timeout: float) -> None:
        self.count += 1


@contextmanager
def passes() -> Iterator[Passes]:
    counted = Passes()
    trio.lowlevel.add_instrument(counted)
    try:
        yield counted
    finally:
        trio.lowlevel.remove_instrument(counted)


def ask(running: Running, request: bytes, times: int, until: ThreadEvent | None = None) -> int:
    """Sends a request again and again on one connection, from a thread; returns the number."""
    with socket.create_connection(running.address, timeout=10) as sock:
        asked = 0
        while asked < times and not (until is not None and until.is_set()):
            sock.sendall(request)
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
            asked += 1
        return asked


async def test_requests_one_by_one_do_not_wake_trio() -> None:
    async with serving(**CALM) as running:
        with passes() as counted:
            assert await trio.to_thread.run_sync(ask, running, REQUEST, MANY) == MANY
        assert running.front.stats.requests == MANY
        assert counted.count < MANY / 3


async def test_two_listeners_share_the_idle_poller() -> None:
    async with serving(**CALM) as one, serving(**CALM) as other:
        with passes() as counted:
            for _ in range(2):
                for running in (one, other):
                    assert await trio.to_thread.run_sync(ask, running, REQUEST, MANY) == MANY
        assert one.front.stats.requests == other.front.stats.requests == 2 * MANY
        assert counted.count < 4 * MANY / 3


async def test_a_deadline_is_not_late() -> None:
    """Requests keep coming until a sleeping task has woken often enough."""
    async with serving(**CALM) as running, trio.open_nursery() as nursery:
        slept = ThreadEvent()
        nursery.start_soon(
            partial(trio.to_thread.run_sync, ask, running, REQUEST, 10**9, slept),
        )
        for _ in range(20):
            await trio.sleep(0.001)
        slept.set()


async def test_other_descriptors_are_not_held_up() -> None:
    async with serving(**CALM) as running, trio.open_nursery() as nursery:
        heard = ThreadEvent()
        nursery.start_soon(
            partial(trio.to_thread.run_sync, ask, running, REQUEST, 10**9, heard),
        )
        one, other = trio.socket.socketpair()
        with one, other:
            for _ in range(20):
                await one.send(b"x")
                assert await other.recv(1) == b"x"
        heard.set()


async def test_an_answer_knows_what_had_come_before_its_question() -> None:
    """This holds however the loop waits: between its passes, or in a pass of trio."""
    events = 0

    def show_events(request: Request) -> Response:
        return Response(200, b"%d" % events)

    one, other = socket.socketpair()

    def take() -> bool:
        nonlocal events
        events += len(other.recv(1))
        return True

    routes = (*ROUTES, Route("GET", "/events", show_events, hot=True))
    with one, other:
        async with serving(PATIENT, routes, **CALM) as running, trio.open_nursery() as nursery:
            nursery.start_soon(arrivals().wait, other.fileno(), take)
            await wait_all_tasks_blocked()
            with socket.create_connection(running.address, timeout=10) as client:
                for number in range(1, MANY):
                    one.send(b"e")
                    client.sendall(REQUEST.replace(b"/health", b"/events"))
                    if number % 2:
                        await trio.lowlevel.wait_readable(client)
                    answer = await trio.to_thread.run_sync(client.recv, 4096)
                    assert answer.endswith(b"\r\n\r\n%d" % number)
            nursery.cancel_scope.cancel()


class Handled(trio.abc.Instrument):
    """Counts the requests handled between two waits for I/O, and keeps the maximum."""

    def __init__(self) -> None:
        self.most = self._count = 0

    def after_io_wait(self, timeout: float) -> None:
        self._count = 0

    def handle(self, request: Request) -> Response:
        self._count += 1
        self.most = max(self.most, self._count)
        return Response(200, b"")


async def test_of_requests_that_come_at_once_a_few_are_handled_in_a_pass() -> None:
    """Requests that wake the tasks of many connections leave turns to others."""
    handled = Handled()
    routes = (*ROUTES, Route("GET", "/app/handle", handled.handle))
    async with serving(PATIENT, routes, **CALM) as running:
        with ExitStack() as stack:
            clients = [
                stack.enter_context(socket.create_connection(running.address, timeout=10))
                for _ in range(MANY)
            ]
            await eventually(lambda: running.front.stats.connections_open == MANY)
            await wait_all_tasks_blocked()
            trio.lowlevel.add_instrument(handled)
            for client in clients:
                client.sendall(REQUEST.replace(b"/health", b"/app/handle"))
            for client in clients:
                await trio.lowlevel.wait_readable(client)
                assert client.recv(4096).startswith(b"HTTP/1.1 200")
            trio.lowlevel.remove_instrument(handled)
    assert 0 < handled.most < MANY / 4


async def test_a_task_that_a_request_has_made_runnable_runs_at_once() -> None:
    """The client sends nothing more until that task has run."""
    wanted, ran = trio.Event(), ThreadEvent()

    def want(request: Request) -> Response:
        wanted.set()
        return Response(200, b"")

    def client(running: Running) -> bool:
        with socket.create_connection(running.address, timeout=10) as sock:
            for path in (b"/health", b"/want"):  # the first one warms up
                sock.sendall(REQUEST.replace(b"/health", path))
                assert sock.recv(4096).startswith(b"HTTP/1.1 200")
            return ran.wait(10)

    routes = (*ROUTES, Route("GET", "/want", want, hot=True))
    async with serving(PATIENT, routes, **CALM) as running, trio.open_nursery() as nursery:

        async def wait() -> None:
            await wanted.wait()
            ran.set()

        nursery.start_soon(wait)
        assert await trio.to_thread.run_sync(client, running)


class Answering:
    """Receives its own messages: each of the first ones makes it send another one at once."""

    def __init__(self, answers: int) -> None:
        self.heard = 0
        self._turns = Semaphore(0)  # counts messages that were heard
        self._answers = answers
        self._one, self._other = socket.socketpair()
        self._one.setblocking(False)
        self._other.setblocking(False)
        self._others = select.epoll()
        self._others.register(self._other, select.EPOLLIN)

    def fileno(self) -> int:
        return self._other.fileno()

    def serve_ready(self, budget_ns: int, /) -> int:
        try:
            self._other.recv(1)
        except BlockingIOError:
            return NOTHING
        self.heard += 1
        if self.heard <= self._answers:
            self._one.send(b"x")
        self._turns.release()
        return ALL

    def send_after_each(self, messages: int) -> None:
        """Sends a message after each one that was heard, and two for the last."""
        for left in range(messages, 0, -1):
            self._turns.acquire()
            self._one.send(b"xx" if left == 1 else b"x")

    def stay(self, budget_ns: int = 10**9, linger_s: float = 0.01) -> tuple[bool, bool]:
        """Sends the first message; returns the result of `serve_between`."""
        with self._one, self._other, self._others:
            self._one.send(b"x")
            others = self._others.fileno()
            return serve_between([self], others, [], BusyWait(), 60.0, linger_s, budget_ns)

    async def pass_of_trio(self) -> None:
        """Sends a message that no task waits for, while this task is runnable."""
        row = polled_when_idle(self, Turn.REQUESTS, 10**9)
        with self._one, self._other, self._others, row as between:
            between.warm = True
            self._one.send(b"x")
            await trio.lowlevel.checkpoint()


async def test_what_has_come_is_served_before_runnable_tasks_go_on() -> None:
    answering = Answering(answers=0)
    await answering.pass_of_trio()
    assert answering.heard == 1


def test_what_a_turn_has_asked_for_is_served_before_trio_wakes() -> None:
    answering = Answering(answers=1)
    assert answering.stay() == (True, False)
    assert answering.heard == 2


def test_others_wait_for_a_row_of_turns_at_most() -> None:
    answering = Answering(answers=10)
    assert answering.stay(budget_ns=1) == (True, True)
    assert answering.heard == 1


def test_a_row_that_took_all_of_its_time_ends_no_stay_if_nothing_more_has_come() -> None:
    """The next message only comes while it sleeps, when the other thread can run."""
    answering = Answering(answers=0)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        Thread(target=answering.send_after_each, args=(5,), daemon=True).start()
        assert answering.stay(budget_ns=1, linger_s=60.0) == (True, True)
    finally:
        sys.setswitchinterval(usual)
    assert answering.heard == 1 + 5


# ---- awake for the next request


async def test_what_trio_did_before_a_stay_is_a_stretch_without_the_stay() -> None:
    def counted() -> int:
        return sum(sum(each.buckets) for each in stretch_counts())

    one, other = socket.socketpair()
    with one, other, stretches_counted():
        await trio.lowlevel.checkpoint()
        before = counted()
        assert serve_between([], other.fileno(), [], BusyWait(), 1.0, 0.001, 1) == (False, False)
        assert counted() == before + 1
        await trio.lowlevel.checkpoint()
        assert counted() == before + 1


def test_prompt_requests_are_waited_for_awake() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.send(b"x")  # stays unread, so the socket is always readable
        awake = BusyWait(1000)
        while not awake.found_ns:
            assert awake.wait_readable(other.fileno(), 1000)
        assert awake.lost_ns == 0


def test_who_waits_in_vain_sleeps() -> None:
    one, other = socket.socketpair()
    with one, other:
        awake = BusyWait(100)
        one.send(b"x")
        while not awake.found_ns:
            assert awake.wait_readable(other.fileno(), 1000)
        other.recv(1)
        for _ in range(20):
            assert not awake.wait_readable(other.fileno(), 0)
        found, lost = awake.found_ns, awake.lost_ns
        assert lost > 0
        for _ in range(1000):
            assert not awake.wait_readable(other.fileno(), 0)
        assert (awake.found_ns, awake.lost_ns) == (found, lost)


@pytest.mark.parametrize("longest_us", [0, 1])
def test_nobody_stays_awake_longer_than_allowed(longest_us: int) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.send(b"x")
        awake = BusyWait(longest_us)
        for _ in range(100):
            assert awake.wait_readable(other.fileno(), 1000)
        assert awake.lost_ns == 0
        assert longest_us or awake.found_ns == 0


async def test_requests_are_answered_by_who_stays_awake() -> None:
    async with serving(**CALM, busy_wait_us=1000) as running:
        found = 0.0
        while not found:
            assert await trio.to_thread.run_sync(ask, running, REQUEST, MANY) == MANY
            samples = parse(b"".join(render(busy_wait_families())).decode())
            found = samples['kvd_busy_wait_seconds_total{outcome="found"}']


def fast_path_with(wake: Any) -> FastPath:
    return FastPath({}, [], print, print, wake, print, PermitRules(), object(), RequestCounts())


async def test_answers_have_their_turn_before_events_and_these_before_requests() -> None:
    requests, more, events, answers = (fast_path_with(print) for _ in range(4))
    with (
        polled_when_idle(requests, Turn.REQUESTS, 1) as here,
        polled_when_idle(answers, Turn.ANSWERS, 1),
        polled_when_idle(more, Turn.REQUESTS, 1),
    ):
        with polled_when_idle(events, Turn.EVENTS, 1):
            assert here.pollables == [answers, events, requests, more]
        assert here.pollables == [answers, requests, more]
        assert here.turns == [Turn.ANSWERS, Turn.REQUESTS, Turn.REQUESTS]


class Counted:
    """A pollable that always has more to do."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.turns = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def serve_ready(self, budget_ns: int, /) -> int:
        self.turns += 1
        return SOME


async def test_there_is_one_row_in_a_pass_whoever_asks_for_it() -> None:
    one, other = socket.socketpair()
    with one, other:
        other.send(b"x")
        counted = Counted(one)
        with polled_when_idle(counted, Turn.EVENTS, 0) as between:  # a row of one turn
            await trio.lowlevel.checkpoint()
            assert [between.serve_row() for _ in range(3)] == [SOME] * 3
            assert counted.turns == 1
            await trio.lowlevel.checkpoint()
            between.serve_row()
            assert counted.turns == 2


async def test_the_instrument_goes_with_the_last_fast_path() -> None:
    with polled_when_idle(fast_path_with(print), Turn.REQUESTS, 1) as here:
        with polled_when_idle(fast_path_with(print), Turn.REQUESTS, 1) as same:
            assert same is here
            assert len(here.pollables) == 2
        assert len(here.pollables) == 1
    with pytest.raises(KeyError):
        trio.lowlevel.remove_instrument(here)
    with polled_when_idle(fast_path_with(print), Turn.REQUESTS, 1) as another:
        assert another is not here


def test_a_bug_between_passes_ends_the_run() -> None:
    def wake(connection: object, outcome: object) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        one, other = socket.socketpair()
        fast_path = fast_path_with(wake)
        with one, other, polled_when_idle(fast_path, Turn.REQUESTS, 10**6) as here:
            fast_path.add(other.fileno())
            assert fast_path.park(Parkable(False), other.fileno()) is None
            here.warm = True
            one.send(b"no request")
            await trio.lowlevel.wait_readable(fast_path.fileno())
            await trio.sleep_forever()

    with pytest.raises(trio.TrioInternalError) as caught:
        trio.run(main)
    cause = caught.value.__cause__
    assert isinstance(cause, BaseExceptionGroup)
    assert cause.split(ZeroDivisionError)[1] is None


# ---- the private names of trio

# All names, as dotted paths from `trio`, on the way to the private ones that kvd uses.
NAMES = sorted(
    {
        path[:end]
        for path in (EPOLL, RUNNABLE, WAKE)
        for end, at in enumerate(path + ".")
        if at == "."
    }
)


@pytest.mark.parametrize("path", NAMES)
async def test_the_installed_trio_has_this_name(path: str) -> None:
    try:
        attrgetter(path)(trio)
    except AttributeError as error:
        pytest.fail(
            f"trio {trio.__version__} has renamed trio.{path} ({error}): kvd serves without its "
            "idle poller, and slower, until kvd/http/idle_poll.py says the new name"
        )


async def test_what_the_names_stand_for() -> None:
    assert isinstance(attrgetter(EPOLL)(trio), select.epoll)
    assert len(attrgetter(RUNNABLE)(trio)) == 0  # this task runs, and there is no other


@pytest.mark.parametrize("path", NAMES)
async def test_without_a_name_requests_are_served(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trio needs its own names, so kvd is made to look up one that trio does not have."""
    for constant in ("EPOLL", "RUNNABLE", "WAKE"):
        used = getattr(idle_poll, constant)
        monkeypatch.setattr(idle_poll, constant, re.sub(rf"^{path}\b", f"{path}_of_old", used))
    with logged() as lines:
        async with serving(**CALM) as one, serving(**CALM) as other:
            for running in (one, other):
                assert await trio.to_thread.run_sync(ask, running, REQUEST, MANY) == MANY
            assert one.front.stats.requests == other.front.stats.requests == MANY
        (line,) = [line for line in lines().splitlines() if "idle_poller_off" in line]
        assert "level=warning" in line
        assert f"{path.rpartition('.')[2]}_of_old" in line
