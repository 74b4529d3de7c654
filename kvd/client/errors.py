"""Reasons why a call has no answer; each is a ClientError."""

from __future__ import annotations


class ClientError(Exception):
    """A call has no answer; the base of all errors that calls raise about a daemon."""


class Unreachable(ClientError):
    """No daemon answered: no connection, one that ended too early, or no answer in time.

    A call that is not repeatable may have had its effect all the same.
    """


class Refused(ClientError):
    """The daemon refused the call, and nothing has changed.

    `status` is the HTTP status, `text` the daemon's explanation. `retry_after_s` is the time in
    seconds after which to try again, if the daemon named one.
    """

    def __init__(self, call: str, status: int, text: str, retry_after_s: int | None = None) -> None:
        super().__init__(f"{call}: {status} {text}".rstrip())
        self.status = status
        self.text = text
        self.retry_after_s = retry_after_s


class Unauthorised(Refused):
    """The daemon requires a token (401), or a token of another scope (403)."""


class WrongAnswer(ClientError):
    """The answer cannot be read: it is not from kvd, or from another face or version of kvd."""
