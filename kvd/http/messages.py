"""Requests and responses as faces and servers exchange them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

Headers = list[tuple[bytes, bytes]]

JSON = b"application/json"


class Form(NamedTuple):
    """The form of answers that are not JSON."""

    content_type: bytes
    write: Callable[[object], bytes]


def content_type(headers: Headers) -> str:
    """Returns what a body is announced as, in lower case and without parameters; "" unsaid."""
    for name, value in headers:
        if name == b"content-type":
            return value.partition(b";")[0].strip().lower().decode("latin-1")
    return ""


@dataclass(slots=True)
class Request:
    """One HTTP request, its body read whole.

    `path` is the route's; `captured` is the segment that stands for its placeholder, still
    percent-encoded. Header names are lower case. On an open route `known` says whether who asks
    could ask for more (Scope.READ).
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    captured: bytes = b""
    known: bool = False


@dataclass(slots=True)
class Response:
    """One HTTP response; an iterator as `body` is streamed in chunks of its own choosing.

    No `content-type` header is sent for an empty `content_type`. `headers` are further ones, with
    lower-case names. `undo` takes back what the handler of a hot route has done, if its client
    has left before its answer, or cannot be sent all of it.
    """

    status: int
    body: bytes | AsyncIterator[bytes]
    content_type: bytes = JSON
    headers: Headers = field(default_factory=list)
    undo: Callable[[], None] | None = None
