"""The relay alone, turn by turn: several events in one batch, and which connections are kept."""

from __future__ import annotations

import resource
import select
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvd_core.relay.relay import SOME, ExchangeOutcome, Relay
from tests.support.zmtp_fakes import NOT_MY_FAULT_S

HOLD = 64 * 1024
KEPT = 1024  # bytes kept of the end of a payload
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: 2\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Turns:
    """A relay whose turns the test runs."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.noticed: list[int] = []
        self.relay = Relay(self.noticed.append)

    def engine(self) -> tuple[socket.socket, int]:
        """Returns the listening socket of a new engine, and its number."""
        listener = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(NOT_MY_FAULT_S)
        return listener, self.relay.add_engine(*listener.getsockname())

    def client(self) -> tuple[socket.socket, socket.socket]:
        """Returns the socket that the relay writes to, and the client's end of it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        return self.stack.enter_context(ours), self.stack.enter_context(theirs)

    def accept(self, listener: socket.socket) -> socket.socket:
        return self.stack.enter_context(listener.accept()[0])

    def first_request(
        self, engine: int, listener: socket.socket, client: int = -1, hold: int = HOLD
    ) -> tuple[int, socket.socket]:
        """Begins a request, on a new connection, to an engine that reads it.

        Returns the exchange and the engine's end of the connection.
        """
        exchange = self.relay.begin(engine, client, REQUEST, b"{}", hold)
        self.until(lambda: self.relay.stats()["connected"] == 1)
        stream = self.accept(listener)
        received(stream, b"{}")
        return exchange, stream

    def second_request(self) -> tuple[int, int, socket.socket]:
        """Begins a request on a connection that was kept after an answer.

        Returns the engine, the exchange and the engine's end of the connection.
        """
        listener, engine = self.engine()
        first, stream = self.first_request(engine, listener)
        stream.sendall(OK)
        self.until(lambda: self.relay.ready(first))
        self.relay.drop(first)
        return engine, self.relay.begin(engine, -1, REQUEST, b"{}", HOLD), stream

    def serve(self) -> None:
        """Serves all events that are there now."""
        while self.relay.serve_ready(1_000_000) == SOME:
            pass

    def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            assert select.select([self.relay.fileno()], [], [], NOT_MY_FAULT_S)[0]
            self.serve()


@pytest.fixture
def turns() -> Iterator[Turns]:
    with ExitStack() as stack:
        yield Turns(stack)


