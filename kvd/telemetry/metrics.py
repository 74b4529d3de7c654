"""Metrics in the Prometheus text format 0.0.4.

    RequestMetrics   the requests that HTTP servers have counted
    Family           one metric: name, type, help, its samples
    render           families -> pieces of text

Everything but requests is read at the scrape. A generator of families yields None where other
tasks may run, so that a scrape of thousands of listeners or partitions does not stall the loop.
Labels come from closed sets; models, tenants and workers are named only where their number is
bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from resource import getpagesize
from typing import Any

from kvd.telemetry.counts import RequestCounts
from kvd.telemetry.stretches import BOUNDS, stretch_counts

CONTENT_TYPE = b"text/plain; version=0.0.4"
METRICS_PATH = "/metrics"  # scrapes themselves are not observed

# Upper bounds in seconds: 0.1 ms doubled 19 times, as in the original servers' histograms.
BUCKETS = tuple(0.0001 * 2**k for k in range(20))

# Partitions, listeners or series of a scrape between two checkpoints: 0.1 ms, for which a
# query that comes meanwhile waits.
BREATH = 16

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric; a sample is a suffix of the name, its labels and its value."""

    name: str
    type: str
    help: str
    samples: Iterable[tuple[str, Labels, float]]


Source = Callable[[], Iterator[Family | None]]


def counter(name: str, help: str, value: float) -> Family:
    return Family(name, "counter", help, [("", (), value)])


def gauge(name: str, help: str, value: float) -> Family:
    return Family(name, "gauge", help, [("", (), value)])


def by_label(name: str, type: str, help: str, label: str, values: Mapping[str, float]) -> Family:
    """Returns a family with one sample for each value of its only label."""
    return Family(name, type, help, [("", ((label, key),), n) for key, n in values.items()])


def render(families: Iterable[Family | None]) -> Iterator[bytes]:
    """Yields the text; b"" where other tasks may run: at a None, and every BREATH lines or so."""
    lines: list[str] = []
    for family in families:
        if family is None:
            yield b""
            continue
        lines.append(f"# HELP {family.name} {family.help}")
        lines.append(f"# TYPE {family.name} {family.type}")
        for suffix, labels, value in family.samples:
            if len(lines) >= BREATH:
                yield _joined(lines)
                yield b""
                lines = []
            text = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
            name = f"{family.name}{suffix}{{{text}}}" if text else f"{family.name}{suffix}"
            lines.append(f"{name} {value}")
    yield _joined(lines)


def _joined(lines: list[str]) -> bytes:
    return "\n".join([*lines, ""]).encode()


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class RequestMetrics:
    """Requests by path, method and outcome."""

    def __init__(self, prefix: str) -> None:
        """Names of the metrics begin with `prefix`."""
        self._prefix = prefix
        self.counts = RequestCounts(BUCKETS, METRICS_PATH)

    def total(self, without: Container[str] = ()) -> int:
        """Returns the number of requests, without those to some paths."""
        return sum(
            sum(endpoint.methods.values())
            for path, endpoint in self.counts.endpoints.items()
            if path not in without
        )

    def families(self) -> Iterator[Family | None]:
        ordered = sorted(self.counts.endpoints.items())
        errors = [
            ("", (("endpoint", path), ("status_class", kind)), count)
            for path, endpoint in ordered
            for kind, count in sorted(endpoint.errors.items())
        ]
        requests = [
            ("", (("endpoint", path), ("method", method)), count)
            for path, endpoint in ordered
            for method, count in sorted(endpoint.methods.items())
        ]
        # A family without samples is left out: it appears with its first sample.
        if errors:
            help = "Total HTTP error responses (4xx/5xx)"
            yield Family(f"{self._prefix}_errors_total", "counter", help, errors)
        if requests:
            name = f"{self._prefix}_request_duration_seconds"
            bounds = [f"{bound:.4f}" for bound in BUCKETS]
            samples = [
                sample
                for path, one in ordered
                for sample in histogram_samples(
                    bounds, one.seconds.buckets, one.seconds.sum, (("endpoint", path),)
                )
            ]
            yield Family(name, "histogram", "Latency of HTTP requests in seconds", samples)
            help = "Total HTTP requests"
            yield Family(f"{self._prefix}_requests_total", "counter", help, requests)

    def durations(self, paths: Iterable[str]) -> tuple[list[int], float]:
        """Returns the numbers of requests to these paths, by BUCKETS, and their total seconds."""
        counted = self.counts.endpoints
        endpoints = [counted[path] for path in paths if path in counted]
        none = [0] * (len(BUCKETS) + 1)
        columns = zip(none, *(each.seconds.buckets for each in endpoints), strict=True)
        return [sum(column) for column in columns], sum(each.seconds.sum for each in endpoints)


def histogram_samples(
    bounds: Iterable[str], buckets: Sequence[int], sum_: float, labels: Labels = ()
) -> Iterator[tuple[str, Labels, float]]:
    """Yields the samples of one histogram; `buckets` has one more than there are bounds."""
    for bound, count in zip([*bounds, "+Inf"], accumulate(buckets), strict=True):
        yield "_bucket", (*labels, ("le", bound)), count
    yield "_sum", labels, sum_
    yield "_count", labels, sum(buckets)


def stats_families(
    prefix: str, stats: Any, helps: Mapping[str, str], gauges: frozenset[str]
) -> Iterator[Family]:
    """Yields each number of a dataclass: `<prefix>_<field>_total`, for gauges without `_total`."""
    for each in fields(stats):
        value, help = getattr(stats, each.name), helps[each.name]
        if each.name in gauges:
            yield gauge(f"{prefix}_{each.name}", help, value)
        else:
            name = each.name.removesuffix("_total")
            yield counter(f"{prefix}_{name}_total", help, value)


def memory_families() -> Iterator[Family]:
    """Yields the kernel's figures about this process, where it has them (Linux)."""
    try:
        with open("/proc/self/statm") as statm:
            pages = statm.read().split()
    except OSError:
        return
    resident = int(pages[1]) * getpagesize()
    yield gauge(
        "process_resident_memory_bytes", "Resident memory of the process in bytes", resident
    )


def stretch_families() -> Iterator[Family]:
    """Yields how long the loop was busy between two polls, by main cause."""
    counts = stretch_counts()
    bounds = [f"{bound:g}" for bound in BOUNDS]
    samples = [
        sample
        for each in counts
        for sample in histogram_samples(
            bounds, each.buckets, each.seconds, (("cause", each.cause),)
        )
    ]
    help = "Time for which the event loop was busy without a pause in seconds, by main cause"
    yield Family("kvd_loop_stretch_seconds", "histogram", help, samples)
    help = "Longest busy time of the loop in the last minute or two in seconds, by main cause"
    longest = {each.cause: each.longest_s for each in counts}
    yield by_label("kvd_loop_longest_stretch_seconds", "gauge", help, "cause", longest)
    help = "Time since the end of the longest recent busy time in seconds, by main cause"
    ages = {each.cause: each.longest_age_s for each in counts if each.longest_s}
    yield by_label("kvd_loop_longest_stretch_age_seconds", "gauge", help, "cause", ages)
    help = "CPU time of the loop's thread in its longest recent busy time in seconds, by main cause"
    ran = {each.cause: each.longest_cpu_s for each in counts if each.longest_s}
    yield by_label("kvd_loop_longest_stretch_cpu_seconds", "gauge", help, "cause", ran)
