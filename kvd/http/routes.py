"""The routes that make up a face, and what each route requires.

A face is a tuple of routes. The front serves the hot ones directly and the Quart application
serves all of them; both call the same handler. A route is cold if it is asked rarely, or if its
requests are bounded in number.
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

    OPEN = 0  # the route answers without a token
    READ = 1  # queries, lists, metrics: requests that change nothing
    LIFECYCLE = 2  # bookings and their later steps: requests that change loads and sessions
    ADMIN = 4  # which workers serve, how one is chosen, what peers and replicas copy
    GENERATE = 8  # requests that the gateway forwards to engines
    ANY = READ | LIFECYCLE | ADMIN | GENERATE


@dataclass(slots=True)
class ConcurrencyLimit:
    """Admits `limit` requests at a time, each until its answer is sent; the rest are counted.

    Those are answered 503 with `text`.
    """

    limit: int
    text: str
    inside: int = 0
    refused: int = 0


Handler = Callable[[Request], Response | Awaitable[Response]]
# Serves a request on its client's socket; returns whether the connection persists.
Relays = Callable[[RelayedRequest], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Route:
    """Binds a method and a path to a handler; one segment of the path may be a placeholder, `{id}`.

    `hot` routes bypass the Quart application, which is not even loaded for
    them; the most frequent handlers are compiled (http/hot.pyx). `body_limit` is in bytes; a longer
    body is answered 413 before a handler sees it. Where it is 0, as for every GET and DELETE, the
    handler is given no body, and what a client sends is not kept. `admission` bounds how many
    requests of a cold route are under way. With `any_type` a body is read as JSON whatever type is
    announced. `scope` is what a token needs: READ by default for a GET, while every other route has
    to state it. The placeholder of a `deep` route, at its end, stands for any number of segments.
    The answers of a route with `relays` are written by the relay (http/relayed.py); the route is
    hot, and its `handler` is never called.
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
    answers_head: bool = field(init=False)  # answers a HEAD, as the GET but without a body
    waits: bool = field(init=False)  # the handler may return an awaitable

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


# Returns the error text for a raw path that no route has.
WrongPath = Callable[[bytes], str]


def nowhere(path: bytes) -> str:
    return "not found"
