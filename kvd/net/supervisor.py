"""Keeps one task per key: started, stopped and looked up by that key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, KeysView
from typing import Generic, TypeVar

import trio

Key = TypeVar("Key", bound=Hashable)


class _Child:
    __slots__ = ("ended", "scope")

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended: trio.Event | None = None  # for those that wait for its end


class Supervisor(Generic[Key]):
    """Child tasks of one nursery, each with a cancel scope of its own.

    A child that returns is forgotten; one that raises is a bug, and the exception goes to the
    nursery: what can be cured is cured, with backoff, inside the child.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._children: dict[Key, _Child] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._children

    def __len__(self) -> int:
        return len(self._children)

    def keys(self) -> KeysView[Key]:
        return self._children.keys()

    def start(self, key: Key, run: Callable[[], Awaitable[object]]) -> None:
        """Starts a child that calls `run`; raises KeyError while `key` has one already."""
        if key in self._children:
            raise KeyError(key)
        child = self._children[key] = _Child()
        self._nursery.start_soon(self._run, key, child, run, name=f"child {key}")

    async def stop(self, key: Key) -> bool:
        """Cancels the child of `key`; returns True once it has ended, False without a child.

        When several wait for that end, one of them may have started another by then.
        """
        child = self._children.get(key)
        if child is None:
            return False
        child.scope.cancel()
        if child.ended is None:
            child.ended = trio.Event()
        await child.ended.wait()
        return True

    async def _run(self, key: Key, child: _Child, run: Callable[[], Awaitable[object]]) -> None:
        try:
            with child.scope:
                await run()
        finally:
            del self._children[key]
            if child.ended is not None:
                child.ended.set()
