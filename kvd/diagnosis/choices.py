"""Does every worker get requests, do bookings end, and do replicas agree?"""

from __future__ import annotations

from collections.abc import Iterator

from kvd.diagnosis.evidence import Evidence, SelectionEvidence, ShareEvidence
from kvd.diagnosis.findings import Finding, counted, found, minutes, partition_name

# Bookings that are needed before their distribution is judged.
ENOUGH_BOOKINGS = 100
# Share of the bookings on one worker that is a finding. Prompts of one prefix go to one worker
# while its load allows, but a fleet in use also gets other prompts.
NEARLY_ALL = 0.95
# Seconds without a connection to a replica before it is a finding; restarted replicas are back
# sooner.
AWAY_S = 5.0
# Lead of a replica's clock that neither the network nor rounding explains.
SKEW_S = 1.0


def check_choices(evidence: Evidence) -> Iterator[Finding]:
    """Yields what is wrong with selections, bookings and replicas."""
    for share in evidence.shares:
        yield from _check_share(share, evidence.watched_s)
    yield from _check_selections(evidence.selections, evidence.watched_s)
    for each in evidence.expired:
        if each.expired:
            text = f"{counted(each.expired, 'request')} in {minutes(evidence.watched_s)}"
            yield found("reservations_expire", f"{each.face} face", text, expiry_s=each.expiry_s)
    yield from _check_replicas(evidence)
    if evidence.clock_lead_s >= SKEW_S:
        text = f"a session was bound {evidence.clock_lead_s:.1f} s ahead of this clock"
        yield found("clock_skew", "replicas", text)


def _check_share(share: ShareEvidence, watched_s: float) -> Iterator[Finding]:
    total = sum(share.bookings.values())
    if total < ENOUGH_BOOKINGS or share.workers < 2:
        return
    most = max(share.bookings, key=share.bookings.__getitem__)
    if share.bookings[most] >= NEARLY_ALL * total:
        evidence = (
            f"{share.bookings[most]} of {total} observed bookings on busy ranks in "
            f"{minutes(watched_s)}; {share.workers} workers can be chosen"
        )
        yield found("load_one_sided", f"worker {most} of {partition_name(share.key)}", evidence)


def _check_selections(selections: SelectionEvidence, watched_s: float) -> Iterator[Finding]:
    span = minutes(watched_s)
    if selections.overloaded:
        evidence = (
            f"{counted(selections.overloaded, 'selection')} refused in {span}, "
            f"{selections.served} served"
        )
        yield found("all_overloaded", "selection service", evidence)
    if selections.queue_full or selections.timed_out:
        evidence = (
            f"{selections.queue_full} selections found the queue full and {selections.timed_out} "
            f"waited too long in {span}; {selections.waiting} wait, {selections.max_waiting} may"
        )
        yield found("queue_full", "selection service", evidence, "selections")


def _check_replicas(evidence: Evidence) -> Iterator[Finding]:
    for replica in evidence.replicas:
        fault = "" if replica.probe is None else replica.probe.fault
        if fault or replica.away_s > AWAY_S:
            subject = f"replica {replica.endpoint}"
            text = f"no connection for {minutes(replica.away_s)}"
            why = fault or replica.last_error
            text_with_reason = f"{text}: {why}" if why else text
            yield found("replica_behind", subject, text_with_reason, "replica")
    traffic, span = evidence.traffic, minutes(evidence.watched_s)
    if traffic.overflows or traffic.missed:
        text = f"{traffic.overflows} times a queue was full, {traffic.missed} messages were missed"
        yield found("replica_behind", "replicas", f"{text} in {span}", "queue")
    shared = evidence.shared
    if shared is None:
        return
    if not shared.is_connected:
        text = shared.fault or "not connected"
        yield found("replica_behind", f"state server {shared.server}", text, "server")
    elif shared.behind:
        text = f"steps of {shared.behind} replicas are lacking"
        yield found("replica_behind", f"state server {shared.server}", text, "steps")
