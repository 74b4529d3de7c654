"""Stands in for the follower where no fleet file is set, so that callers need not distinguish."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Hashable, Iterator

from kvd.config.load import Prepared
from kvd.fleet_file.follower import FleetFileFollower
from kvd.telemetry.metrics import Family
from kvd.wire.egress import AllowedNetworks


class NoFleetFile:
    """Has registered nothing, and follows nothing."""

    async def run(self) -> None:
        """Returns at once."""

    async def read(self) -> None:
        """Reads nothing."""

    def held(self, table: str, key: Hashable) -> None:
        """Returns None."""

    def faults(self) -> dict[str, str]:
        """Returns nothing."""
        return {}

    @contextlib.asynccontextmanager
    async def reloading(self) -> AsyncIterator[None]:
        """Does nothing around a reload."""
        yield

    async def prepare(self, allowed: AllowedNetworks) -> Prepared:
        """Returns a part of a reload that changes nothing."""
        return Prepared((), _change_nothing)

    def families(self) -> Iterator[Family]:
        """Yields nothing."""
        return iter(())


def _change_nothing() -> None:
    pass


FleetFile = FleetFileFollower | NoFleetFile
