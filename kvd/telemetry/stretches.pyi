from collections.abc import Awaitable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")

BOUNDS: tuple[float, ...]

class Cause:
    name: str
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...
    def steps_of(self, coroutine: Coroutine[Any, Any, _T]) -> Awaitable[_T]: ...
    def each(self, items: Iterable[_T]) -> Iterator[_T]: ...

OTHER: Cause
EVENTS: Cause
FAST_PATH: Cause
REQUESTS: Cause
RELAY: Cause
DUMP: Cause
SNAPSHOT: Cause
SCRAPE: Cause
RECOVERY: Cause
UNREGISTRATION: Cause
SELECTIONS: Cause
COLLECTOR: Cause
CAUSES: tuple[Cause, ...]

def stretches_counted() -> AbstractContextManager[None]: ...

class StretchStats(NamedTuple):
    cause: str
    buckets: list[int]
    seconds: float
    longest_s: float
    longest_age_s: float
    longest_cpu_s: float

def stretch_counts() -> list[StretchStats]: ...
