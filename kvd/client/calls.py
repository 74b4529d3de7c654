"""A call before it is sent: its route, body and type of answer, the same for all clients.

    class Indexer(EveryFace[How]):
        @asked("POST /query", repeatable=True)
        def query(self, model_name: str, ...) -> Call[Scores]:

The method describes the call. `asked` turns it into a method that makes the call and waits for the
answer in the way of the face's client: `indexer.query(...)` of a blocking client returns Scores;
that of a client on trio has to be awaited.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    get_args,
    get_type_hints,
    overload,
)
from urllib.parse import quote, urlencode

from kvd.client.exchanges import ClientStats, Exchange, Request
from kvd.client.reading import body_reader

P = ParamSpec("P")
T = TypeVar("T")
How = TypeVar("How")  # how a client waits: Blocking or Trio


class Blocking:
    """Marks calls that block their thread while they wait."""


class Trio:
    """Marks calls that have to be awaited, in a task of trio."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request to a face, answered by a T.

    Members and parameters that are None are left out. `segment` replaces the placeholder in the
    route's path. With a `key` (Idempotency-Key) the call may be repeated.
    """

    body: Mapping[str, Any] | None = None
    segment: str | int | None = None
    query: Mapping[str, str | int | None] | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """The properties that all calls of a route share.

    `name` is method and path. A `repeatable` call is sent again if its answer is lost. A call that
    `ends` something counts as successful if a repetition no longer finds it. A call that `waits`
    may be answered only after another call. `statuses` are the statuses of its answers.
    """

    name: str
    repeatable: bool = False
    ends: bool = False
    waits: bool = False
    statuses: tuple[int, ...] = (200, 201)


class Asker(Protocol):
    """Makes calls to one address, and waits for answers in its own way."""

    attempts: int
    stats: ClientStats

    def ask(self, exchange: Exchange[Any], timeout_s: float | None = None) -> Any: ...


class Face(Generic[How]):
    """The calls to one address."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker


class Asked(Generic[P, T]):
    """A method that makes the call that `make` describes."""

    def __init__(self, make: Callable[Concatenate[Any, P], Call[T]], route: Route) -> None:
        self.make = make
        self.route = route
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, face: None, owner: type) -> Asked[P, T]: ...
    @overload
    def __get__(self, face: Face[Blocking], owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, face: Face[Trio], owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, face: Face[Any] | None, owner: type) -> Any:
        if face is None:
            return self

        def ask(*args: P.args, **kwargs: P.kwargs) -> Any:
            return face._asker.ask(self.exchange(face, *args, **kwargs))

        return update_wrapper(ask, self.make)

    @cached_property
    def answer(self) -> Any:
        """The type of the answer."""
        return get_args(get_type_hints(self.make)["return"])[0]

    @cached_property
    def _read(self) -> Callable[[bytes], T]:
        return body_reader(self.answer)

    def exchange(self, face: Face[Any], *args: P.args, **kwargs: P.kwargs) -> Exchange[T]:
        """Returns the exchange for a call with these arguments."""
        call, route = self.make(face, *args, **kwargs), self.route
        return Exchange(
            route.name,
            request_of(call, route),
            self._read,
            route.statuses,
            face._asker.attempts if route.repeatable or call.key is not None else 1,
            route.ends,
            route.waits,
            face._asker.stats,
        )


def asked(
    name: str,
    *,
    repeatable: bool = False,
    ends: bool = False,
    waits: bool = False,
    statuses: tuple[int, ...] = (200, 201),
) -> Callable[[Callable[Concatenate[Any, P], Call[T]]], Asked[P, T]]:
    """Decorates a method that describes a call, so that it makes the call."""
    route = Route(name, repeatable, ends, waits, statuses)

    def made(make: Callable[Concatenate[Any, P], Call[T]]) -> Asked[P, T]:
        return Asked(make, route)

    return made


def request_of(call: Call[Any], route: Route) -> Request:
    """Returns the request of a call."""
    method, _, path = route.name.partition(" ")
    if call.segment is not None:
        before, _, rest = path.partition("{")
        path = before + quote(str(call.segment), safe="") + rest.partition("}")[2]
    given = {name: value for name, value in (call.query or {}).items() if value is not None}
    if given:
        path += "?" + urlencode(given)
    headers = [] if call.key is None else [("idempotency-key", call.key)]
    if call.body is None:
        return Request(method, path, tuple(headers), b"")
    headers.append(("content-type", "application/json"))
    return Request(method, path, tuple(headers), encoded(call.body))


def encoded(body: Mapping[str, Any]) -> bytes:
    """Returns a body as JSON, without members that are None.

    All kinds of mappings become objects, all kinds of sequences arrays. Raises ValueError or
    TypeError for values that JSON cannot express.
    """
    given = {name: value for name, value in body.items() if value is not None}
    return json.dumps(given, separators=(",", ":"), allow_nan=False, default=_plain).encode()


def _plain(value: Any) -> dict[Any, Any] | list[Any]:
    return dict(value) if isinstance(value, Mapping) else list(value)
