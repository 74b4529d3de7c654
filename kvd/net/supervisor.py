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
        self.ended: trio.Event | None = None  # made once a task waits for the end


class Supervisor(Generic[Key]):
    """Child tasks of one nursery, each with a cancel scope of its own.

    A child that returns is forgotten. An exception from a child goes to the nursery: it is a bug,
    since a child handles every failure that it can recover from itself, with backoff.
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

        If several tasks wait for that end, another of them may have started a new child by then.
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
