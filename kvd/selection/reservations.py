"""What is booked on the ranks: reservations from their admission to their end, here and elsewhere.

Ids are unique in the whole service. Replicas are told of every step, and their steps are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from kvd.errors import Conflict, Invalid, KvdError, NotFound, Unavailable
from kvd.model import Observers, PartitionKey
from kvd.selection.affinity import Affinity
from kvd.selection.candidates import Fleet, schedulable
from kvd.selection.decay import output_weight
from kvd.selection.options import MAX_RETRIES
from kvd.selection.phases import PREFILL_SUFFIX, Phase
from kvd.selection.requests import Choice, Look, Receipt, SelectRequest
from kvd.selection.retries import Retries
from kvd.selection.serving import booked_tokens
from kvd.selection.worker_record import WorkerRecord
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import apply_to, named_rank
from kvd.wire.early import EarlySteps
from kvd.wire.lifecycle import Face, Outcome, Step
from kvd.wire.lifecycle import Lifecycle as Event
from kvd_core.ledger import ledger
from kvd_core.ledger.ledger import Ledger, LiveRequest

EXPIRY_SLICE = 64  # requests expired between two checkpoints


class Reservations:
    """The live reservations of all fleets."""

    def __init__(
        self,
        fleets: Mapping[PartitionKey, Fleet],
        expiry_s: float,
        clock: Callable[[], float],
        on_idle: Callable[[Fleet], None],
        ledgers: Ledgers,
        affinity: Affinity | None = None,
        *,
        decays: bool = False,
        max_retries: int = MAX_RETRIES,
    ) -> None:
        """Calls `on_idle` after whatever may have made a rank of a fleet less busy.

        `decays` makes output blocks weigh less towards the expected end of a request. So many
        answers can be had again.
        """
        self.live: dict[str, Fleet] = {}
        self.steps: Observers[[Event]] = Observers()  # told of every step of a reservation
        self._fleets = fleets
        self.expiry_s = expiry_s
        self._clock = clock
        self._on_idle = on_idle
        self._ledgers = ledgers
        self._affinity = affinity
        self._decays = decays
        self.retries = Retries(max_retries)
        self.early = EarlySteps()
        self.given_back = 0
        self.expired = 0
        self.removed = 0  # with their ranks

    def open_ledger(self, fleet: Fleet, block_size: int) -> None:
        """Lets a fleet and other faces weigh on each other from now on.

        Ranks of another block size must have left the fleet.
        """
        if fleet.ledger_block_size == block_size:
            return
        before, fleet.ledger = fleet.ledger.loads, self._ledgers.open(fleet.key, block_size)
        fleet.ledger.loads.on_eased(before.eased)
        before.on_eased(None)
        fleet.ledger_block_size = block_size

    def check_new(self, reservation_id: str | None) -> None:
        """Raises Conflict on an id that lives."""
        if reservation_id is not None and reservation_id in self.live:
            raise Conflict(f"reservation {reservation_id} already exists")

    def book(
        self, fleet: Fleet, ask: SelectRequest, reservation_id: str, chosen: Choice
    ) -> Receipt:
        """Books the prompt that the pool has looked at; raises what `_admitted` does."""
        now = self._clock()
        tokens = self._add(fleet, ask, reservation_id, chosen, now)
        self._added(fleet, ask, reservation_id, chosen, tokens, now)
        return Receipt(fleet.ledger, reservation_id, now)

    def book_both(
        self, fleet: Fleet, ask: SelectRequest, reservation_id: str, decode: Choice, prefill: Choice
    ) -> Receipt:
        """Does the same for two phases, or neither: prefill has an id of its own."""
        now, prefill_id = self._clock(), reservation_id + PREFILL_SUFFIX
        tokens = self._add(fleet, ask, prefill_id, prefill, now)
        try:
            none = self._add(fleet, ask, reservation_id, decode, now)
        except KvdError:
            fleet.ledger.free(prefill_id)
            raise
        self._added(fleet, ask, reservation_id, decode, none, now)
        self._added(fleet, ask, prefill_id, prefill, tokens, now)
        return Receipt(fleet.ledger, reservation_id, now, prefill_id)

    def _add(
        self, fleet: Fleet, ask: SelectRequest, reservation_id: str, chosen: Choice, now: float
    ) -> int:
        """Returns the tokens that the booking counts."""
        tokens = booked_tokens(fleet.pool, chosen.settings, chosen.at)
        outcome = fleet.pool.book(
            reservation_id,
            chosen.at,
            tokens,
            now,
            expected_output=ask.expected_output_tokens,
            blocks=chosen.phase is not Phase.PREFILL,
        )
        _admitted(outcome, reservation_id)
        return tokens

    def _added(
        self,
        fleet: Fleet,
        ask: SelectRequest,
        reservation_id: str,
        chosen: Choice,
        tokens: int,
        now: float,
    ) -> None:
        candidate = fleet.pool.candidates[chosen.at]
        self.live[reservation_id] = fleet
        fleet.predict(chosen.at, now)
        blocks = chosen.phase is not Phase.PREFILL
        if self._affinity is not None and blocks:
            place = candidate.worker_id, candidate.dp_rank
            self._affinity.booked(fleet, ask, reservation_id, place)
        if self.steps.subscribers:
            record = fleet.workers[candidate.worker_id]
            hashes = fleet.pool.hold().sequence_hashes if blocks else b""
            where = fleet, record, reservation_id, candidate.dp_rank
            extra = ask.expected_output_tokens, ask.lora_name
            self._tell(*where, Step.ADD, hashes, tokens, *extra)

    def reserve(
        self,
        key: PartitionKey,
        reservation_id: str,
        rank: tuple[int, int],
        look: Look,
        tokens: int,
        *,
        predicts: bool,
        expected: int | None = None,
        phase: Phase | None = None,
    ) -> tuple[WorkerRecord, Receipt]:
        """Books a prompt on a rank that was selected before; returns its worker.

        `predicts` says that the prompt is known by its local hashes too; `expected` are the tokens
        of its output.

        Raises Unavailable without a fleet, NotFound for a rank it does not have, Conflict on an
        id that lives.
        """
        fleet = schedulable(self._fleets, key)
        worker_id, dp_rank = rank
        candidate = fleet.pool.find(worker_id, dp_rank)
        if candidate is None:
            raise NotFound(f"worker {worker_id} dp_rank {dp_rank} is not schedulable")
        self.check_new(reservation_id)
        look(fleet.pool)
        now = self._clock()
        tokens = 0 if phase is Phase.DECODE else tokens
        blocks = phase is not Phase.PREFILL
        outcome = fleet.pool.book(
            reservation_id, candidate, tokens, now, expected_output=expected, blocks=blocks
        )
        _admitted(outcome, reservation_id)
        self.live[reservation_id] = fleet
        if predicts:
            fleet.predict(candidate, now)
        record = fleet.workers[worker_id]
        if self.steps.subscribers:
            hashes = fleet.pool.hold().sequence_hashes if blocks else b""
            self._tell(fleet, record, reservation_id, dp_rank, Step.ADD, hashes, tokens, expected)
        return record, Receipt(fleet.ledger, reservation_id, now)

    def take_back(self, receipt: Receipt) -> None:
        """Ends a booking of which its client will never hear, unless another one has."""
        receipt.clients -= 1
        left = receipt.left()
        if receipt.clients == 0 and left is not None:
            self.given_back += 1
            self.free(left)

    def undoing(self, ledger: Ledger, reservation_id: str, booked_at: float) -> Callable[[], None]:
        """Returns what takes back a booking that is told to one client."""
        return partial(self.take_back, Receipt(ledger, reservation_id, booked_at))

    def find(self, reservation_id: str) -> tuple[PartitionKey, LiveRequest]:
        """Returns where a reservation is booked, and what; raises NotFound."""
        fleet = self._fleet_of(reservation_id)
        live = fleet.ledger.request(reservation_id)
        assert live is not None
        return fleet.key, live

    def prefill_complete(self, reservation_id: str) -> None:
        """Ends the prefill of a reservation, once or again; raises NotFound."""
        ended = self._end_prefill(reservation_id)
        if reservation_id in self.live or not ended:
            fleet = self._fleet_of(reservation_id)
            fleet.ledger.prefill_complete(reservation_id)
            self._tell_step(fleet, reservation_id, Step.PREFILL_COMPLETE)
            self._on_idle(fleet)

    def output_block(self, reservation_id: str, fraction: float | None) -> None:
        """Adds an output block to a reservation; raises NotFound."""
        fleet = self._fleet_of(reservation_id)
        if fraction is None and self._decays:
            fraction = _decayed(fleet, reservation_id)
        fleet.ledger.output_block(reservation_id, fraction)

    def free(self, reservation_id: str) -> None:
        """Ends a reservation; raises NotFound."""
        ended = self._end_prefill(reservation_id)
        if reservation_id in self.live or not ended:
            self._end(self._fleet_of(reservation_id), reservation_id)

    def _end_prefill(self, reservation_id: str) -> bool:
        """Ends what is booked for a reservation's prefill phase alone, if there is such a thing."""
        prefill_id = reservation_id + PREFILL_SUFFIX
        fleet = self.live.get(prefill_id)
        if fleet is None or self.live.get(reservation_id, fleet) is not fleet:
            return False
        self._end(fleet, prefill_id)
        return True

    def _end(self, fleet: Fleet, reservation_id: str) -> None:
        self._tell_step(fleet, reservation_id, Step.FREE)
        fleet.ledger.free(reservation_id)
        self._forget(reservation_id)
        self._on_idle(fleet)

    def _forget(self, reservation_id: str) -> None:
        """Forgets a reservation that the ledger has forgotten."""
        self.live.pop(reservation_id, None)
        if self._affinity is not None:
            self._affinity.ended(reservation_id)

    def expire(self, now: float) -> Iterator[None]:
        """Drops what is older than the expiry age; rests at every yield. Replicas do the same."""
        while self.retries.expire(now - self.expiry_s, EXPIRY_SLICE):
            yield
        while self._affinity is not None and self._affinity.sessions.expire(now, EXPIRY_SLICE):
            yield
        for fleet in list(self._fleets.values()):
            while fleet.forget_predictions(now):
                yield
            while expired := fleet.ledger.expire(now - self.expiry_s, EXPIRY_SLICE):
                self.expired += len(expired)
                for reservation_id in expired:
                    self._forget(reservation_id)
                self._on_idle(fleet)
                yield

    def drop_rank(self, fleet: Fleet, record: WorkerRecord, dp_rank: int, rank: int) -> None:
        """Ends what is booked on a rank of the ledger that leaves, and takes the rank out."""
        for reservation_id in fleet.ledger.remove_rank(rank):
            self.removed += 1
            self._forget(reservation_id)
            self._tell(fleet, record, reservation_id, dp_rank, Step.FREE)

    def _fleet_of(self, reservation_id: str) -> Fleet:
        fleet = self.live.get(reservation_id)
        if fleet is None:
            raise NotFound(f"reservation {reservation_id} not found")
        return fleet

    # ---- replicas

    def apply(self, event: Event, now: float) -> Outcome:
        """Takes a step that a replica tells of; changes nothing unless it is APPLIED."""
        fleet = self._fleets.get(event.partition)
        if fleet is None or not fleet.workers:
            return Outcome.UNKNOWN_MODEL
        rank = named_rank(event, fleet.block_size, fleet.workers, fleet.ledger)
        if isinstance(rank, Outcome):
            return rank
        if event.step is Step.ADD and self.live.get(event.request_id, fleet) is not fleet:
            return Outcome.DUPLICATE
        outcome = apply_to(fleet.ledger, rank, self.early, event, now)
        if outcome is not Outcome.APPLIED:
            return outcome
        if event.step is Step.ADD:
            self.live[event.request_id] = fleet
            return outcome
        if event.step is Step.FREE:
            self._forget(event.request_id)
        self._on_idle(fleet)
        return outcome

    def _tell_step(self, fleet: Fleet, reservation_id: str, step: Step) -> None:
        live = fleet.ledger.request(reservation_id) if self.steps.subscribers else None
        if live is not None:
            record = fleet.workers[live.worker_id]
            self._tell(fleet, record, reservation_id, live.dp_rank, step)

    def _tell(
        self,
        fleet: Fleet,
        record: WorkerRecord,
        reservation_id: str,
        dp_rank: int,
        step: Step,
        hashes: bytes = b"",
        tokens: int = 0,
        output_tokens: int | None = None,
        lora_name: str | None = None,
    ) -> None:
        if self.steps.subscribers:
            where = fleet.key, record.block_size or 0, reservation_id, record.worker_id, dp_rank
            of_add = hashes, tokens, output_tokens, lora_name
            self.steps.tell(Event(*where, step, *of_add, Face.SELECTION))


def _decayed(fleet: Fleet, reservation_id: str) -> float | None:
    """Returns what a reservation's output blocks weigh with one more; None if nobody knows."""
    live = fleet.ledger.request(reservation_id)
    if live is None or live.expected_output_tokens is None:
        return None
    blocks = live.output_blocks + 1
    return output_weight(blocks, fleet.block_size or 1, live.expected_output_tokens)


def _admitted(outcome: int, reservation_id: str) -> None:
    """Raises what a booking's outcome means to clients."""
    if outcome == ledger.EXISTS:
        raise Conflict(f"reservation {reservation_id} already exists")
    if outcome == ledger.OVERFLOW:
        raise Invalid("isl_tokens: the rank cannot count so many tokens")
    if outcome != ledger.ADDED:
        raise Unavailable("the limit of live reservations is reached")
