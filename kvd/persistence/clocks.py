"""Translates moments across a restart: between the clocks of two processes, or of two boots.

The ages of bookings are kept by a clock of the process. Within one boot the machine's monotonic
clock tells how long ago a moment was, even if the wall clock has been set. After another boot only
the wall clock can tell; a moment that it places in the future counts as now.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Difference from which the wall clock counts as set anew: ages are off by less until then.
CLOCK_STEP_S = 1.0

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ClockReading:
    """One moment by all clocks, in seconds."""

    clock: float  # the process's own clock
    monotonic: float  # the machine's, since some moment of this boot
    wall: float  # since 1970
    boot: str  # names the boot; "" if the system does not

    @classmethod
    def now(cls, clock: float) -> ClockReading:
        """Returns the present moment, which the process's own clock calls `clock`."""
        return cls(clock, time.monotonic(), time.time(), _boot())

    def since(self, earlier: ClockReading) -> float:
        """Returns the seconds from another process's moment to this one, at least 0."""
        if earlier.boot and earlier.boot == self.boot:
            return max(0.0, self.monotonic - earlier.monotonic)
        return max(0.0, self.wall - earlier.wall)

    def is_off(self, earlier: ClockReading) -> bool:
        """Returns whether the wall clock was set since an earlier moment of this boot.

        A suspended machine has the same effect: its monotonic clock stands still.
        """
        passed = self.monotonic - earlier.monotonic
        return abs(self.wall - earlier.wall - passed) > CLOCK_STEP_S


@dataclass(frozen=True, slots=True)
class ClockTranslation:
    """Translates another process's clock readings to this process's clock.

    Two moments stay as far apart as they were. A result may lie in the future if the wall clock was
    set back before another boot.
    """

    offset: float

    @classmethod
    def between(cls, then: ClockReading, now: ClockReading) -> ClockTranslation:
        return cls(now.clock - now.since(then) - then.clock)

    def __call__(self, at: float) -> float:
        """Returns the moment `at` by this process's clock."""
        return at + self.offset


@cache
def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # another system than Linux, or a container without /proc
        return ""
