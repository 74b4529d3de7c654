"""The limit of listeners in one process, shared by all parts that register listeners."""

from __future__ import annotations

from kvd.platform.descriptors import MAX_LISTENERS


class ListenerCapacity:
    """Counts the listeners of one process against their limit."""

    def __init__(self, limit: int = MAX_LISTENERS) -> None:
        self._limit = limit
        self._taken = 0

    @property
    def refusal(self) -> str:
        return f"the limit of {self._limit} listeners is reached"

    def has(self, count: int = 1) -> bool:
        """Returns whether there is room for so many more."""
        return self._taken + count <= self._limit

    def take(self) -> None:
        self._taken += 1

    def give_back(self) -> None:
        self._taken -= 1
