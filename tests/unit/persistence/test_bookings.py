"""Which requests are alive behind the records of a journal."""

from __future__ import annotations

from kvd.model import PartitionKey
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
    ended.note(KEY, "chat-17", 10.0)
    for kind, content in ended.records():
        journal.put(kind, content)
    kept = KeptRequests()
    kept.begin("a", ClockTranslation(0.0))
    for record in read(journal.take()):
        kept.take(record)
    assert [each.booked.admitted_at for each in kept.live.values()] == [20.0]
    assert kept.ended.has(KEY, "chat-17", 10.0)
