"""Families of /metrics about reservations, sessions and predicted blocks."""

from __future__ import annotations

from collections.abc import Iterator

from kvd.selection.service import Selections
from kvd.telemetry.metrics import BREATH, Family, counter, gauge


def booking_families(selections: Selections) -> Iterator[Family | None]:
    reservations = selections.reservations
    retries = reservations.retries
    yield gauge(
        "kvd_selection_reservations", "Number of live reservations", len(reservations.owner_of)
    )
    help = "Number of reservations freed because their client left before its answer"
    yield counter("kvd_selection_given_back_total", help, reservations.given_back)
    help = "Number of reservations dropped for their age"
    yield counter("kvd_selection_expired_total", help, reservations.expired)
    help = "Number of reservations removed with their rank"
    yield counter("kvd_selection_removed_total", help, reservations.removed)
    early = reservations.early
    help = "Number of ends received from replicas that still wait for their reservations"
    yield gauge("kvd_selection_early_ends", help, len(early))
    help = "Number of ends received before their reservations and forgotten at the limit"
    yield counter("kvd_selection_early_ends_forgotten_total", help, early.forgotten)
    yield gauge("kvd_selection_retries_known", "Number of answers kept for retries", len(retries))
    help = "Number of retries answered under their Idempotency-Key"
    yield counter("kvd_selection_retries_total", help, retries.repeated)
    help = "Number of answers kept for retries and forgotten at the limit"
    yield counter("kvd_selection_retries_forgotten_total", help, retries.forgotten)
    if selections.affinity is not None:
        sessions = selections.affinity.sessions
        yield gauge("kvd_selection_sessions", "Number of sessions bound to a rank", len(sessions))
        help = "Number of sessions forgotten at the limit"
        yield counter("kvd_selection_sessions_dropped_total", help, sessions.dropped)
    predicted = 0
    for number, key in enumerate(list(selections.candidates), 1):
        candidates = selections.candidates.get(key)
        predicted += 0 if candidates is None else candidates.predicted()
        if number % BREATH == 0:
            yield None
    help = "Number of blocks predicted to be cached"
    yield gauge("kvd_selection_predicted_blocks", help, predicted)
