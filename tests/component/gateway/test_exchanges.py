"""The relay over real sockets, with an engine whose every byte the test determines."""

from __future__ import annotations

import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from kvd.gateway.exchanges import ExchangeFailed, RelayLimits
from kvd_core.relay.relay import NO_CLIENT, ExchangeOutcome, Relay
from tests.support.relaying import Script, cut_off, relaying
from tests.support.zmtp_fakes import until

HOLD = 64 * 1024
KEPT = 1024  # bytes kept of the end of a payload
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: 2\r\n\r\n"


async def read_request(stream: trio.SocketStream) -> bytes:
    """Returns a request with its body of two bytes, or b"" if the connection has ended."""
    data = b""
    while not data.endswith(b"\r\n\r\n{}"):
        piece = await stream.receive_some()
        if not piece:
            return b""
        data += bytes(piece)
    return data


def answering(*pieces: bytes) -> Script:
    """Returns a script that answers one request piece by piece and closes."""

    async def script(stream: trio.SocketStream) -> None:
        await read_request(stream)
        for piece in pieces:
            await stream.send_all(piece)
            await trio.lowlevel.checkpoint()

    return script


@asynccontextmanager
async def client() -> AsyncIterator[tuple[int, trio.SocketStream]]:
    """Yields the descriptor that the relay writes to, and the client's end of the stream."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours:
        async with trio.SocketStream(trio.socket.from_stdlib_socket(theirs)) as stream:
            yield ours.fileno(), stream


async def received(stream: trio.SocketStream, end: bytes) -> bytes:
    data = bytearray()
    while not data.endswith(end):
        piece = await stream.receive_some()
        assert piece, data
        data += piece
    return bytes(data)


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunks(*payloads: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in payloads)


async def test_a_whole_answer_waits_until_it_is_whole() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n"
    script = answering(head, b"01234", b"56789")
    async with relaying(script) as (exchanges, engine, _), client() as (fd, stream):
        with exchanges.begin(engine, REQUEST, b"{}", HOLD, fd) as exchange:
            answer = await exchange.begins()
            assert answer is not None
            assert (answer.status, answer.head, answer.held) == (200, head, b"0123456789")
            assert (answer.whole, answer.events) == (True, False)
            exchange.forward(head, chunked=False)
            ending = await exchange.ends()
        assert ending.outcome is ExchangeOutcome.COMPLETE
        assert ending.forwarded == 10
        assert ending.tail == b"0123456789"
        assert await received(stream, b"9") == head + b"0123456789"


# Events that say nothing of the answer.
OPENING = (
    b": hello\n\n",
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices": [{"delta": {"content": "", "role": "assistant"}}]}\r\n\r\n',
)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("opening", OPENING)
async def test_a_stream_is_held_until_its_first_event_with_data(step: int, opening: bytes) -> None:
    events = [opening, b"data: 1\r\n\r\n", b'data: {"x":2}\n\n', b"data: [DONE]\n\n"]
    data = STREAM + chunks(*events) + b"0\r\n\r\n"
    script = answering(*(data[at : at + step] for at in range(0, len(data), step)))
    async with relaying(script) as (exchanges, engine, _), client() as (fd, stream):
        with exchanges.begin(engine, REQUEST, b"{}", HOLD, fd) as exchange:
            answer = await exchange.begins()
            assert answer is not None
            assert answer.events
            assert answer.held.startswith(opening + b"data: 1\r\n")
            exchange.forward(STREAM, chunked=True)
            ending = await exchange.ends()
        assert ending.outcome is ExchangeOutcome.COMPLETE
        assert ending.tail == b"".join(events)
        got = await received(stream, b"0\r\n\r\n")
        assert got.startswith(STREAM)
        assert dechunked(got.removeprefix(STREAM)) == b"".join(events)


async def test_a_stream_that_names_the_role_with_each_token_begins_with_the_second() -> None:
    """So some engines send their reasoning, beside an empty text."""
    delta = b'data: {"choices":[{"delta":{"role":"assistant","content":"","reasoning":"%b"}}]}\n\n'
    script = answering(STREAM + chunks(delta % b"a"), chunks(delta % b"b"))
    async with relaying(script) as (exchanges, engine, _), client() as (fd, _):
        with exchanges.begin(engine, REQUEST, b"{}", HOLD, fd) as exchange:
            answer = await exchange.begins()
            assert answer is not None
            assert answer.held == delta % b"a" + delta % b"b"


def dechunked(data: bytes) -> bytes:
    pieces, at = [], 0
    while True:
        start = data.index(b"\r\n", at) + 2
        end = start + int(data[at:start], 16)
        assert data[end : end + 2] == b"\r\n"
        at = end + 2
        if start == end:
            assert at == len(data)
            return b"".join(pieces)
        pieces.append(data[start:end])


@pytest.mark.parametrize(
    ("sent", "outcome"),
    [
        (b"", ExchangeOutcome.NO_ANSWER),
        (b"HTTP/1.1 200 OK\r\n", ExchangeOutcome.BROKEN),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n12", ExchangeOutcome.BROKEN),
        (STREAM + b"5\r\ndata:\r\n", ExchangeOutcome.BROKEN),
        (STREAM + b"5x\r\n", ExchangeOutcome.MALFORMED),
        (STREAM + b"\r\n", ExchangeOutcome.MALFORMED),
        (b"HTT", ExchangeOutcome.BROKEN),
        (b"SSH-2.0-OpenSSH\r\n", ExchangeOutcome.MALFORMED),
        (b"HTTP/1.1 100 Continue\r\n\r\nSSH", ExchangeOutcome.MALFORMED),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
            ExchangeOutcome.MALFORMED,
        ),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
            ExchangeOutcome.MALFORMED,
        ),
        (b"HTTP/1.1 101 Switching\r\n\r\n", ExchangeOutcome.MALFORMED),
        (b"HTTP/1.1 2000 OK\r\ncontent-length: 0\r\n\r\n", ExchangeOutcome.MALFORMED),
        (b"HTTP/1.1 200 OK\r\ncontent-length : 0\r\n\r\n", ExchangeOutcome.MALFORMED),
        (b"HTTP/1.1 200 OK\r\nx: 1\r\n folded: 2\r\n\r\n", ExchangeOutcome.MALFORMED),
        (b"HTTP/1.1 200 OK\r\nx: 1\rset-cookie: 2\r\n\r\n", ExchangeOutcome.MALFORMED),
        (b"HTTP/1.1 200 OK\r\nx: 1\0\r\n\r\n", ExchangeOutcome.MALFORMED),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            ExchangeOutcome.MALFORMED,
        ),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000, ExchangeOutcome.MALFORMED),
        (b"HTTP/1.1 102 Processing\r\n\r\n" * 3000, ExchangeOutcome.MALFORMED),
    ],
)
async def test_an_engine_that_breaks_off_costs_the_client_nothing(
    sent: bytes, outcome: ExchangeOutcome
) -> None:
    async with relaying(answering(sent)) as (exchanges, engine, _), client() as (fd, stream):
        with exchanges.begin(engine, REQUEST, b"{}", HOLD, fd) as exchange:
            assert await exchange.begins() is None
            assert exchange.ending().outcome is outcome
        with trio.move_on_after(0):
            pytest.fail(f"the client was sent {await stream.receive_some()!r}")


async def test_nobody_there_is_an_end_at_once() -> None:
    async with relaying() as (exchanges, _, _engine):
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            engine = exchanges.relay.add_engine("127.0.0.1", bound.getsockname()[1])
            with pytest.raises(ExchangeFailed, match="unreachable"):
                await exchanges.ask(engine, REQUEST, b"{}", HOLD)


async def test_a_connection_is_kept_and_used_again() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    async def twice(stream: trio.SocketStream) -> None:
        while await read_request(stream):
            await stream.send_all(answer)

    async with relaying(twice) as (exchanges, engine, played):
        for _ in range(3):
            assert (await exchanges.ask(engine, REQUEST, b"{}", HOLD)).held == b"ok"
        assert played.connections == 1
        assert exchanges.relay.idle(engine) == 1
        stats = exchanges.relay.stats()
        assert (stats["connected"], stats["reused"], stats["sent_again"]) == (1, 2, 0)


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        (b"", 1),
        (b"content-length: 0\r\n", 1),
        (b"content-length: 5\r\n", 0),
        (b"transfer-encoding: chunked\r\n", 0),
    ],
)
async def test_an_answer_that_should_have_no_body_may_have_one(lines: bytes, kept: int) -> None:
    async def once(stream: trio.SocketStream) -> None:
        await read_request(stream)
        await stream.send_all(b"HTTP/1.1 204 No Content\r\n%b\r\n" % lines)
        await read_request(stream)

    async with relaying(once) as (exchanges, engine, _):
        answer = await exchanges.ask(engine, REQUEST, b"{}", HOLD)
        assert (answer.status, answer.whole, answer.held) == (204, True, b"")
        assert exchanges.relay.idle(engine) == kept


async def test_an_error_is_no_stream_of_events() -> None:
    """It is held until it is whole, so that another engine can be tried."""
    refusal = STREAM.replace(b"200 OK", b"503 Busy") + chunks(b"data: 1\n\n")
    rest = chunks(b"data: 2\n\n") + b"0\r\n\r\n"
    script = answering(refusal, rest)
    async with relaying(script) as (exchanges, engine, _), client() as (fd, _stream):
        with exchanges.begin(engine, REQUEST, b"{}", HOLD, fd) as exchange:
            answer = await exchange.begins()
            assert answer is not None
            assert (answer.whole, answer.events) == (True, False)
            assert answer.held == b"data: 1\n\ndata: 2\n\n"


async def test_a_kept_connection_that_closes_under_a_request_is_replaced_unnoticed() -> None:
    """The engine answers the first request, reads the second and closes without an answer."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    async def once(stream: trio.SocketStream) -> None:
        await read_request(stream)
        await stream.send_all(answer)
        await read_request(stream)

    async with relaying(once, once) as (exchanges, engine, played):
        for _ in range(2):
            assert (await exchanges.ask(engine, REQUEST, b"{}", HOLD)).held == b"ok"
        assert played.connections == 2
        assert exchanges.relay.stats()["sent_again"] == 1


