"""Requests and responses as faces and servers exchange them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd_core.json.scan import ScanAhead

Headers = list[tuple[bytes, bytes]]

JSON = b"application/json"


class Form(NamedTuple):
    """The form of answers that are not JSON."""

    content_type: bytes
    write: Callable[[object], bytes]


def content_type(headers: Headers) -> str:
    """Returns the announced type of a body, in lower case and without parameters, or ""."""
    for name, value in headers:
        if name == b"content-type":
            return value.partition(b";")[0].strip().lower().decode("latin-1")
    return ""


@dataclass(slots=True)
class Request:
    """One HTTP request, its body read whole.

    `path` is the route's; `captured` is the segment in place of its placeholder, still
    percent-encoded. Header names are lower case. On an open route `known` says whether the client
    would be granted more (Scope.READ). A long body may have been scanned `ahead` for a HotHandler.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    captured: bytes = b""
    known: bool = False
    ahead: ScanAhead | None = None


@dataclass(slots=True)
class Response:
    """One HTTP response; if `body` is a generator, each item is streamed as it comes.

    No `content-type` header is sent for an empty `content_type`. `headers` are further ones, with
    lower-case names. `undo` takes back what the handler of a hot route has done; it is called if
    the client has left before its answer, or cannot be sent all of it.
    """

    status: int
    body: bytes | AsyncGenerator[bytes, None]
    content_type: bytes = JSON
    headers: Headers = field(default_factory=list)
    undo: Callable[[], None] | None = None
