from __future__ import annotations

from kvd.wire.cursor import Cursor
from kvd.wire.listener import Listener, ListenerStatus


def make(applied: list[bytes], cursor: Cursor | None = None) -> Listener:
    return Listener("1:0", "tcp://127.0.0.1:5557", applied.append, cursor)


def test_batches_are_applied_and_counted() -> None:
    applied: list[bytes] = []
    listener = make(applied)
    for seq, payload in [(0, b"a"), (1, b"bc"), (1, b"again"), (0, b"old"), (5, b"d"), (6, b"")]:
        listener.take(seq, payload)
    assert applied == [b"a", b"bc", b"d", b""]
    assert (listener.messages, listener.bytes) == (6, 12)
    assert (listener.gaps, listener.missing, listener.stale) == (1, 3, 2)
    assert listener.cursor.last == 6


def test_a_gap_of_any_width_is_counted() -> None:
    listener = make([])
    listener.take(2**64 - 1, b"")
    assert (listener.gaps, listener.missing) == (1, 2**64 - 1)


def test_the_place_in_the_stream_outlives_the_listener() -> None:
    applied: list[bytes] = []
    cursor = Cursor()
    make(applied, cursor).take(0, b"a")
    again = make(applied, cursor)
    again.take(0, b"a")
    again.take(1, b"b")
    assert (applied, again.stale, again.gaps) == ([b"a", b"b"], 1, 0)


def test_refused_messages_are_counted_by_reason() -> None:
    listener = make([])
    listener.take(0, b"")
    for reason in ("frame_count", "sequence_length", "frame_count"):
        listener.refuse(reason)
    assert listener.bad_frames == {"frame_count": 2, "sequence_length": 1}
    assert (listener.refused, listener.messages, listener.cursor.last) == (3, 1, 0)


def test_active_needs_a_worker_and_an_open_gate() -> None:
    listener = make([])
    assert listener.status is ListenerStatus.PENDING
    listener.connecting()
    listener.joined()
    assert listener.status is ListenerStatus.PENDING
    listener.receiving()
    assert listener.status is ListenerStatus.ACTIVE


def test_a_lost_connection_is_remembered_but_stays_active() -> None:
    listener = make([])
    listener.connecting()
    listener.receiving()
    listener.lost("handshake failed", 1.0)
    assert (listener.status, listener.last_error) == ("pending", "handshake failed")
    assert (listener.losses, listener.disconnected_since) == (0, None)
    listener.joined()
    assert (listener.connected, listener.last_error) == (True, None)
    listener.lost("connection lost", 2.0)
    listener.lost("handshake failed", 3.0)
    assert listener.status is ListenerStatus.ACTIVE
    assert (listener.connected, listener.losses, listener.disconnected_since) == (False, 1, 2.0)
    assert listener.last_error == "handshake failed"
    listener.joined()
    assert (listener.joins, listener.disconnected_since, listener.last_error) == (2, None, None)


def test_failed_is_over_with_the_next_socket() -> None:
    listener = make([])
    listener.connecting()
    listener.receiving()
    listener.joined()
    listener.failed("protocol error", 4.0)
    assert (listener.status, listener.failures, listener.losses) == ("failed", 1, 1)
    assert listener.disconnected_since == 4.0
    listener.connecting()
    assert (listener.status, listener.last_error) == ("pending", "protocol error")
    listener.joined()
    listener.receiving()
    assert (listener.status, listener.last_error) == ("active", None)
