"""Which requests are alive behind the records of a journal."""

from __future__ import annotations

import tracemalloc

import pytest

from kvd.model import PartitionKey
from kvd.persistence import bookings
from kvd.persistence.bookings import EndedRequests, KeptRequests
from kvd.persistence.clocks import ClockTranslation
from kvd.slots.shared_loads import Ledgers
from kvd.wire.lifecycle import Face
from kvd_core.ledger.journal import Journal, read

KEY = PartitionKey("m", "default")


def test_an_ended_request_does_not_end_a_later_one_with_its_id() -> None:
    """That one is booked in blocks of one token, as SGLang's pages are."""
    journal = Journal(1 << 16)
    ledger = Ledgers(journals=[journal]).open(Face.SLOT_TRACKER, KEY, 1)
    ledger.add("chat-17", ledger.add_rank(7, 0), bytes(8), 1, 20.0)
    ended = EndedRequests()
    ended.note(Face.SLOT_TRACKER, KEY, "chat-17", 10.0)
    for kind, content in ended.records():
        journal.put(kind, content)
    kept = KeptRequests()
    kept.begin("a", ClockTranslation(0.0))
    for record in read(journal.take()):
        kept.take(record)
    assert [each.booked.admitted_at for each in kept.live.values()] == [20.0]
    assert kept.ended.has(Face.SLOT_TRACKER, KEY, "chat-17", 10.0)
    assert not kept.ended.has(Face.SELECTION, KEY, "chat-17", 10.0)


@pytest.mark.parametrize("length", [1, 4096])
def test_ended_requests_have_a_bound_in_bytes(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long their ids are; the last ones are remembered."""
    monkeypatch.setattr(bookings, "MAX_ENDED_BYTES", 1 << 18)
    many = 2 * (1 << 18) // (length + bookings.ENDED_BYTES)
    tracemalloc.start()
    try:
        ended = EndedRequests()
        for number in range(many):
            ended.note(Face.SELECTION, KEY, str(number).rjust(length, "x"), 1.0)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    names = [str(number).rjust(length, "x") for number in range(many)]
    known = [ended.has(Face.SELECTION, KEY, name, 1.0) for name in names]
    assert known[0] < known[-1]
    assert known == sorted(known)
    assert used < 1.1 * (1 << 18)
