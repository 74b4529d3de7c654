"""kvd's own ZMTP: any bytes in any pieces, and real publishers of libzmq."""

from __future__ import annotations

import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvd.wire.endpoints import host_and_port
from kvd_core.zmq.drain import TOO_LARGE, Inbox, InboxSpace
from kvd_core.zmq.subscriber import LOST, NO_HANDSHAKE, Subscriber
from tests.support.little_memory import PIECE_BYTES, little_memory
from tests.support.zmtp_fakes import GREETING, large_frame, message, ready, until

FOREVER_NS = 10**12
LIMIT = 1000  # most bytes of a frame
BESIDES = 64 * 1024  # most bytes of a message's other frames
NEWER = GREETING.replace(b"\3\0", b"\3\1")
READY = b"\4\x19\5READY\x0bSocket-Type\0\0\0\3SUB"
WRONG = "protocol error"
WRONG_EARLY = "protocol error in the handshake"


def command(name: bytes, body: bytes) -> bytes:
    text = bytes([len(name)]) + name + body
    return b"\4" + bytes([len(text)]) + text


class End:
    """A subscriber, and the other end of its connection."""

    def __init__(self, topics: tuple[bytes, ...] = (b"",), limit: int = LIMIT) -> None:
        self.far, near = socket.socketpair()
        self.far.setblocking(False)
        self.subscriber = Subscriber(near.detach(), limit, topics)
        self.inbox = Inbox(InboxSpace())
        self.refused: list[str] = []
        self.heard: list[bytes] = []

    def hear(self, data: bytes) -> None:
        """Has the subscriber receive these bytes and take the messages that they complete."""
        if data:
            self.far.sendall(data)
        if not self.subscriber.joined:
            self.subscriber.shake()
        while self.subscriber.fill(self.inbox, self.refused.append, 2, FOREVER_NS):
            pass
        while self.inbox.drain(
            lambda seq, payload: self.heard.append(b"%d:%b" % (seq, payload)),
            1000, FOREVER_NS, b"", lambda publisher: None,
        ):  # fmt: skip
            pass

    def sent(self) -> bytes:
        """Returns the bytes that the subscriber has sent since the last call."""
        try:
            return self.far.recv(100_000)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self.subscriber.close()
        self.far.close()


@contextmanager
def ended(topics: tuple[bytes, ...] = (b"",), limit: int = LIMIT) -> Iterator[End]:
    end = End(topics, limit)
    try:
        yield end
    finally:
        end.close()


@pytest.fixture
def end() -> Iterator[End]:
    with ended() as made:
        yield made


def event(seq: int, payload: bytes) -> bytes:
    return message(b"kv", seq.to_bytes(8), payload)


def short(*frames: bytes) -> bytes:
    *others, last = frames
    framed = [b"\1" + bytes([len(frame)]) + frame for frame in others]
    return b"".join(framed) + b"\0" + bytes([len(last)]) + last


# ---- any bytes in any pieces

pings = st.binary(max_size=16).map(lambda context: command(b"PING", b"\0\0" + context))
events = st.builds(event, st.integers(0, 2**64 - 1), st.binary(max_size=300))
shapes = st.lists(st.binary(max_size=40), min_size=1, max_size=6).map(lambda frames: short(*frames))
speeches = st.lists(st.one_of(events, events, shapes, pings), max_size=12).map(b"".join)
cuts = st.lists(st.integers(1, 200), min_size=1, max_size=10)


