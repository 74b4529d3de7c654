"""What /metrics says of reservations, of sessions, and of what is predicted."""

from __future__ import annotations

from collections.abc import Iterator

from kvd.selection.service import Selections
from kvd.telemetry.metrics import BREATH, Family, counter, gauge


def booking_families(selections: Selections) -> Iterator[Family | None]:
    reservations = selections.reservations
    retries = reservations.retries
    yield gauge("kvd_selection_reservations", "Live reservations", len(reservations.live))
    help = "Bookings ended because their client left before its answer"
    yield counter("kvd_selection_given_back_total", help, reservations.given_back)
    help = "Reservations dropped for their age"
    yield counter("kvd_selection_expired_total", help, reservations.expired)
    help = "Reservations that went with their rank"
    yield counter("kvd_selection_removed_total", help, reservations.removed)
    early = reservations.early
    help = "Ends heard before their reservations from replicas, which none has met yet"
    yield gauge("kvd_selection_early_ends", help, len(early))
    help = "Of these, forgotten at the bound"
    yield counter("kvd_selection_early_ends_forgotten_total", help, early.forgotten)
    yield gauge("kvd_selection_retries_known", "Answers that can be had again", len(retries))
    help = "Requests answered again under their Idempotency-Key"
    yield counter("kvd_selection_retries_total", help, retries.repeated)
    help = "Answers forgotten at the bound"
    yield counter("kvd_selection_retries_forgotten_total", help, retries.forgotten)
    if selections.affinity is not None:
        sessions = selections.affinity.sessions
        yield gauge("kvd_selection_sessions", "Sessions that are bound", len(sessions))
        help = "Sessions forgotten at the bound"
        yield counter("kvd_selection_sessions_dropped_total", help, sessions.dropped)
    predicted = 0
    for number, key in enumerate(list(selections.fleets), 1):
        partition = selections.state.partitions.get(key)
        predicted += 0 if partition is None else partition.index.predicted()
        if number % BREATH == 0:
            yield None
    help = "Blocks thought to be cached beside what events tell"
    yield gauge("kvd_selection_predicted_blocks", help, predicted)
