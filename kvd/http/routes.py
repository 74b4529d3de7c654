"""Routes, of which a face is made, and the requirements of each route.

A face is a tuple of routes. The front serves the hot ones directly and the Quart application
serves all of them; both call the same handler. Cold are those whose answers are streamed, or
bounded in number.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import IntFlag
from inspect import iscoroutinefunction

from kvd.http.limits import DEFAULT_BODY_LIMIT
from kvd.http.messages import Request, Response
from kvd.http.relayed import RelayedRequest

_BODILESS_METHODS = frozenset(("GET", "DELETE"))


class Scope(IntFlag):
    """A scope that a bearer token grants and a route requires."""

    OPEN = 0  # of a route that answers without a token
    READ = 1  # questions, lists, metrics: what changes nothing
    LIFECYCLE = 2  # bookings, and what becomes of them: what moves loads and sessions
    ADMIN = 4  # who serves, how it is chosen, what others copy
    GENERATE = 8  # what the gateway has engines answer
    ANY = READ | LIFECYCLE | ADMIN | GENERATE


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
Relays = Callable[[RelayedRequest], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Route:
    """Binds a method and a path to a handler; one segment of that may be a placeholder, `{id}`.

    `hot` routes answer with bytes, and bypass the Quart application, which is not even loaded for
    them; the handlers of those that are asked most are compiled (http/hot.pyx). `body_limit` is in
    bytes; a longer body is answered 413 before anyone sees it. Where it is 0, as for every GET and
    DELETE, nobody needs a body: the handler is given none, and what a client sends is not kept.
    `admission` bounds how many requests of a route that is not hot are under way. With `any_type`
    a body is read as JSON whatever type it is announced as. A token needs the `scope`: READ unless
    it is said, which every route has to that is not a GET. The placeholder of a `deep` route, at
    its end, stands for any number of segments. A route with `relays` has its answers written by
    the relay (http/relayed.py); it is hot, and its `handler` is never called.
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
    answers_head: bool = field(init=False)  # as GET does, without a body
    waits: bool = field(init=False)  # the handler may return what has to be awaited

    def __post_init__(self) -> None:
        if self.scope is None:
            if self.method != "GET":
                raise ValueError(f"{self.method} {self.path} states no scope")
            object.__setattr__(self, "scope", Scope.READ)
        waits = iscoroutinefunction(self.handler) or getattr(self.handler, "waits", False)
        waits = waits or self.relays is not None
        object.__setattr__(self, "waits", waits)
        # A relay would wait for the body that the answer to a HEAD announces and does not have.
        object.__setattr__(self, "answers_head", self.method == "GET" and self.relays is None)
        if self.method in _BODILESS_METHODS:
            object.__setattr__(self, "body_limit", 0)


# Called for every request to a path that some route has, whatever its outcome, just before it is
# answered: path, method, status, seconds since the request was there as a whole.
Observer = Callable[[str, str, int, float], None]

# Returns the error text for a raw path that is no route's.
WrongPath = Callable[[bytes], str]


def nowhere(path: bytes) -> str:
    return "not found"
