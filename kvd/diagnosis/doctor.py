"""Examines the daemon on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import trio

from kvd.diagnosis.chain import in_order, walk
from kvd.diagnosis.evidence import ProbeResult
from kvd.diagnosis.findings import Finding
from kvd.diagnosis.gathering import DiagnosedParts, Gathering, Shown
from kvd.diagnosis.probes import EngineProber
from kvd.telemetry.metrics import Family, counter

if TYPE_CHECKING:
    from kvd.net.dialing import Dialer


class Doctor:
    """Finds out what is wrong, from what the daemon knows and what engines show from outside."""

    def __init__(self, parts: DiagnosedParts, dialer: Dialer, now: float, shared: Shown) -> None:
        """`now` is in monotonic seconds; `shared` returns the status of the shared state."""
        self._gathering = Gathering(parts, now)
        self._prober = EngineProber(dialer)
        self._shared = shared

    def note_counters(self, now: float) -> None:
        """Samples counters when that is due; to be called every few seconds."""
        self._gathering.note_counters(now)

    def families(self) -> Iterator[Family]:
        """Yields the metrics that count what the doctor's own bounds left out."""
        help = "Number of bookings on busy ranks left out of the doctor's counts at the limit"
        name = "kvd_diagnosis_bookings_uncounted_total"
        yield counter(name, help, self._gathering.uncounted)
        help = "Number of addresses that diagnoses left out at their limits"
        yield counter("kvd_diagnosis_probes_left_out_total", help, self._prober.left_out)

    async def examine(self, *, probes: bool) -> list[Finding]:
        """Returns what is wrong; with `probes` engines are probed, which takes seconds."""
        seen: Mapping[str, ProbeResult] = {}
        if probes:
            seen = await self._prober.probe(self._gathering.endpoints())
        found = []
        for finding in walk(await self._gathering.gather(seen, self._shared)):
            if finding is None:
                await trio.lowlevel.checkpoint()
            else:
                found.append(finding)
        return in_order(found)