async def test_an_engine_whose_host_is_gone_says_so_by_its_silence() -> None:
    """A busy engine is as silent, but its host's kernel acknowledges what it gets."""
    once = RelayLimits(gone_s=1)
    event = b"data: 1\n\n"

    async def waits(stream: trio.SocketStream) -> None:
        await read_request(stream)
        cut_off(stream)
        await trio.sleep_forever()

    async def streams(stream: trio.SocketStream) -> None:
        await read_request(stream)
        await stream.send_all(STREAM + chunks(event))
        cut_off(stream)
        await trio.sleep_forever()

    async def is_kept(stream: trio.SocketStream) -> None:
        await read_request(stream)
        cut_off(stream)
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await trio.sleep_forever()

    scripts = waits, streams, is_kept, answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    async with relaying(*scripts, limits=once) as (exchanges, engine, played), client() as (fd, _):
        with exchanges.begin(engine, REQUEST, b"{}", HOLD, fd) as exchange:
            assert await exchange.begins() is None
            assert exchange.ending().outcome is ExchangeOutcome.NO_ANSWER
        with exchanges.begin(engine, REQUEST, b"{}", HOLD, fd) as exchange:
            assert await exchange.begins() is not None
            exchange.forward(STREAM, chunked=True)
            assert (await exchange.ends()).outcome is ExchangeOutcome.BROKEN
        assert (await exchanges.ask(engine, REQUEST, b"{}", HOLD)).held == b"ok"
        assert (await exchanges.ask(engine, REQUEST, b"{}", HOLD)).held == b""
        assert (played.connections, exchanges.relay.stats()["sent_again"]) == (4, 1)