def received(stream: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        piece = stream.recv(65536)
        assert piece, data
        data += piece
    return data


def test_a_client_that_leaves_as_its_engine_speaks_has_left_once(turns: Turns) -> None:
    """The client's end and the engine's bytes come in one batch of events."""
    relay = turns.relay
    listener, engine = turns.engine()
    ours, theirs = turns.client()
    exchange, stream = turns.first_request(engine, listener, ours.fileno())
    stream.sendall(STREAM + b"9\r\ndata: 1\n\n\r\n")
    turns.until(lambda: relay.ready(exchange))
    relay.forward(exchange, STREAM, True)
    turns.noticed.clear()
    theirs.close()
    stream.sendall(b"9\r\ndata: 2\n\n\r\n")
    turns.serve()
    assert turns.noticed == [exchange]
    assert relay.ending(exchange).outcome is ExchangeOutcome.CLIENT_GONE
    relay.drop(exchange)


def test_the_end_of_a_payload_is_known_however_it_came(turns: Turns) -> None:
    relay = turns.relay
    listener, engine = turns.engine()
    ours, _ = turns.client()
    exchange, stream = turns.first_request(engine, listener, ours.fileno())
    payload = b"data: 1\n\n"
    stream.sendall(STREAM + b"9\r\n%b\r\n" % payload)
    turns.until(lambda: relay.ready(exchange))
    relay.forward(exchange, STREAM, True)

    def all_forwarded() -> bool:
        return relay.ending(exchange).forwarded == len(payload)

    for size in (1, 500, KEPT - 510, KEPT, 1, KEPT - 1, KEPT + 1, 3 * KEPT, 7):
        piece = bytes(size * at % 251 for at in range(size))
        payload += piece
        stream.sendall(b"%x\r\n%b\r\n" % (size, piece))
        turns.until(all_forwarded)
        assert relay.ending(exchange).tail == payload[-KEPT:]
    relay.drop(exchange)


@pytest.mark.parametrize("moved", [False, True])
def test_a_connection_is_kept_for_no_other_engine(turns: Turns, moved: bool) -> None:
    """While a request was under way, its engine's number was given to another engine."""
    relay = turns.relay
    first, engine = turns.engine()
    exchange = relay.begin(engine, -1, REQUEST, b"{}", HOLD)
    stream = turns.accept(first)
    if moved:
        second = turns.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        relay.move_engine(engine, *second.getsockname())
    else:
        relay.remove_engine(engine)
        _, again = turns.engine()
        assert again == engine
    stream.sendall(OK)
    turns.until(lambda: relay.ready(exchange))
    assert relay.answer(exchange).held == b"ok"
    assert relay.idle(engine) == 0
    relay.drop(exchange)


def test_a_request_is_sent_again_to_no_other_engine(turns: Turns) -> None:
    relay = turns.relay
    engine, exchange, stream = turns.second_request()
    assert relay.stats()["reused"] == 1
    relay.remove_engine(engine)
    turns.engine()
    received(stream, b"{}")
    stream.close()
    turns.until(lambda: relay.ended(exchange))
    assert relay.ending(exchange).outcome is ExchangeOutcome.NO_ANSWER
    relay.drop(exchange)


def test_a_request_that_its_engine_has_begun_is_not_sent_again(turns: Turns) -> None:
    """A kept connection ends behind an interim head: it had not ended before the request came."""
    relay = turns.relay
    _, exchange, stream = turns.second_request()
    received(stream, b"{}")
    stream.sendall(b"HTTP/1.1 102 Processing\r\n\r\n")
    stream.close()
    turns.until(lambda: relay.ended(exchange))
    assert relay.ending(exchange).outcome is ExchangeOutcome.BROKEN
    assert relay.stats()["sent_again"] == 0
    relay.drop(exchange)


def test_an_answer_is_heard_behind_which_the_engine_resets(turns: Turns) -> None:
    """An engine that refuses a long body closes without reading it, so that sending fails."""
    relay = turns.relay
    listener, engine = turns.engine()
    body = b"x" * (32 * 1024 * 1024)
    exchange = relay.begin(engine, -1, REQUEST, body, HOLD)
    turns.until(lambda: relay.stats()["connected"] == 1)
    stream = turns.accept(listener)
    stream.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
    stream.close()
    turns.until(lambda: relay.ready(exchange) or relay.ended(exchange))
    assert relay.ready(exchange), relay.ending(exchange)
    answer = relay.answer(exchange)
    assert (answer.status, answer.held) == (413, b"no")
    assert relay.idle(engine) == 0
    relay.drop(exchange)


@pytest.mark.parametrize("whole", [True, False])
def test_an_early_answer_is_whole_if_the_tunnel_of_its_engine_says_so(
    turns: Turns, whole: bool
) -> None:
    """The answer has no length, and comes while the request is being sent."""
    relay = turns.relay
    listener = turns.stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind("")  # Linux chooses an unused abstract name
    listener.listen()
    engine = relay.add_engine("@" + listener.getsockname()[1:].decode(), 0)
    exchange = relay.begin(engine, -1, REQUEST, b"x" * (32 * 1024 * 1024), HOLD)
    stream = turns.accept(listener)
    stream.sendall(b"HTTP/1.1 413 Too Large\r\n\r\nno")
    if whole:
        stream.shutdown(socket.SHUT_WR)
    else:
        stream.close()
    turns.until(lambda: relay.ready(exchange) or relay.ended(exchange))
    assert relay.ready(exchange) is whole
    if whole:
        assert relay.answer(exchange).held == b"no"
    else:
        assert relay.ending(exchange).outcome is ExchangeOutcome.BROKEN
    relay.drop(exchange)


def test_a_compressed_stream_is_forwarded_from_its_first_byte(turns: Turns) -> None:
    """No event can be found in it, so nothing else would show that it has begun."""
    relay = turns.relay
    listener, engine = turns.engine()
    ours, theirs = turns.client()
    exchange, stream = turns.first_request(engine, listener, ours.fileno())
    stream.sendall(STREAM.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n"))
    stream.sendall(b"2\r\n\x1f\x8b\r\n")
    turns.until(lambda: relay.ready(exchange))
    answer = relay.answer(exchange)
    assert (answer.events, answer.whole, answer.held) == (False, False, b"\x1f\x8b")
    relay.forward(exchange, b"", True)
    assert theirs.recv(100) == b"2\r\n\x1f\x8b\r\n"
    stream.sendall(b"1\r\n\x08\r\n0\r\n\r\n")
    turns.until(lambda: relay.ended(exchange))
    assert received(theirs, b"0\r\n\r\n") == b"1\r\n\x08\r\n0\r\n\r\n"
    assert relay.ending(exchange).outcome is ExchangeOutcome.COMPLETE
    relay.drop(exchange)


@pytest.mark.parametrize(
    ("kind", "reset", "outcome"),
    [
        (b"application/json", False, ExchangeOutcome.COMPLETE),
        (b"application/json", True, ExchangeOutcome.BROKEN),
        (b"text/event-stream", False, ExchangeOutcome.CLOSED),
        (b"text/event-stream", True, ExchangeOutcome.BROKEN),
    ],
)
def test_a_body_that_ends_with_its_connection(
    turns: Turns, kind: bytes, reset: bool, outcome: ExchangeOutcome
) -> None:
    relay = turns.relay
    listener, engine = turns.engine()
    ours, theirs = turns.client()
    exchange, stream = turns.first_request(engine, listener, ours.fileno(), 9)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n\r\n" % kind
    stream.sendall(head + b"data: 1\n\n")
    turns.until(lambda: relay.ready(exchange))
    assert not relay.answer(exchange).whole
    relay.forward(exchange, b"", False)
    stream.sendall(b"data: 2\n\n")
    assert theirs.recv(9) == b"data: 1\n\n"
    turns.until(lambda: relay.ending(exchange).forwarded == 18)
    if reset:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()
    turns.until(lambda: relay.ended(exchange))
    assert relay.ending(exchange).outcome is outcome
    assert theirs.recv(9) == b"data: 2\n\n"
    relay.drop(exchange)


def test_a_stream_that_nobody_gets_is_held_to_its_end(turns: Turns) -> None:
    relay = turns.relay
    listener, engine = turns.engine()
    exchange, stream = turns.first_request(engine, listener)
    stream.sendall(STREAM + b"9\r\ndata: 1\n\n\r\n")
    assert select.select([relay.fileno()], [], [], NOT_MY_FAULT_S)[0]
    turns.serve()
    assert not relay.ready(exchange)
    stream.sendall(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")
    turns.until(lambda: relay.ready(exchange))
    assert relay.answer(exchange).held == b"data: 1\n\ndata: 2\n\n"
    assert relay.idle(engine) == 1
    relay.drop(exchange)


def test_a_gateway_without_descriptors_says_nothing_of_its_engines(turns: Turns) -> None:
    """If no socket can be made, the outcome differs from that of an engine out of reach."""
    relay = turns.relay
    _, engine = turns.engine()
    ours, _ = turns.client()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        exchange = relay.begin(engine, ours.fileno(), REQUEST, b"{}", HOLD)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert relay.ending(exchange).outcome == ExchangeOutcome.NO_ROOM


def test_an_exchange_that_cannot_begin_leaves_nothing(turns: Turns) -> None:
    relay = turns.relay
    _, engine = turns.engine()
    ours, theirs = socket.socketpair()
    closed = ours.fileno()
    ours.close()
    theirs.close()
    with pytest.raises(RuntimeError, match="Bad file descriptor"):
        relay.begin(engine, closed, REQUEST, b"{}", HOLD)
    assert len(relay) == 0


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"]
)
def test_a_kept_connection_that_has_news_has_ended(turns: Turns, sent: bytes) -> None:
    """The next request takes a new connection; bytes that came unasked are not its answer."""
    relay = turns.relay
    listener, engine = turns.engine()
    for _ in range(2):
        exchange = relay.begin(engine, -1, REQUEST, b"{}", HOLD)
        stream = turns.accept(listener)
        stream.sendall(OK)
        turns.until(lambda exchange=exchange: relay.ready(exchange))  # type: ignore[misc]
        assert relay.answer(exchange).held == b"ok"
        relay.drop(exchange)
        assert relay.idle(engine) == 1
        stream.sendall(sent)
        stream.shutdown(socket.SHUT_WR)
        turns.until(lambda: relay.idle(engine) == 0)
    assert (relay.stats()["connected"], relay.stats()["sent_again"]) == (2, 0)
