"""Stands for the state directory if none is set, so that no caller has to ask whether there is one.

The index then begins empty, or with a peer's index.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvd.fleet_file.follower import RegistrationTarget
from kvd.persistence.journal import SharedUntil
from kvd.telemetry.metrics import Family


class NoKeeper:
    """A keeper without a directory: it restores nothing and keeps nothing."""

    failures = 0

    def __init__(self) -> None:
        self.shared_until = SharedUntil(None)

    async def prepare(self, targets: dict[str, RegistrationTarget]) -> None:
        """Restores nothing."""

    async def has_fresh_index(self) -> bool:
        """Returns False."""
        return False

    async def restore_index(self, *, unless_empty: bool = False) -> int | None:
        """Returns None: there is no snapshot."""
        return None

    def leave_index(self) -> None:
        """Does nothing: there is no snapshot."""

    async def run(self) -> None:
        """Returns at once."""

    async def finish(self) -> None:
        """Writes nothing."""

    def families(self) -> Iterator[Family]:
        """Yields nothing."""
        return iter(())
