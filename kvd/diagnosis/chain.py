"""Walks the chain from the engines to the choice, link by link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kvd.diagnosis.capacity import check_capacity, check_files
from kvd.diagnosis.choices import check_choices
from kvd.diagnosis.engines import check_engine, check_restart
from kvd.diagnosis.events import check_events, check_loss
from kvd.diagnosis.evidence import Evidence
from kvd.diagnosis.findings import KINDS, Finding
from kvd.diagnosis.identity import check_identity
from kvd.diagnosis.questions import check_questions
from kvd.diagnosis.upstreams import check_gateway

# Findings of one name that are shown; one more counts the others, since one fault may affect a
# whole fleet.
MOST_OF_A_KIND = 64


# Streams checked between two checkpoints: about 0.5 ms.
SLICE = 128


def diagnose(evidence: Evidence) -> list[Finding]:
    """Returns all that is wrong, in the order of the chain."""
    return in_order(finding for finding in walk(evidence) if finding is not None)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Returns findings in the order of the chain, MOST_OF_A_KIND of each name."""
    order = list(KINDS)
    return sorted(_bounded(findings), key=lambda finding: order.index(finding.name))


def walk(evidence: Evidence) -> Iterator[Finding | None]:
    """Yields all that is wrong, and None where other tasks may run."""
    for number, stream in enumerate(evidence.streams, 1):
        faults = [*check_engine(stream), *check_events(stream)]
        yield from faults or check_loss(stream)
        yield from check_restart(stream)
        if number % SLICE == 0:
            yield None
    yield from check_gateway(evidence)
    yield from check_identity(evidence)
    yield from check_capacity(evidence.capacity, evidence.watched_s)
    yield from check_questions(evidence)
    yield from check_choices(evidence)
    yield from check_files(evidence.unwritten, evidence.watched_s)


def _bounded(findings: Iterable[Finding]) -> Iterator[Finding]:
    seen: Counter[str] = Counter()
    last: dict[str, Finding] = {}
    for finding in findings:
        seen[finding.name] += 1
        if seen[finding.name] <= MOST_OF_A_KIND:
            yield finding
        last[finding.name] = finding
    for name, count in seen.items():
        if count > MOST_OF_A_KIND:
            more = f"{count - MOST_OF_A_KIND} more"
            yield last[name]._replace(subject=more, evidence=f"{count} in all")