async def test_a_client_that_leaves_aborts_its_engine() -> None:
    left = trio.Event()

    async def endless(stream: trio.SocketStream) -> None:
        await read_request(stream)
        await stream.send_all(STREAM + chunks(b"data: 1\n\n"))
        assert not await stream.receive_some()
        left.set()

    async with relaying(endless) as (exchanges, engine, _), client() as (fd, stream):
        with exchanges.begin(engine, REQUEST, b"{}", HOLD, fd) as exchange:
            assert await exchange.begins() is not None
            exchange.forward(STREAM, chunked=True)
            await received(stream, b"data: 1\n\n\r\n")
            await stream.aclose()
            assert (await exchange.ends()).outcome is ExchangeOutcome.CLIENT_GONE
            await left.wait()


async def test_an_engine_waits_for_a_client_that_does_not_read() -> None:
    """Bytes that neither the client nor the relay's window takes stay in the engine's socket."""
    piece = b"x" * 65536
    sent = 0

    async def flood(stream: trio.SocketStream) -> None:
        nonlocal sent
        await read_request(stream)
        await stream.send_all(STREAM + chunks(b"data: 1\n\n"))
        for _ in range(400):
            await stream.send_all(chunks(piece))
            sent += len(piece)
        await stream.send_all(b"0\r\n\r\n")

    async with relaying(flood) as (exchanges, engine, _), client() as (fd, stream):
        with exchanges.begin(engine, REQUEST, b"{}", HOLD, fd) as exchange:
            assert await exchange.begins() is not None
            exchange.forward(STREAM, chunked=True)
            await until(lambda: exchanges.relay.stats()["pauses"] > 0)
            assert sent < 400 * len(piece)
            got = await received(stream, b"0\r\n\r\n")
            ending = await exchange.ends()
        assert ending.outcome is ExchangeOutcome.COMPLETE
        assert dechunked(got.removeprefix(STREAM)) == b"data: 1\n\n" + piece * 400
        assert ending.forwarded == 9 + 400 * len(piece)
        assert len(ending.tail) == KEPT


