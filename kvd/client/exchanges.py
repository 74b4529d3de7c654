"""One call and its attempts, without I/O: the request, when it is sent again, and its result.

    request ──> sent ──┬── answered ── its status is among `statuses` ──> `result`
                       │         └── 429 or 503 with Retry-After ──> a pause, sent again
                       │         └── anything else ──> Refused
                       └── lost: no connection, or one that ended ──> a pause, sent again

Only calls that are the same when they come twice are sent again; others have one attempt.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from random import uniform
from typing import Generic, NamedTuple, TypeVar

from kvd.client.errors import Refused, Unauthorised, Unreachable, WrongAnswer
from kvd.client.reading import Mismatch

T = TypeVar("T")

# Attempts that a call has, the first included: enough for a daemon that is restarted.
MAX_ATTEMPTS = 4
# Pause before the second attempt; each next one is twice as long, and up to half of it is left
# out at random, so that clients which lost the same daemon do not come back at once.
FIRST_PAUSE_S = 0.1
# Longest Retry-After that is waited for; the caller may do something better in a longer time.
MAX_RETRY_AFTER_S = 5
MAX_TEXT = 1000  # characters of a refusal that is not kvd's that its error shows

RETRIED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)  # with Retry-After
UNAUTHORISED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
NOT_FOUND = HTTPStatus.NOT_FOUND


class Request(NamedTuple):
    """A request as it is sent: `target` is path and query, percent-encoded."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Reply(NamedTuple):
    """A reply as it came: `retry_after` is the header, empty without it."""

    status: int
    retry_after: str
    body: bytes


@dataclass(slots=True)
class ClientStats:
    """Counts of a client's requests and attempts so far.

    `calls` were made, `retries` of their attempts were further ones; `unfreed` reservations could
    not be freed at their end, and last until they expire.
    """

    calls: int = 0
    retries: int = 0
    unfreed: int = 0


class Exchange(Generic[T]):
    """A call under way."""

    def __init__(
        self,
        name: str,
        request: Request,
        read: Callable[[bytes], T],
        statuses: tuple[int, ...],
        attempts: int,
        ends: bool,
        waits: bool,
        stats: ClientStats,
    ) -> None:
        """Takes what `Route` and `Call` say; `attempts` is 1 for calls that are not repeatable."""
        self.name = name
        self.waits = waits
        self._request = request
        self._read = read
        self._statuses = statuses
        self._attempts = attempts
        self._ends = ends
        self._stats = stats
        self._begun = 0
        self._futile = 0  # attempts that have certainly changed nothing: not sent, or refused
        self._reply: Reply | None = None
        self._last = ""
        stats.calls += 1

    @property
    def may_have_effect(self) -> bool:
        """Returns whether an attempt may have had its effect, answered or not."""
        return self._begun > self._futile

    def begin(self) -> Request:
        """Returns what is to be sent, the first time or again."""
        self._stats.retries += self._begun > 0
        self._begun += 1
        return self._request

    def lost(self, error: Exception, was_sent: bool) -> float:
        """Takes note that an attempt has no answer; returns the pause before the next one.

        Raises Unreachable after the last one.
        """
        self._futile += not was_sent
        self._last = str(error) or type(error).__name__
        if self._begun >= self._attempts:
            raise Unreachable(f"{self.name}: {self._last}") from error
        return self._pause_s()

    def answered(self, reply: Reply) -> float | None:
        """Takes note of a reply; returns the pause before the next attempt, None after the last."""
        self._futile += reply.status not in self._statuses
        self._reply = reply
        if reply.status in self._statuses or self._begun >= self._attempts:
            return None
        wait_s = _retry_after_s(reply)
        if reply.status not in RETRIED or wait_s is None or wait_s > MAX_RETRY_AFTER_S:
            return None
        self._last = f"{reply.status} {_text(reply.body)}"
        return wait_s + self._pause_s()

    def result(self) -> T:
        """Returns what the last reply comes to; raises Refused or WrongAnswer."""
        assert self._reply is not None
        status, _, body = self._reply
        if status not in self._statuses and not self._has_ended(status):
            refusal = Unauthorised if status in UNAUTHORISED else Refused
            raise refusal(self.name, status, _text(body), _retry_after_s(self._reply))
        try:
            return self._read(body)
        except Mismatch as wrong:
            raise WrongAnswer(f"{self.name}: {wrong.text}") from None

    def late(self, timeout_s: float) -> Unreachable:
        """Returns the error of a call that has taken too long."""
        before = f"; before that: {self._last}" if self._last else ""
        return Unreachable(f"{self.name}: no answer within {timeout_s:g} s{before}")

    def closed(self) -> Unreachable:
        return Unreachable(f"{self.name}: the client is closed")

    def too_long(self, max_bytes: int) -> WrongAnswer:
        return WrongAnswer(f"{self.name}: the answer is longer than {max_bytes:,} bytes")

    def _has_ended(self, status: int) -> bool:
        """Returns whether an attempt without an answer has done what this one finds done."""
        return self._ends and status == NOT_FOUND and self.may_have_effect

    def _pause_s(self) -> float:
        return FIRST_PAUSE_S * (1 << (self._begun - 1)) * uniform(0.5, 1.0)


def _retry_after_s(reply: Reply) -> int | None:
    """Returns what the header says in seconds; a date, which kvd does not send, counts as none."""
    text = reply.retry_after
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _text(body: bytes) -> str:
    """Returns the text of a refusal, by kvd or by something before it."""
    try:
        said = json.loads(body)["error"]
    except (ValueError, LookupError, TypeError):  # not kvd's: a proxy's page, or nothing
        said = body.decode(errors="replace").strip()[:MAX_TEXT]
    if isinstance(said, dict) and "message" in said:  # the gateway's, in OpenAI's form
        said = said["message"]
    return said if isinstance(said, str) else json.dumps(said)[:MAX_TEXT]
