"""Scans long bodies in steps, between which other tasks run."""

from __future__ import annotations

from typing import Protocol

import trio

from kvd.http.untasked import in_task
from kvd_core.json.scan import AHEAD_BYTES, ScanAhead


class Scans(Protocol):
    """A scanner, or the handler of a hot route that has one."""

    def ahead(self, body: bytes) -> ScanAhead | None:
        """Returns a scan of a body that has yet to advance; None if it would not be used."""


async def scanned_ahead(scans: Scans, body: bytes) -> ScanAhead | None:
    """Returns the scan of a long body for whoever reads it in one step; None for a short one."""
    if len(body) <= AHEAD_BYTES:
        return None
    await in_task()
    ahead = scans.ahead(body)
    while ahead is not None and not ahead.advance():
        await trio.lowlevel.checkpoint()
    return ahead
