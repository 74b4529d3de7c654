"""Reasons why a call has no answer; each is a ClientError."""

from __future__ import annotations


class ClientError(Exception):
    """A call has no answer; the base of everything that a call raises about a daemon."""


class Unreachable(ClientError):
    """Nobody answered: no connection, one that ended too early, or no answer in time.

    A call that is not repeatable may have had its effect all the same.
    """


class Refused(ClientError):
    """The daemon refused the call, and nothing has changed.

    `status` is HTTP's; `text` is what the daemon says; `retry_after_s` is when it may do better,
    in seconds, if it said so.
    """

    def __init__(self, call: str, status: int, text: str, retry_after_s: int | None = None) -> None:
        super().__init__(f"{call}: {status} {text}".rstrip())
        self.status = status
        self.text = text
        self.retry_after_s = retry_after_s


class Unauthorised(Refused):
    """The daemon wants a token (401), or one of another scope (403)."""


class WrongAnswer(ClientError):
    """The answer cannot be read: it is no kvd's, another face's, or that of another version."""
