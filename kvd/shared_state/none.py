"""Stands for the shared state if no server is set, so that no caller has to ask whether it is on.

It is apart from `service`, which loads a client for Redis of 18 MB.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvd.telemetry.metrics import Family


class NoSharedState:
    """Shares nothing, and knows no other process."""

    async def prepare(self) -> None:
        """Notes nothing."""

    async def run(self) -> None:
        """Returns at once."""

    async def finish(self) -> None:
        """Sends nothing."""

    async def addresses(self, wait_s: float) -> list[str]:
        """Returns no addresses, without waiting."""
        return []

    def shown(self) -> None:
        """Returns None: there is nothing to show."""

    def families(self) -> Iterator[Family]:
        """Yields nothing."""
        return iter(())
