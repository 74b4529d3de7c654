"""Parts that each trio run has one of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NoReturn, Protocol, TypeVar

import trio


class _Runs(Protocol):
    async def run(self) -> NoReturn: ...


Part = TypeVar("Part", bound=_Runs)


class OnePerRun(Generic[Part]):
    """Returns, when called, the part of this trio run; the first call makes and starts it."""

    def __init__(self, make: Callable[[], Part]) -> None:
        self._make = make
        self._current: trio.lowlevel.RunVar[Part | None] = trio.lowlevel.RunVar("part", None)

    def __call__(self) -> Part:
        part = self._current.get()
        if part is None:
            part = self._make()
            self._current.set(part)
            trio.lowlevel.spawn_system_task(part.run)
        return part