def pieces(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        yield data[at : at + size]
        at, turn = at + size, turn + 1


def spoken(parts: Iterator[bytes]) -> tuple[list[bytes], list[str], str | None]:
    with ended() as end:
        for part in parts:
            if end.subscriber.fault is not None:
                break
            end.hear(part)
        return end.heard, end.refused, end.subscriber.fault


@given(speech=speeches, sizes=cuts)
def test_pieces_of_any_size_are_heard_as_the_whole(speech: bytes, sizes: list[int]) -> None:
    speech = NEWER + ready() + speech
    whole = spoken(iter([speech]))
    assert spoken(pieces(speech, sizes)) == whole
    assert whole[2] is None


@given(
    noise=st.binary(max_size=400), after=st.sampled_from([b"", NEWER, NEWER + ready()]), sizes=cuts
)
def test_noise_is_heard_the_same_in_pieces(noise: bytes, after: bytes, sizes: list[int]) -> None:
    assert spoken(pieces(after + noise, sizes)) == spoken(iter([after + noise]))


@given(speech=speeches, at=st.integers(0, 3000), bit=st.integers(0, 7), sizes=cuts)
def test_a_flipped_bit_is_heard_the_same_in_pieces(
    speech: bytes, at: int, bit: int, sizes: list[int]
) -> None:
    data = bytearray(NEWER + ready() + speech)
    data[at % len(data)] ^= 1 << bit
    assert spoken(pieces(bytes(data), sizes)) == spoken(iter([bytes(data)]))


def test_a_message_larger_than_one_read_is_put_together(end: End) -> None:
    frames = [bytes([n]) * LIMIT for n in range(60)]
    end.hear(NEWER + ready())
    for part in pieces(message(*frames) + event(7, b"x"), [1, 30_000, 700]):
        end.hear(part)
    assert (end.refused, end.heard) == (["frame_count"], [b"7:x"])


# ---- the handshake


def test_the_greeting_comes_first_and_the_rest_in_its_turn(end: End) -> None:
    end.hear(b"")
    assert end.sent() == GREETING.replace(b"\3\0", b"\3\1")
    end.hear(NEWER[:63])
    assert end.sent() == b""
    end.hear(NEWER[63:])
    assert (end.sent(), end.subscriber.joined) == (READY, False)
    end.hear(ready(b"XPUB"))
    assert (end.sent(), end.subscriber.joined) == (command(b"SUBSCRIBE", b""), True)
    end.subscriber.unsubscribe()
    assert end.sent() == command(b"CANCEL", b"")


def test_zmtp_3_0_is_told_of_topics_by_messages() -> None:
    with ended((b"a", b"bc")) as end:
        end.hear(GREETING + ready())
        assert end.sent().endswith(READY + b"\0\2\1a\0\3\1bc")
        assert not end.subscriber.answers_pings


EARLY = {
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n",
    "no signature": b"\xff" + bytes(9),
    "ZMTP 2": b"\xff" + bytes(8) + b"\x7f\1",
    "CURVE": GREETING.replace(b"NULL\0", b"CURVE"),
    "a longer name": GREETING.replace(b"NULL\0", b"NULLS"),
    "a message": GREETING + short(b"x"),
    "no name": GREETING + b"\4\0",
    "name beyond the end": GREETING + b"\4\3\5RE",
    "another command": GREETING + command(b"HELLO", b""),
    "no socket type": GREETING + command(b"READY", b""),
    "another socket type": GREETING + ready(b"REP"),
    "a property beyond the end": GREETING + command(b"READY", b"\x0bSocket-Type\0\0\1\0PUB"),
    "unknown flags": GREETING + b"\x08\0",
}


@pytest.mark.parametrize("kind", EARLY)
def test_what_is_no_handshake(end: End, kind: str) -> None:
    end.hear(EARLY[kind])
    assert end.subscriber.fault in (WRONG_EARLY, WRONG)
    assert not end.subscriber.joined


def test_a_refusal_is_told(end: End) -> None:
    end.hear(GREETING + command(b"ERROR", b"\x03400"))
    assert end.subscriber.fault == "authentication failed in the handshake"


def test_other_properties_and_spellings_are_passed_over(end: End) -> None:
    body = b"\1x\0\0\0\1y\x0bSOCKET-type\0\0\0\4XPUB\x08Identity\0\0\0\0"
    end.hear(NEWER + command(b"READY", body) + event(1, b"a"))
    assert end.heard == [b"1:a"]


@pytest.mark.parametrize(
    ("received", "fault"),
    [(b"", NO_HANDSHAKE), (NEWER + ready(), LOST)],
    ids=["early", "late"],
)
def test_an_end_is_told_behind_what_came_before(received: bytes, fault: str) -> None:
    with ended() as end:
        end.hear(received)
        if received:
            end.far.sendall(event(1, b"a"))
        end.far.shutdown(socket.SHUT_WR)
        end.hear(b"")
        end.hear(b"")
        assert (end.subscriber.fault, end.heard) == (fault, [b"1:a"] if received else [])


# ---- messages and commands


def test_a_ping_is_answered_between_frames_too(end: End) -> None:
    first, second, last = b"\1\1k", b"\1\x08" + bytes(8), b"\0\1x"
    end.hear(NEWER + ready())
    end.sent()
    end.hear(first + command(b"PING", b"\0\1abc") + second)
    assert end.sent() == command(b"PONG", b"abc")
    end.hear(command(b"PING", b"\0\1") + last)
    assert end.sent() == command(b"PONG", b"")
    assert end.heard == [b"0:x"]


def test_unknown_commands_are_passed_over(end: End) -> None:
    end.hear(NEWER + ready() + command(b"DANCE", b"x") + event(1, b"a"))
    assert (end.heard, end.subscriber.fault) == ([b"1:a"], None)


LARGE_FRAMES = {
    "a frame beyond the limit": large_frame(LIMIT + 1),
    "a frame beyond all limits": large_frame(2**64 - 1),
    "frames beyond the limit": (b"\3" + struct.pack(">Q", LIMIT) + bytes(LIMIT))
    * (BESIDES // LIMIT + 2),
}


@pytest.mark.parametrize("kind", LARGE_FRAMES)
def test_a_message_that_is_too_large_ends_the_connection_and_is_counted(
    end: End, kind: str
) -> None:
    end.hear(NEWER + ready() + event(1, b"a"))
    end.hear(LARGE_FRAMES[kind])
    end.hear(b"")
    assert (end.subscriber.fault, end.heard) == ("message too large", [b"1:a"])
    assert end.refused == [TOO_LARGE]


LATE = {
    "a command beyond the limit": b"\6" + struct.pack(">Q", BESIDES + 1),
    "commands between frames, beyond the limit": b"\1\1k"
    + command(b"DANCE", bytes(200)) * ((LIMIT + BESIDES) // 200),
    "unknown flags": b"\x10\0",
    "a command with more": b"\5\0",
    "a ping that is too short": command(b"PING", b"\0"),
    "a ping that is too long": command(b"PING", bytes(19)),
}


@pytest.mark.parametrize("kind", LATE)
def test_what_breaks_the_protocol(end: End, kind: str) -> None:
    end.hear(NEWER + ready() + event(1, b"a"))
    end.hear(LATE[kind])
    assert (end.subscriber.fault, end.heard) == (WRONG, [b"1:a"])


# ---- large messages

LARGE = 3 * 2**20  # bytes; such a message has memory of its own


def pump(end: End, data: bytes) -> None:
    """Has the subscriber receive more than its connection holds, into the inbox."""
    rest = memoryview(data)
    while rest:
        with suppress(BlockingIOError):
            rest = rest[end.far.send(rest) :]
        while end.subscriber.fill(end.inbox, end.refused.append, 2, FOREVER_NS):
            pass


def test_large_messages_come_whole_among_small_ones() -> None:
    ids = [b"p" * 16, b"q" * 16]
    large = [bytes([at]) * (LARGE + at) for at in range(4)]
    sent = [
        event(1, b"a"),
        event(2, large[0]),
        event(3, b"b"),
        message(b"t" * 60_000, (4).to_bytes(8) + ids[0], large[1]),
        message(b"t" * LARGE, (5).to_bytes(8), b"c"),
        message(b"", (6).to_bytes(8) + ids[1], large[2]) + short(b"", b"", b""),
        event(7, large[3]),
        event(8, b"d"),
    ]
    heard: list[tuple[int, bytes]] = []
    met: list[bytes] = []
    with ended(limit=2 * LARGE) as end:
        pump(end, NEWER + ready() + b"".join(sent))
        speaker = b""
        while end.inbox.drain(
            lambda *each: heard.append(each), 100, FOREVER_NS, speaker, met.append
        ):
            speaker = met[-1] if met else b""
        assert end.refused == ["sequence_length"]
        assert end.inbox.size_bytes == 0
    assert [seq for seq, _ in heard] == list(range(1, 9))
    assert [payload for _, payload in heard] == [
        b"a", large[0], b"b", large[1], b"c", large[2], large[3], b"d"
    ]  # fmt: skip
    assert met == [ids[0], b"", ids[1], b""]


def test_a_large_message_without_room_replaces_the_newest_one() -> None:
    with ended(limit=4 * LARGE) as end:
        end.inbox = Inbox(InboxSpace(), 0, 2 * LARGE + 4096)
        pump(end, NEWER + ready() + event(1, bytes(LARGE)) + event(2, bytes(LARGE)))
        pump(end, event(3, b"c" * (LARGE + 1)))
        assert (end.inbox.messages, end.inbox.dropped, end.inbox.has_hole) == (2, 1, False)
        pump(end, event(4, bytes(3 * LARGE)))
        assert (end.inbox.messages, end.inbox.dropped, end.inbox.has_hole) == (2, 2, True)
        end.hear(b"")
        assert end.heard == [b"1:" + bytes(LARGE), b"3:" + b"c" * (LARGE + 1)]


def test_a_large_message_is_in_memory_only_once_until_it_is_taken() -> None:
    size = 10 * LARGE
    whole = event(1, b"x" * size)
    with ended(limit=size) as end:
        pump(end, NEWER + ready())
        with little_memory(2 * size):  # memory of its own may be twice as large as the message
            pump(end, whole)
        end.hear(b"")
        assert end.heard == [b"1:" + b"x" * size]


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_small_messages_do_not_keep_the_memory_of_a_large_one_before_them() -> None:
    size = 12 * LARGE  # the heap would not keep it, either
    with ended(limit=size) as end:
        pump(end, NEWER + ready())
        before = mapped_bytes()
        pump(end, event(1, bytes(size)) + event(2, b"b") + event(3, b"c"))
        while end.inbox.messages == 3:
            end.inbox.drain(lambda seq, payload: None, 1, FOREVER_NS, b"", None)
        pump(end, event(4, b"d"))
        assert end.inbox.messages == 3
        assert mapped_bytes() - before < LARGE
        end.hear(b"")
        assert end.heard == [b"2:b", b"3:c", b"4:d"]


# ---- a full heap


def test_without_memory_for_a_part_of_a_message_the_connection_is_lost() -> None:
    whole = event(2, bytes(2 * PIECE_BYTES))
    with ended(limit=len(whole)) as end:
        end.hear(NEWER + ready() + event(1, b"a"))
        end.far.sendall(whole[: PIECE_BYTES + 8192])
        with little_memory(0):
            for _ in range(2):  # what is left of the connection can still be asked
                assert not end.subscriber.fill(end.inbox, end.refused.append, 2, FOREVER_NS)
        assert (end.subscriber.fault, end.subscriber.joined) == (LOST, False)
        assert (end.heard, end.inbox.messages) == ([b"1:a"], 0)


# ---- publishers of libzmq


def connected(endpoint: str, topics: tuple[bytes, ...]) -> Subscriber:
    tcp = host_and_port(endpoint)
    near = socket.socket(socket.AF_UNIX if tcp is None else socket.AF_INET)
    near.connect(tcp or endpoint.removeprefix("ipc://"))
    return Subscriber(near.detach(), LIMIT, topics)


@pytest.mark.parametrize("kind", [zmq.PUB, zmq.XPUB])
@pytest.mark.parametrize("place", ["tcp://127.0.0.1:0", "ipc://{tmp_path}/kv.sock"])
async def test_libzmqs_publishers_are_heard(
    context: zmq.Context, tmp_path: Path, kind: int, place: str
) -> None:
    with context.socket(kind) as publisher:
        publisher.linger = 0
        publisher.heartbeat_ivl, publisher.heartbeat_timeout = 20, 60_000
        publisher.bind(place.format(tmp_path=tmp_path))
        subscriber = connected(publisher.last_endpoint.decode(), (b"kv", b"b"))
        inbox = Inbox(InboxSpace())
        heard: list[bytes] = []

        def take(last: bytes) -> bool:
            if not subscriber.joined:
                subscriber.shake()
            subscriber.fill(inbox, print, 1000, FOREVER_NS)
            inbox.drain(
                lambda seq, payload: heard.append(payload), 1000, FOREVER_NS, b"", print
            )  # fmt: skip
            return last in heard

        def ask(last: bytes) -> bool:
            """Sends a message; libzmq does not report when a subscription has taken effect."""
            publisher.send_multipart([b"b", bytes(8), last])
            return take(last)

        await until(lambda: ask(b"first"))
        for topic, payload in ((b"kv-1", b"a"), (b"x", b"unasked"), (b"b2", b"c" * 500)):
            publisher.send_multipart([topic, bytes(8), payload])
        publisher.send_multipart([b"kv", bytes(8), b"last"])
        await until(lambda: take(b"last"))
        assert [each for each in heard if each != b"first"] == [b"a", b"c" * 500, b"last"]
        reads = subscriber.reads  # from now on only pings come
        await until(lambda: take(b"last") and subscriber.reads >= reads + 3)
        assert subscriber.fault is None
        subscriber.unsubscribe()
        subscriber.close()
        if kind == zmq.XPUB:
            asked = [publisher.recv() for _ in range(4)]
            assert asked == [b"\1kv", b"\1b", b"\0kv", b"\0b"]
