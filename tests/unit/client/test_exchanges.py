"""A call's attempts: when it is sent again, after which pause, and its result."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.client.errors import Refused, Unauthorised, Unreachable, WrongAnswer
from kvd.client.exchanges import (
    FIRST_PAUSE_S,
    MAX_ATTEMPTS,
    MAX_RETRY_AFTER_S,
    ClientStats,
    Exchange,
    Reply,
    Request,
)
from kvd.client.reading import body_reader

REQUEST = Request("POST", "/x", (), b"{}")
BROKEN = ConnectionResetError("it ended")


def exchange(attempts: int = MAX_ATTEMPTS, ends: bool = False, kind: Any = int) -> Exchange[Any]:
    return Exchange(
        "POST /x", REQUEST, body_reader(kind), (200, 201), attempts, ends, False, ClientStats()
    )


def refused(status: int, body: bytes = b'{"error":"no"}', retry_after: str = "") -> Reply:
    return Reply(status, retry_after, body)


def test_an_answer_is_read() -> None:
    made = exchange()
    assert made.begin() == REQUEST
    assert made.answered(Reply(200, "", b"7")) is None
    assert made.result() == 7


def test_pauses_grow_up_to_the_last_attempt() -> None:
    made = exchange()
    for attempt in range(MAX_ATTEMPTS - 1):
        made.begin()
        longest = FIRST_PAUSE_S * 2**attempt
        assert longest / 2 <= made.lost(BROKEN, was_sent=True) <= longest
    made.begin()
    with pytest.raises(Unreachable, match="POST /x: it ended") as caught:
        made.lost(BROKEN, was_sent=True)
    assert caught.value.__cause__ is BROKEN


def test_retries_are_counted() -> None:
    stats = ClientStats()
    made = Exchange("GET /x", REQUEST, body_reader(int), (200,), 2, False, False, stats)
    made.begin()
    assert stats == ClientStats(calls=1)
    made.lost(BROKEN, was_sent=False)
    made.begin()
    assert stats == ClientStats(calls=1, retries=1)


def test_what_may_not_come_twice_has_one_attempt() -> None:
    made = exchange(attempts=1)
    made.begin()
    with pytest.raises(Unreachable):
        made.lost(BROKEN, was_sent=False)
    made = exchange(attempts=1)
    made.begin()
    assert made.answered(refused(503, retry_after="1")) is None
    with pytest.raises(Refused) as caught:
        made.result()
    assert (caught.value.status, caught.value.text, caught.value.retry_after_s) == (503, "no", 1)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_daemon_says_when_to_come_again(status: int) -> None:
    made = exchange()
    made.begin()
    pause_s = made.answered(refused(status, retry_after="2"))
    assert pause_s is not None and 2 < pause_s <= 2 + FIRST_PAUSE_S
    made.begin()
    assert made.answered(Reply(201, "", b"1")) is None
    assert made.result() == 1


@pytest.mark.parametrize(
    "reply",
    [
        refused(503),
        refused(503, retry_after=str(MAX_RETRY_AFTER_S + 1)),
        refused(503, retry_after="Tue, 24 Nov 2026 14:00:00 GMT"),
        refused(500, retry_after="1"),
        refused(404, retry_after="1"),
    ],
)
def test_other_refusals_are_final(reply: Reply) -> None:
    made = exchange()
    made.begin()
    assert made.answered(reply) is None
    with pytest.raises(Refused):
        made.result()


def test_tokens_have_an_error_of_their_own() -> None:
    for status in (401, 403):
        made = exchange()
        made.begin()
        made.answered(refused(status))
        with pytest.raises(Unauthorised):
            made.result()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":"all workers are busy"}', "all workers are busy"),
        (b'{"error":{"message":"m","code":"c"}}', "m"),
        (b'{"error":{"code":"c"}}', '{"code": "c"}'),
        (b"<html>" + b"x" * 5000, "<html>" + "x" * 994),
        (b"[1]", "[1]"),
        (b"\xff", "\ufffd"),
        (b"", ""),
    ],
)
def test_a_refusal_has_the_text_of_whoever_refuses(body: bytes, text: str) -> None:
    made = exchange()
    made.begin()
    made.answered(refused(400, body))
    with pytest.raises(Refused) as caught:
        made.result()
    assert caught.value.text == text


def test_an_end_that_is_repeated_finds_nothing() -> None:
    made = exchange(ends=True, kind=type(None))
    made.begin()
    made.lost(BROKEN, was_sent=True)
    made.begin()
    made.answered(refused(404))
    assert made.result() is None
    # The lost attempt cannot have had an effect: it was not sent, or its call ends nothing.
    for was_sent, ends in ((False, True), (True, False)):
        made = exchange(ends=ends, kind=type(None))
        made.begin()
        made.lost(BROKEN, was_sent)
        made.begin()
        made.answered(refused(404))
        with pytest.raises(Refused):
            made.result()


def test_what_may_have_an_effect() -> None:
    made = exchange()
    assert not made.may_have_effect
    made.begin()
    assert made.may_have_effect  # in case it is cancelled here
    made.lost(BROKEN, was_sent=False)
    assert not made.may_have_effect
    made.begin()
    made.answered(refused(503, retry_after="1"))
    assert not made.may_have_effect
    made.begin()
    made.lost(BROKEN, was_sent=True)
    made.begin()
    made.answered(refused(400))
    assert made.may_have_effect  # the lost attempt may have had one
    made = exchange()
    made.begin()
    made.answered(Reply(200, "", b"nonsense"))
    with pytest.raises(WrongAnswer):
        made.result()
    assert made.may_have_effect


def test_errors_say_what_came_before() -> None:
    made = exchange()
    made.begin()
    made.answered(refused(503, retry_after="1"))
    assert str(made.late(3)) == "POST /x: no answer within 3 s; before that: 503 no"
    assert str(exchange().late(0.5)) == "POST /x: no answer within 0.5 s"
