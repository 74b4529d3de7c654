"""Reservations that selections have booked on ranks, from the booking to its end.

LiveRequests (kvd.slots)        booking, prefill complete, end, expiry, replicas, observers
  └ Reservations                adds: ids unique in the service, both phases of a request, sessions,
                                retries, output blocks that weigh less towards the end
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from kvd.errors import Conflict, Invalid, KvdError, NotFound, Unavailable
from kvd.model import PartitionKey
from kvd.selection.affinity import Affinity
from kvd.selection.candidates import Candidates, schedulable
from kvd.selection.decay import output_weight
from kvd.selection.options import MAX_RETRIES
from kvd.selection.phases import PREFILL_SUFFIX, Phase
from kvd.selection.requests import Choice, PromptLookup, SelectRequest
from kvd.selection.retries import Retries
from kvd.selection.serving import booked_tokens
from kvd.selection.worker_record import WorkerRecord
from kvd.slots.live_requests import EXPIRY_SLICE, LiveRequests, Receipt
from kvd.slots.shared_loads import Ledgers
from kvd.wire.lifecycle import Face
from kvd_core.ledger import ledger
from kvd_core.ledger.journal import Journal
from kvd_core.ledger.ledger import LiveRequest
from kvd_core.selector.selector import Pool, Prompt


class Reservations(LiveRequests[Candidates]):
    """The live reservations of all models and tenants."""

    face = Face.SELECTION

    def __init__(
        self,
        candidates: Mapping[PartitionKey, Candidates],
        expiry_s: float,
        clock: Callable[[], float],
        ledgers: Ledgers,
        affinity: Affinity | None = None,
        *,
        decays: bool = False,
        max_retries: int = MAX_RETRIES,
        journal: Journal | None = None,
    ) -> None:
        """`decays` makes output blocks weigh less towards the expected end of a request.

        Keeps the answers of `max_retries` bookings for retries. They are recorded in the `journal`,
        if there is one; the ledgers record everything else themselves.
        """
        super().__init__(candidates, expiry_s, clock)
        self.owner_of: dict[str, Candidates] = {}  # by id of a live reservation
        self.retries = Retries(max_retries, journal)
        self._candidates = candidates
        self._ledgers = ledgers
        self._affinity = affinity
        self._decays = decays

    def open_ledger(self, candidates: Candidates, block_size: int) -> None:
        """Gives candidates their ledger of this block size, whose loads other faces share.

        Ranks of another block size must have left the candidates.
        """
        if candidates.ledger_block_size == block_size:
            return
        before, candidates.ledger = (
            candidates.ledger.loads,
            self._ledgers.open(self.face, candidates.key, block_size),
        )
        candidates.ledger.loads.on_eased(before.eased)
        before.on_eased(None)
        candidates.ledger_block_size = block_size

    def check_new(self, reservation_id: str | None) -> None:
        """Raises Conflict if the id belongs to a live reservation."""
        if reservation_id is not None and reservation_id in self.owner_of:
            raise Conflict(f"reservation {reservation_id} already exists")

    def reserve(
        self, candidates: Candidates, request: SelectRequest, reservation_id: str, chosen: Choice
    ) -> Receipt[Candidates]:
        """Books the prompt that the pool has matched; raises as `_admitted` does."""
        now = self.clock()
        tokens = self._add(request, reservation_id, chosen, now)
        self._added(candidates, request, reservation_id, chosen, tokens, now)
        return Receipt(candidates, reservation_id, now)

    def reserve_both(
        self,
        candidates: Candidates,
        request: SelectRequest,
        reservation_id: str,
        decode: Choice,
        prefill: Choice,
    ) -> Receipt[Candidates]:
        """Books both phases or neither, the prefill phase under an id of its own."""
        now, prefill_id = self.clock(), reservation_id + PREFILL_SUFFIX
        tokens = self._add(request, prefill_id, prefill, now)
        try:
            none = self._add(request, reservation_id, decode, now)
        except (KvdError, MemoryError):
            candidates.ledger.free(prefill_id)
            raise
        self._added(candidates, request, reservation_id, decode, none, now)
        self._added(candidates, request, prefill_id, prefill, tokens, now)
        return Receipt(candidates, reservation_id, now, prefill_id)

    def _add(self, request: SelectRequest, reservation_id: str, chosen: Choice, now: float) -> int:
        """Adds a booking to the ledger; returns the tokens that it counts."""
        pool = chosen.ranks.pool
        tokens = booked_tokens(pool, chosen.settings, chosen.position)
        outcome = pool.reserve(
            reservation_id,
            chosen.position,
            tokens,
            now,
            expected_output=request.expected_output_tokens,
            blocks=chosen.phase is not Phase.PREFILL,
        )
        _admitted(outcome, reservation_id)
        return tokens

    def _added(
        self,
        candidates: Candidates,
        request: SelectRequest,
        reservation_id: str,
        chosen: Choice,
        tokens: int,
        now: float,
    ) -> None:
        pool = chosen.ranks.pool
        candidate = pool.candidate(chosen.position)
        rank = candidate.worker_id, candidate.dp_rank
        pool.predict(chosen.position, now)
        blocks = chosen.phase is not Phase.PREFILL
        if self._affinity is not None and blocks:
            self._affinity.booked(candidates, request, reservation_id, rank)
        self.owner_of[reservation_id] = candidates
        hashes = partial(_hashes, pool, blocks)
        self.begun(
            candidates,
            reservation_id,
            rank,
            hashes,
            tokens,
            request.expected_output_tokens,
            request.lora_name,
        )

    def reserve_on_rank(
        self,
        key: PartitionKey,
        reservation_id: str,
        rank: tuple[int, int],
        lookup: PromptLookup,
        tokens: int,
        *,
        predicts: bool,
        expected: int | None = None,
        phase: Phase | None = None,
    ) -> tuple[WorkerRecord, Receipt[Candidates]]:
        """Books a prompt on a rank that was selected before; returns its worker and a receipt.

        `predicts` says that the prompt has local hashes, so that its blocks can be predicted;
        `expected` is the number of tokens of its output.

        Raises Unavailable without candidates, NotFound for a rank that they do not have,
        Conflict on the id of a live reservation.
        """
        candidates = schedulable(self._candidates, key)
        worker_id, dp_rank = rank
        pool = candidates.pool
        candidate = pool.find(worker_id, dp_rank)
        if worker_id in candidates.workers:  # as on the original: the id counts before the rank
            self.check_new(reservation_id)
        if candidate is None:
            raise NotFound(f"worker {worker_id} dp_rank {dp_rank} is not schedulable")
        lookup(pool)
        now = self.clock()
        tokens = 0 if phase is Phase.DECODE else tokens
        blocks = phase is not Phase.PREFILL
        outcome = pool.reserve(
            reservation_id, candidate, tokens, now, expected_output=expected, blocks=blocks
        )
        _admitted(outcome, reservation_id)
        if predicts:
            pool.predict(candidate, now)
        self.owner_of[reservation_id] = candidates
        hashes = partial(_hashes, pool, blocks)
        self.begun(candidates, reservation_id, rank, hashes, tokens, expected)
        return candidates.workers[worker_id], Receipt(candidates, reservation_id, now)

    def find(self, reservation_id: str) -> tuple[PartitionKey, LiveRequest]:
        """Returns the model and tenant of a reservation, and its request; raises NotFound."""
        candidates = self._candidates_of(reservation_id)
        live = candidates.ledger.request(reservation_id)
        assert live is not None
        return candidates.key, live

    def prefill_complete(self, reservation_id: str) -> None:
        """Ends the prefill of a reservation; repeating it is no error. Raises NotFound."""
        ended = self._end_prefill(reservation_id, is_complete=True)
        if reservation_id in self.owner_of or not ended:
            self.complete(self._candidates_of(reservation_id), reservation_id)

    def output_block(self, reservation_id: str, fraction: float | None) -> None:
        """Adds an output block to a reservation; raises NotFound."""
        candidates = self._candidates_of(reservation_id)
        if fraction is None and self._decays:
            fraction = _decayed(candidates, reservation_id)
        candidates.ledger.output_block(reservation_id, fraction)

    def note_refused(self, reservation_id: str, prompt: Prompt) -> None:
        """Takes back what a reservation predicted of its prompt, which its rank does not compute.

        Raises NotFound.
        """
        candidates = self._candidates_of(reservation_id)
        live = candidates.ledger.request(reservation_id)
        assert live is not None
        pool = candidates.pool
        candidate = pool.find(live.worker_id, live.dp_rank)
        if candidate is not None:
            pool.match_again(prompt)
            pool.withdraw(candidate, live.admitted_at)

    def free(self, reservation_id: str) -> None:
        """Ends a reservation; raises NotFound."""
        ended = self._end_prefill(reservation_id, is_complete=False)
        if reservation_id in self.owner_of or not ended:
            self.end(self._candidates_of(reservation_id), reservation_id)

    def _end_prefill(self, reservation_id: str, *, is_complete: bool) -> bool:
        """Ends the separate booking of a reservation's prefill phase; False without one.

        Observers learn how long a prefill has taken only if it `is_complete`.
        """
        prefill_id = reservation_id + PREFILL_SUFFIX
        candidates = self.owner_of.get(prefill_id)
        if candidates is None or self.owner_of.get(reservation_id, candidates) is not candidates:
            return False
        if is_complete:
            self.complete(candidates, prefill_id)
        self.end(candidates, prefill_id)
        return True

    def expire(self, now: float) -> Iterator[None]:
        """Drops outdated answers, sessions, predictions and reservations; rests at every yield."""
        while self.retries.expire(now - self.expiry_s, EXPIRY_SLICE):
            yield
        while self._affinity is not None and self._affinity.sessions.expire(now, EXPIRY_SLICE):
            yield
        for candidates in list(self._candidates.values()):
            while candidates.prune_predictions(now):
                yield
        yield from super().expire(now)

    def _candidates_of(self, reservation_id: str) -> Candidates:
        candidates = self.owner_of.get(reservation_id)
        if candidates is None:
            raise NotFound(f"reservation {reservation_id} not found")
        return candidates

    # ---- hooks of LiveRequests

    def _is_elsewhere(self, owner: Candidates, request_id: str) -> bool:
        return self.owner_of.get(request_id, owner) is not owner

    def _enter(self, owner: Candidates, request_id: str) -> None:
        self.owner_of[request_id] = owner

    def _forget(self, request_id: str) -> None:
        self.owner_of.pop(request_id, None)
        self.retries.ended(request_id)
        if self._affinity is not None:
            self._affinity.ended(request_id)

    def _end_booking(self, owner: Candidates, request_id: str) -> None:
        self.free(request_id)


def _hashes(pool: Pool, blocks: bool) -> bytes:
    """Returns the sequence hashes of a pool's prompt; a booking without blocks has none."""
    return pool.hold().sequence_hashes if blocks else b""


def _decayed(candidates: Candidates, reservation_id: str) -> float | None:
    """Returns the weight of output blocks after one more; None if no length is expected."""
    live = candidates.ledger.request(reservation_id)
    if live is None or live.expected_output_tokens is None:
        return None
    blocks = live.output_blocks + 1
    return output_weight(blocks, candidates.ledger_block_size or 1, live.expected_output_tokens)


def _admitted(outcome: int, reservation_id: str) -> None:
    """Raises the error that a failed booking means to clients."""
    if outcome == ledger.EXISTS:
        raise Conflict(f"reservation {reservation_id} already exists")
    if outcome == ledger.OVERFLOW:
        raise Invalid("isl_tokens: the tokens of the rank would exceed what can be counted")
    if outcome != ledger.ADDED:
        raise Unavailable(
            "the limit of live reservations is reached (max_requests, max_request_blocks)"
        )
