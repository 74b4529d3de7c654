"""Answers of bookings that came with an Idempotency-Key, kept for retries.

    (reservation id as given, key) ──> digest of the request, answer, booking
    id of a booking                ──> the above, to forget the answer when the booking ends

An answer is kept as long as its booking lives; a later retry books anew. The digest distinguishes a
retry from another request under the same key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgpack

from kvd.errors import Conflict
from kvd.selection.options import MAX_RETRIES
from kvd.selection.requests import Retry, SelectReply
from kvd_core.ledger.journal import Journal

ANSWERED = ord("A")  # kind of a journal's record of an answer that is kept for retries

Name = tuple[str | None, str]  # the reservation id as given, the key


class Retries:
    """The answers that are kept for retries."""

    def __init__(self, max_answers: int = MAX_RETRIES, journal: Journal | None = None) -> None:
        """Each answer is recorded in the `journal`, if there is one."""
        self._journal = journal
        self._max_answers = max_answers
        self.repeated = 0
        self.forgotten = 0  # answers dropped at the bound
        # Oldest booking first, which a dict would find behind all the entries deleted before.
        self._answers: OrderedDict[Name, tuple[bytes, SelectReply]] = OrderedDict()
        self.names: dict[str, Name] = {}  # by the id of the booking, and of its separate prefill

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, retry: Retry | None) -> SelectReply | None:
        """Returns the answer that this request got before, if its booking still lives.

        Raises Conflict for another request under the same key.
        """
        known = None if retry is None else self._answers.get(retry.name)
        if retry is None or known is None:
            return None
        content, answered = known
        assert answered.receipt is not None
        if not answered.receipt.lives():
            return None
        if content != retry.content:
            raise Conflict("the Idempotency-Key was used for a different request")
        self.repeated += 1
        answered.receipt.clients += 1
        return answered

    def rest(self, retry: Retry) -> str | None:
        """Returns the id of what is left of this request's ended booking, as `Receipt.left`."""
        content, answered = self._answers.get(retry.name, (None, None))
        if answered is None or content != retry.content:
            return None
        receipt = answered.receipt
        assert receipt is not None
        return None if receipt.lives() else receipt.left()

    def note(self, retry: Retry | None, answered: SelectReply) -> None:
        """Keeps the answer of a booking that has just been made."""
        if retry is None:
            return
        receipt = answered.receipt
        assert receipt is not None
        self._forget(retry.name)
        self._answers[retry.name] = retry.content, answered
        self.names.update(dict.fromkeys(receipt.ids, retry.name))
        self._record(retry.name, retry.content, answered)
        if len(self._answers) > self._max_answers:
            self._forget(next(iter(self._answers)))
            self.forgotten += 1

    def ended(self, request_id: str) -> None:
        """Forgets the answer of a booking that has ended, unless its prefill lives on."""
        name = self.names.get(request_id)
        if name is not None:
            receipt = self._answers[name][1].receipt
            assert receipt is not None
            if receipt.left() is None:
                self._forget(name)

    def _forget(self, name: Name) -> None:
        if name not in self._answers:
            return
        receipt = self._answers.pop(name)[1].receipt
        assert receipt is not None
        for request_id in receipt.ids:
            if self.names.get(request_id) == name:  # it may belong to a later booking
                del self.names[request_id]

    def _record(self, name: Name, content: bytes, answered: SelectReply) -> None:
        receipt = answered.receipt
        if self._journal is not None and receipt is not None:
            booked = receipt.request_id, receipt.booked_at, receipt.beside
            partition = receipt.owner.key
            record = *name, content, answered.answer, partition, *booked
            self._journal.put(ANSWERED, msgpack.packb(record))

    def export(self) -> Iterator[None]:
        """Records all kept answers in the journal; yields after each."""
        for name in list(self._answers):
            if name in self._answers:
                self._record(name, *self._answers[name])
            yield

    def expire(self, before: float, limit: int) -> bool:
        """Forgets at most `limit` answers of earlier bookings; True while there may be more."""
        old: list[Name] = []
        for name, (_, answered) in self._answers.items():
            assert answered.receipt is not None
            if len(old) == limit or answered.receipt.booked_at >= before:
                break
            old.append(name)
        for name in old:
            self._forget(name)
        return len(old) == limit