async def test_what_was_sent_before_an_engine_broke_reaches_the_client_first() -> None:
    script = answering(STREAM + chunks(b"data: 1\n\n", b"data: 2\n\n"), b"3\r\nda")
    async with relaying(script) as (exchanges, engine, _), client() as (fd, stream):
        with exchanges.begin(engine, REQUEST, b"{}", HOLD, fd) as exchange:
            assert await exchange.begins() is not None
            exchange.forward(STREAM, chunked=True)
            assert (await exchange.ends()).outcome is ExchangeOutcome.BROKEN
        assert b"data: 2\n\n" in await received(stream, b"da\r\n")


async def test_a_silent_stream_is_filled_between_events_alone() -> None:
    filler = b": keep-alive\n\n"
    half, rest = trio.Event(), trio.Event()

    async def slow(stream: trio.SocketStream) -> None:
        await read_request(stream)
        await stream.send_all(STREAM + chunks(b"data: 1\n\n"))
        await half.wait()
        await stream.send_all(chunks(b"data: 2"))
        await rest.wait()
        await stream.send_all(chunks(b"\n\n") + b"0\r\n\r\n")

    limits = RelayLimits(filler_s=1e-9)  # shorter than the pause between two sweeps
    async with relaying(slow, limits=limits) as (exchanges, engine, _), client() as (fd, stream):
        relay = exchanges.relay

        def swept() -> int:
            relay.sweep()
            return relay.stats()["fillers"]

        with exchanges.begin(engine, REQUEST, b"{}", HOLD, fd) as exchange:
            assert await exchange.begins() is not None
            exchange.fill(filler)
            exchange.forward(STREAM, chunked=True)
            await until(lambda: swept() >= 2)
            half.set()
            got = await received(stream, b"data: 2\r\n")
            filled = relay.stats()["fillers"]
            relay.sweep()
            assert relay.stats()["fillers"] == filled
            rest.set()
            ending = await exchange.ends()
            got += await received(stream, b"0\r\n\r\n")
        assert ending.outcome is ExchangeOutcome.COMPLETE
        assert ending.tail == b"data: 1\n\ndata: 2\n\n"  # as the engine sent it, without filler
        body = dechunked(got.removeprefix(STREAM))
        assert body == b"data: 1\n\n" + filler * filled + b"data: 2\n\n"


async def test_silence_ends_an_exchange() -> None:
    async def silent(stream: trio.SocketStream) -> None:
        await read_request(stream)
        await stream.receive_some()

    limits = RelayLimits(silence_s=0.05)
    async with relaying(silent, limits=limits) as (exchanges, engine, _):
        with pytest.raises(ExchangeFailed, match="nothing was sent"):
            await exchanges.ask(engine, REQUEST, b"{}", HOLD)


async def test_a_body_ends_with_the_connection_where_nothing_else_says_so() -> None:
    script = answering(b"HTTP/1.0 200 OK\r\n\r\n", b"abc", b"def")
    async with relaying(script) as (exchanges, engine, _):
        answer = await exchanges.ask(engine, REQUEST, b"{}", HOLD)
        assert (answer.held, answer.whole) == (b"abcdef", True)
        assert exchanges.relay.idle(engine) == 0


async def test_an_answer_before_the_request_is_sent_counts() -> None:
    """An engine that refuses a long body answers before it has read it."""

    async def early(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await trio.sleep_forever()

    body = b"x" * (32 * 1024 * 1024)
    async with relaying(early) as (exchanges, engine, _):
        answer = await exchanges.ask(engine, REQUEST, body, HOLD)
        assert (answer.status, answer.held) == (413, b"no")
        assert exchanges.relay.idle(engine) == 0


def test_an_exchange_that_python_has_no_memory_for_does_not_go_on() -> None:
    """It would send memory that the request's body had, but has no longer."""
    heap = pytest.importorskip("_testcapi", reason="makes single allocations fail")
    relay = Relay(lambda exchange: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        engine = relay.add_engine("127.0.0.1", server.getsockname()[1])
        for allocation in itertools.count():
            heap.set_nomemory(allocation, allocation + 1)
            try:
                relay.begin(engine, NO_CLIENT, REQUEST, b"{}", HOLD)
            except MemoryError:
                assert len(relay) == 0
            else:
                break
            finally:
                heap.remove_mem_hooks()
    assert (len(relay), allocation > 0) == (1, True)
