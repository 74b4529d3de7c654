"""What faces and servers exchange: a request, a response, a route.

A face is a tuple of routes. The front serves the hot ones directly and the Quart application
serves all of them; both call the same handler.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from enum import IntFlag
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvd.http.relayed import RelayedRequest

Headers = list[tuple[bytes, bytes]]

JSON = b"application/json"


class Form(NamedTuple):
    """How answers are written that are no JSON."""

    content_type: bytes
    write: Callable[[object], bytes]


def content_type(headers: Headers) -> str:
    """Returns what a body is announced as, in lower case and without parameters; "" unsaid."""
    for name, value in headers:
        if name == b"content-type":
            return value.partition(b";")[0].strip().lower().decode("latin-1")
    return ""


# Longest body in bytes of a route without a limit of its own: the default of the peers' HTTP
# framework.
DEFAULT_BODY_LIMIT = 2 * 1024 * 1024
# Longest body in bytes of questions and lists of workers, as on the originals; a setting may
# replace it (HttpLimits.body_bytes).
LONG_BODY_LIMIT = 8 * 1024 * 1024
_BODILESS_METHODS = frozenset(("GET", "DELETE"))


class Scope(IntFlag):
    """What a bearer token is good for, and what a route asks for."""

    OPEN = 0  # of a route that answers without a token
    READ = 1  # questions, lists, metrics: what changes nothing
    LIFECYCLE = 2  # bookings, and what becomes of them: what moves loads and sessions
    ADMIN = 4  # who serves, how it is chosen, what others copy
    GENERATE = 8  # what the gateway has engines answer
    ANY = READ | LIFECYCLE | ADMIN | GENERATE


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


@dataclass(slots=True)
class ConcurrencyLimit:
    """Lets so many requests in at a time, until their answers have been sent, and counts the rest.

    `text` is for clients that are answered 503.
    """

    limit: int
    text: str
    inside: int = 0
    refused: int = 0


Handler = Callable[[Request], Response | Awaitable[Response]]
# Has a request served on its client's socket; returns whether the connection persists.
Relays = Callable[["RelayedRequest"], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Route:
    """Binds a method and a path to a handler; one segment of that may be a placeholder, `{id}`.

    `hot` routes answer with bytes, and bypass the Quart application; the handlers of most are
    compiled (http/hot.pyx). `body_limit` is in bytes; a longer body is answered 413
    before anyone sees it. Where it is 0, as for every GET and DELETE,
    nobody needs a body: the handler is given none, and what a client sends is not kept.
    `admission` bounds how many requests of a route that is not hot are under way. With `any_type`
    a body is read as JSON whatever type it is announced as. A token needs the `scope`: READ unless
    it is said, which every route has to that is not a GET. The placeholder of a `deep` route, at
    its end, stands for any number of segments. A route with `relays` has its answers written by
    somebody else (http/relayed.py); it is hot, and its `handler` is never called.
    """

    method: str
    path: str
    handler: Handler
    hot: bool = False
    body_limit: int = DEFAULT_BODY_LIMIT
    admission: ConcurrencyLimit | None = None
    deep: bool = False
    any_type: bool = False
    scope: Scope = None  # type: ignore[assignment]
    relays: Relays | None = None
    waits: bool = field(init=False)  # the handler may return what has to be awaited

    def __post_init__(self) -> None:
        if self.scope is None:
            if self.method != "GET":
                raise ValueError(f"{self.method} {self.path} states no scope")
            object.__setattr__(self, "scope", Scope.READ)
        waits = iscoroutinefunction(self.handler) or getattr(self.handler, "waits", False)
        waits = waits or self.relays is not None
        object.__setattr__(self, "waits", waits)
        if self.method in _BODILESS_METHODS:
            object.__setattr__(self, "body_limit", 0)


# Told of every request to a path that some route has, whatever its outcome, just before it is
# answered: path, method, status, seconds since the request was there as a whole.
Observer = Callable[[str, str, int, float], None]

# What is said of a raw path that is no route's.
WrongPath = Callable[[bytes], str]


def nowhere(path: bytes) -> str:
    return "not found"
