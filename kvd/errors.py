"""The failures that kvd reports to its clients, each with one HTTP status.

State and faces raise these; `kvd.http.errors` is the only place that turns one into a response.
Anything else that is raised while a request is served is a bug and is answered with 500.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Self


class KvdError(Exception):
    """An expected failure whose text is fit for the client."""

    status: ClassVar[int] = 500
    # The unknown model and tenant, for failures that report one.
    partition: tuple[str, str] | None = None
    # Whether such a failure shows that clients and engines use different names.
    counts_as_unknown: bool = True
    # Further members of the response body, for faces that promise them.
    details: Mapping[str, object] = MappingProxyType({})

    def about(self, partition: tuple[str, str]) -> Self:
        """Notes which model and tenant are unknown; returns the failure itself."""
        self.partition = partition
        return self


class BadJson(KvdError):
    """The body is not JSON."""

    status = 400


class BadRequest(KvdError):
    """The request is understood, but a value in it cannot be used (an endpoint, a parameter)."""

    status = 400


class NotFound(KvdError):
    """The request names something that is not there."""

    status = 404


class Conflict(KvdError):
    """The request contradicts what is registered already."""

    status = 409


class Misdirected(KvdError):
    """Another kvd serves the model and tenant; `owner` is its URL, if that is known."""

    status = 421

    def __init__(self, text: str, owner: str | None) -> None:
        super().__init__(text if owner is None else f"{text}, but at {owner}")
        self.owner = owner
        self.details = {"owner": owner}


class UnsupportedMedia(KvdError):
    """The body is not announced as JSON."""

    status = 415


class Invalid(KvdError):
    """The body is JSON of the wrong shape: a missing, duplicate or mistyped member."""

    status = 422


class Unavailable(KvdError):
    """A bound is reached; the same request may succeed later, perhaps after `retry_after_s`."""

    status = 503

    def __init__(self, text: str, retry_after_s: int | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


def too_many_partitions(limit: int) -> Unavailable:
    """Returns the failure of a new model and tenant beyond a face's limit."""
    return Unavailable(f"the limit of {limit} models and tenants is reached (max_partitions)")
