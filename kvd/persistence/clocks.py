"""Translates moments across a restart: between clocks of two processes, and of two boots.

Ages of what is booked are kept by a clock that another process does not share. On the same boot the
monotonic clock shows how long that was ago, whatever became of the wall clock; after another boot
only the wall clock does, and what it says to be in the future is new.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ClockReading:
    """One moment by all clocks, in seconds."""

    clock: float  # the process's own
    monotonic: float  # the machine's, since some moment of this boot
    wall: float  # since 1970
    boot: str  # names the boot, "" where the system does not

    @classmethod
    def now(cls, clock: float) -> ClockReading:
        """Returns the present moment, which the process's own clock calls `clock`."""
        return cls(clock, time.monotonic(), time.time(), _boot())

    def since(self, earlier: ClockReading) -> float:
        """Returns the seconds from another process's moment to this one, 0 at least."""
        if earlier.boot and earlier.boot == self.boot:
            return max(0.0, self.monotonic - earlier.monotonic)
        return max(0.0, self.wall - earlier.wall)


@dataclass(frozen=True, slots=True)
class ClockTranslation:
    """Translates another process's clock readings to this process's clock.

    It may say what is later than now, after another boot with its wall clock set back; two moments
    stay as far apart as they were.
    """

    offset: float

    @classmethod
    def between(cls, then: ClockReading, now: ClockReading) -> ClockTranslation:
        return cls(now.clock - now.since(then) - then.clock)

    def __call__(self, at: float) -> float:
        """Returns when that was by this process's clock."""
        return at + self.offset


@cache
def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not a Linux, or a container without /proc
        return ""
