"""Reads from a kvd's /metrics how long its loop was busy without a pause, and by which cause."""

from __future__ import annotations

import http.client
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

from servers import Server

TIMEOUT = 30.0  # seconds
SAMPLE = re.compile(r'kvd_loop_(\w+)\{cause="(\w+)"(?:,le="([^"]+)")?\} (\S+)')


@dataclass(frozen=True)
class Stretch:
    """The longest stretch of a cause since an earlier reading."""

    cause: str
    ms: float
    exact: bool  # False: `ms` is an upper bound, as the cause had a longer stretch before
    cpu_ms: float = 0.0  # CPU time of the thread in it, if it is exact

    @property
    def own_ms(self) -> float:
        """Its CPU time, or the upper bound if that is not known."""
        return self.cpu_ms if self.exact else self.ms

    def __str__(self) -> str:
        cause = self.cause.replace("_", " ")
        return (
            f"{cause} {self.ms:.2f} (CPU {self.cpu_ms:.2f})"
            if self.exact
            else (f"{cause} < {self.ms:.2f}")
        )


@dataclass
class Reading:
    """The counters of one scrape, by cause."""

    at: float = field(default_factory=time.monotonic)
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(dict))
    longest_s: dict[str, float] = field(default_factory=dict)
    age_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, server: Server) -> Reading:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        reading = cls()
        for name, cause, bound, value in SAMPLE.findall(text):
            if name == "stretch_seconds_bucket":
                reading.buckets[cause][float(bound)] = float(value)
            elif name == "longest_stretch_seconds":
                reading.longest_s[cause] = float(value)
            elif name == "longest_stretch_age_seconds":
                reading.age_s[cause] = float(value)
            elif name == "longest_stretch_cpu_seconds":
                reading.cpu_s[cause] = float(value)
        return reading

    def over(self, before: Reading, seconds: float) -> int:
        """Counts stretches longer than a bucket's bound since an earlier reading."""
        return round(
            sum(self._over(cause, seconds) - before._over(cause, seconds) for cause in self.buckets)
        )

    def _over(self, cause: str, seconds: float) -> float:
        found = self.buckets[cause]
        return found[inf] - found[seconds] if found else 0

    def longest(self, before: Reading) -> list[Stretch]:
        """Returns the longest stretch of each cause since an earlier reading, longest first."""
        found = []
        for cause, buckets in self.buckets.items():
            if cause in self.age_s and self.age_s[cause] < self.at - before.at:
                ms, cpu_ms = self.longest_s[cause] * 1e3, self.cpu_s[cause] * 1e3
                found.append(Stretch(cause, ms, exact=True, cpu_ms=cpu_ms))
                continue
            earlier = before.buckets[cause]
            total = buckets[inf] - earlier.get(inf, 0)
            within = [b for b in sorted(buckets) if buckets[b] - earlier.get(b, 0) == total]
            if total:
                found.append(Stretch(cause, within[0] * 1e3, exact=False))
        return sorted(found, key=lambda each: -each.ms)
