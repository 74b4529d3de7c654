"""Cancels an operation at its n-th checkpoint, for n = 1, 2, ... until it ends before that.

    for cancelling in every_checkpoint():
        daemon = fresh()
        await cancelling.run(operation)     # cancelled when it yields for the n-th time
        check(daemon)                       # what must hold wherever it was

The operation is abandoned at that moment, as if its client had gone; its shielded parts go on.
Steps of tasks that the operation starts in nurseries of its own count, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import trio

MOST_CHECKPOINTS = 2_000  # an operation with more is taken not to end


class Cancelling(trio.abc.Instrument):
    """One attempt: the operation is cancelled at its `at`-th checkpoint, if it gets that far."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.steps = 0
        self._scope = trio.CancelScope()
        self._tasks: set[trio.lowlevel.Task] = set()

    @property
    def reached(self) -> bool:
        """Whether the operation came to its `at`-th checkpoint."""
        return self.steps >= self.at

    async def run(self, operation: Callable[[], Awaitable[object]]) -> None:
        """Runs the operation; raises its errors, but not its own cancellation."""
        failed: list[Exception] = []

        async def run() -> None:
            self._tasks.add(trio.lowlevel.current_task())
            try:
                with self._scope:
                    await operation()
            except Exception as error:
                failed.append(error)

        trio.lowlevel.add_instrument(self)
        try:
            # In a task of its own, so that only steps of the operation count.
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
        finally:
            trio.lowlevel.remove_instrument(self)
        if failed:
            raise failed[0]

    # ---- called by trio

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        nursery = task.parent_nursery
        if nursery is not None and nursery.parent_task in self._tasks:
            self._tasks.add(task)

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        self._tasks.discard(task)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task in self._tasks:
            self.steps += 1
            if self.steps == self.at:
                self._scope.cancel()


def every_checkpoint(at_least: int = 1) -> Iterator[Cancelling]:
    """Yields attempts until one ends uncancelled; at least `at_least` must come before it."""
    for at in range(1, MOST_CHECKPOINTS):
        cancelling = Cancelling(at)
        yield cancelling
        if not cancelling.reached:
            assert at > at_least, f"only {at - 1} checkpoints"
            return
    raise AssertionError(f"more than {MOST_CHECKPOINTS} checkpoints")
