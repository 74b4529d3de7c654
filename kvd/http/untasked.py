"""Runs coroutines without a task of trio for as long as they wait for callbacks only.

    step ──> signalled(signal) ── signal.set() ───> step ──> ... ──> the result
       └───> in_task() ──> `rest`, awaited in a task, runs what is left

Waking a task costs a pass of trio. So the call of `Signal.set` itself continues the coroutine of a
relayed request. The coroutine awaits `in_task()` before anything that needs a task: deadlines,
nurseries, waits for sockets. If it does not, it fails at once, because trio finds no task.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from operator import attrgetter
from types import SimpleNamespace, coroutine
from typing import Any, Final

import trio


class Signal:
    """An event that a coroutine without a task waits for; `set` is called once."""

    __slots__ = ("_subscriber",)

    _subscriber: Callable[[], None]

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        """Sets the function that `set` calls."""
        self._subscriber = subscriber

    def set(self) -> None:
        """Reports that the event has come."""
        self._subscriber()


IN_TASK: Final = Signal()  # never signalled: the coroutine needs a task

# Where trio keeps its running task; it has no public name. `step` clears it, because code that
# forgets `in_task` would otherwise run in the task that steps.
RUN = "_core._run.GLOBAL_RUN_CONTEXT"
try:
    _run: Any = attrgetter(RUN)(trio)
except AttributeError:
    _run = SimpleNamespace()

_stepping = False


def has_task() -> bool:
    """Returns whether the caller runs in a task."""
    return not _stepping


@coroutine
def in_task() -> Generator[Signal, None, None]:
    """Returns in a task; at once if the caller is in one."""
    if _stepping:
        yield IN_TASK


@coroutine
def signalled(signal: Signal) -> Generator[Signal, None, None]:
    """Waits for a signal, without a task."""
    yield signal


class Untasked:
    """A coroutine that begins without a task."""

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def step(self) -> Signal:
        """Runs it until it waits, and returns the signal; at its end raises StopIteration."""
        global _stepping
        before = _stepping  # steps nest: a coroutine may signal another one
        task = getattr(_run, "task", None)
        if task is not None:
            del _run.task
        _stepping = True
        try:
            signal: Signal = self._coroutine.send(None)
            return signal
        finally:
            _stepping = before
            if task is not None:
                _run.task = task

    def close(self) -> None:
        """Ends it where it waits."""
        self._coroutine.close()

    @coroutine
    def rest(self) -> Generator[Any, Any, bool]:
        """Runs the rest of a coroutine that needs a task, in the task that awaits this."""
        send, value = self._coroutine.send, None
        while True:
            try:
                trap = send(value)
            except StopIteration as end:
                result: bool = end.value
                return result
            try:
                value, send = (yield trap), self._coroutine.send
            except BaseException as error:  # thrown in by trio, for the coroutine to see
                value, send = error, self._coroutine.throw
