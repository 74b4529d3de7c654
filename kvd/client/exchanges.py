"""One call and its attempts, without I/O: its request, its retries and its result.

    request ──> sent ──┬── answered ── its status is among `statuses` ──> `result`
                       │         └── 429 or 503 with Retry-After ──> a pause, sent again
                       │         └── anything else ──> Refused
                       └── lost: no connection, or one that ended ──> a pause, sent again

Only calls that have the same effect when they come twice are sent again; others have one attempt.
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

# Most attempts of a call, the first included: enough for a daemon that restarts.
MAX_ATTEMPTS = 4
# Pause before the second attempt; each further pause is twice as long. A random part, up to half,
# is left out, so that clients which lost the same daemon do not all return at the same moment.
FIRST_PAUSE_S = 0.1
# Longest Retry-After that a call waits for; for a longer time the caller may have a better use.
MAX_RETRY_AFTER_S = 5
MAX_TEXT = 1000  # characters of a refusal that an error shows, if the refusal is not kvd's

RETRIED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)  # given a Retry-After
UNAUTHORISED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
NOT_FOUND = HTTPStatus.NOT_FOUND


class Request(NamedTuple):
    """A request to send; `target` is path and query, percent-encoded."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Reply(NamedTuple):
    """A received reply; `retry_after` is the header of that name, empty without it."""

    status: int
    retry_after: str
    body: bytes


@dataclass(slots=True)
class ClientStats:
    """Counts of a client's calls so far.

    `calls` counts calls, and `retries` their attempts after the first. `unfreed` counts
    reservations that could not be freed at their end, and last until they expire.
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
        """Takes members of `Route` and `Call`; `attempts` is 1 for calls not to be repeated."""
        self.name = name
        self.waits = waits
        self._request = request
        self._read = read
        self._statuses = statuses
        self._attempts = attempts
        self._ends = ends
        self._stats = stats
        self._begun = 0
        self._futile = 0  # attempts that certainly changed nothing: not sent, or refused
        self._reply: Reply | None = None
        self._last = ""
        stats.calls += 1

    @property
    def may_have_effect(self) -> bool:
        """Returns whether an attempt may have had its effect, answered or not."""
        return self._begun > self._futile

    def begin(self) -> Request:
        """Begins an attempt; returns the request to send."""
        self._stats.retries += self._begun > 0
        self._begun += 1
        return self._request

    def lost(self, error: Exception, was_sent: bool) -> float:
        """Notes that an attempt has no answer; returns the pause before the next attempt.

        Raises Unreachable after the last attempt.
        """
        self._futile += not was_sent
        self._last = str(error) or type(error).__name__
        if self._begun >= self._attempts:
            raise Unreachable(f"{self.name}: {self._last}") from error
        return self._pause_s()

    def answered(self, reply: Reply) -> float | None:
        """Notes a reply; returns the pause before the next attempt, None if there is none."""
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
        """Returns the answer that the last reply contains; raises Refused or WrongAnswer."""
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
        """Returns the error for a call that took too long."""
        before = f"; before that: {self._last}" if self._last else ""
        return Unreachable(f"{self.name}: no answer within {timeout_s:g} s{before}")

    def closed(self) -> Unreachable:
        return Unreachable(f"{self.name}: the client is closed")

    def too_long(self, max_bytes: int) -> WrongAnswer:
        return WrongAnswer(f"{self.name}: the answer is longer than {max_bytes:,} bytes")

    def _has_ended(self, status: int) -> bool:
        """Returns whether "not found" means that an earlier attempt has ended the thing."""
        return self._ends and status == NOT_FOUND and self.may_have_effect

    def _pause_s(self) -> float:
        return FIRST_PAUSE_S * (1 << (self._begun - 1)) * uniform(0.5, 1.0)


def _retry_after_s(reply: Reply) -> int | None:
    """Returns the header's seconds; None without it, or for a date, which kvd does not send."""
    text = reply.retry_after
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _text(body: bytes) -> str:
    """Returns the text of a refusal by kvd, or by a proxy in front of it."""
    try:
        said = json.loads(body)["error"]
    except (ValueError, LookupError, TypeError, RecursionError):  # a proxy's page, or empty
        said = body.decode(errors="replace").strip()[:MAX_TEXT]
    if isinstance(said, dict) and "message" in said:  # from the gateway, in OpenAI's form
        said = said["message"]
    return said if isinstance(said, str) else json.dumps(said)[:MAX_TEXT]
