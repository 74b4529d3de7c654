"""The life of requests from their booking to their end, which all faces account for alike.

    LiveRequests                    one for each face: SlotTrackers, and Reservations
      ├ owners: (model, tenant) ──> Tracker or Candidates: a ledger, its block size, its workers
      ├ steps    ──> replicas       each step that a client has taken here
      ├ moments  ──> observers      each step with its time, from any source
      └ early                       ends that replicas sent before the bookings

    client   booking ──> prefill complete ──> free              sent to replicas, observed
    replica  ADD     ──> MarkPrefillCompleted ──> Free          observed
    here                  expiry by age                         observed
                          its rank is removed                   sent to replicas, observed

Each face books in its own way and then calls `begun`; the rest of a request's life is here.
Compiled handlers book, complete and free in the ledger themselves if nobody has subscribed
(kvd/faces/*/handlers.pyx).

One thread owns all of it and no method awaits, so each call is one atomic change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

from kvd.model import Observers, PartitionKey
from kvd.wire.early_ends import EarlySteps
from kvd.wire.lifecycle import Face, Lifecycle, Outcome, Step
from kvd_core.base.sampling import Sample
from kvd_core.ledger import ledger
from kvd_core.ledger.ledger import Ledger, LiveRequest

# Requests expired, or owners examined, between two checkpoints: under 1 ms.
EXPIRY_SLICE = 64

# Requests that end with their ranks, or ranks whose predictions end, between two checkpoints: under
# 1 ms even if each is logged.
REMOVAL_SLICE = 64

# About how many requests a second observers get the steps of, unless one observer wants all. Each
# costs 0.1 ms if requests come one by one.
OBSERVED_PER_S = 50


class LedgerOwner(Protocol):
    """A face's requests and ranks of one model and tenant."""

    @property
    def key(self) -> PartitionKey: ...
    @property
    def ledger_block_size(self) -> int | None: ...  # tokens; None before the first worker
    @property
    def workers(self) -> Collection[int]: ...
    @property
    def ledger(self) -> Ledger: ...

    def has_rank(self, worker_id: int, dp_rank: int) -> bool:
        """Returns whether a worker has a rank; the ledger also has ranks that are leaving."""


Owner = TypeVar("Owner", bound=LedgerOwner)


class Moment(NamedTuple):
    """One step of a request's life.

    `live` is the request: after an ADD, but before any other step. It is None if the request ended
    because it was too old or its rank was removed.
    """

    time: float  # seconds of the face's clock
    step: Step
    key: PartitionKey
    request_id: str
    live: LiveRequest | None
    mirrored: bool = False  # the step came from a replica


@dataclass(slots=True, eq=False)
class Receipt(Generic[Owner]):
    """Identifies one booking, and no later booking under the same id."""

    owner: Owner
    request_id: str
    booked_at: float  # seconds of the face's clock
    beside: str | None = None  # the id of the prefill booked with it, which may outlive it
    clients: int = 1  # how many clients were given its answer

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.request_id,) if self.beside is None else (self.request_id, self.beside)

    def lives(self) -> bool:
        return self._is_live(self.request_id)

    def left(self) -> str | None:
        """Returns the id whose end ends all that is left of the booking, None if nothing is."""
        if self.lives():
            return self.request_id
        return self.beside if self.beside is not None and self._is_live(self.beside) else None

    def _is_live(self, request_id: str) -> bool:
        live = self.owner.ledger.request(request_id)
        return live is not None and live.admitted_at == self.booked_at


class LiveRequests(Generic[Owner]):
    """The live requests of one face."""

    face: ClassVar[Face]

    def __init__(
        self, owners: Mapping[PartitionKey, Owner], expiry_s: float, clock: Callable[[], float]
    ) -> None:
        """Drops requests older than `expiry_s`; `clock` returns seconds and never goes back."""
        self.expiry_s = expiry_s
        self.clock = clock
        self.steps: Observers[[Lifecycle]] = Observers()  # notified of the steps of clients
        # Notified of each step of the requests in the sample, within that step.
        self.moments: Observers[[Moment]] = Observers()
        self.sample = Sample(OBSERVED_PER_S)
        self.early = EarlySteps()
        self.given_back = 0  # requests whose clients left before they had their answers
        self.expired = 0
        self.removed = 0  # requests that ended with their ranks
        self._owners = owners

    # ---- hooks that a face may override

    def _is_elsewhere(self, owner: Owner, request_id: str) -> bool:
        """Returns whether another owner has the id; here each owner has ids of its own."""
        return False

    def _enter(self, owner: Owner, request_id: str) -> None:
        """Notes that the owner's ledger has a new request that came from a replica."""

    def _forget(self, request_id: str) -> None:
        """Notes that a request has ended and left its owner's ledger."""

    def _end_booking(self, owner: Owner, request_id: str) -> None:
        """Ends a request and everything booked with it; here that is the request alone."""
        self.end(owner, request_id)

    # ---- steps of clients

    def begun(
        self,
        owner: Owner,
        request_id: str,
        rank: tuple[int, int],
        hashes: Callable[[], bytes],
        tokens: int,
        expected_output_tokens: int | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Notifies replicas and observers of a request booked on a rank (worker id, dp rank).

        `hashes` returns its sequence hashes as native u64s, and is called if there are replicas.
        """
        if self.steps.subscribers:
            self.steps.notify(
                Lifecycle(
                    owner.key,
                    owner.ledger_block_size or 0,
                    request_id,
                    *rank,
                    Step.ADD,
                    hashes(),
                    tokens,
                    expected_output_tokens,
                    lora_name,
                    self.face,
                )
            )
        self.observe_begin(owner, request_id)

    def observe_begin(self, owner: Owner, request_id: str, *, mirrored: bool = False) -> None:
        """Notifies observers of a request that has been booked."""
        if self.watches(request_id):
            live = owner.ledger.request(request_id)
            assert live is not None
            moment = Moment(live.admitted_at, Step.ADD, owner.key, request_id, live, mirrored)
            self.moments.notify(moment)

    def watches(self, request_id: str) -> bool:
        """Returns whether observers get the steps of a request."""
        return bool(self.moments.subscribers) and self.sample.takes(request_id)

    def complete(self, owner: Owner, request_id: str) -> bool:
        """Ends the prefill of a request; repeating it is no error. False without the request."""
        live = self._shown(owner, request_id)
        if not owner.ledger.prefill_complete(request_id):
            return False
        self._took(owner, request_id, Step.PREFILL_COMPLETE, live)
        ease(owner.ledger)
        return True

    def end(self, owner: Owner, request_id: str) -> None:
        """Ends a request; an unknown one is no error."""
        live = self._shown(owner, request_id)
        if owner.ledger.free(request_id):
            self._took(owner, request_id, Step.FREE, live)
            self._forget(request_id)
        ease(owner.ledger)

    def _shown(self, owner: Owner, request_id: str) -> LiveRequest | None:
        """Returns a request if anyone has subscribed to its steps."""
        if self.steps.subscribers or self.watches(request_id):
            return owner.ledger.request(request_id)
        return None

    def _took(self, owner: Owner, request_id: str, step: Step, live: LiveRequest | None) -> None:
        """Notifies replicas and observers of a client's step; `live` is the request before it."""
        if live is not None:
            rank = live.worker_id, live.dp_rank
            self._publish(owner.key, owner.ledger_block_size, request_id, rank, step)
            self._observe(owner, request_id, step, None, live)

    def _publish(
        self,
        key: PartitionKey,
        block_size: int | None,
        request_id: str,
        rank: tuple[int, int],
        step: Step,
    ) -> None:
        """Notifies replicas of a step that ends a request or its prefill."""
        if self.steps.subscribers:
            size = block_size or 0
            self.steps.notify(Lifecycle(key, size, request_id, *rank, step, face=self.face))

    def _observe(
        self, owner: Owner, request_id: str, step: Step, at: float | None, live: LiveRequest | None
    ) -> None:
        """Notifies observers of a step that was taken at `at`, or now."""
        if self.watches(request_id):
            at = self.clock() if at is None else at
            self.moments.notify(Moment(at, step, owner.key, request_id, live))

    # ---- bookings whose clients have left

    def undoing(self, owner: Owner, request_id: str, booked_at: float) -> Callable[[], None]:
        """Returns a function that takes back a booking whose answer goes to one client."""
        return partial(self.take_back, Receipt(owner, request_id, booked_at))

    def take_back(self, receipt: Receipt[Owner]) -> None:
        """Ends a booking whose answer did not reach a client, unless another client has it."""
        receipt.clients -= 1
        left = receipt.left()
        if receipt.clients == 0 and left is not None:
            self.given_back += 1
            self._end_booking(receipt.owner, left)

    # ---- ends that no client asked for

    def expire(self, now: float) -> Iterator[None]:
        """Drops requests older than the expiry age; rests at every yield.

        Replicas are not notified: each expires requests by its own clock.
        """
        before = now - self.expiry_s
        for number, key in enumerate(list(self._owners), 1):
            while self._expire_some(key, before, now):
                yield
            if number % EXPIRY_SLICE == 0:
                yield

    def _expire_some(self, key: PartitionKey, before: float, now: float) -> bool:
        """Drops a slice of an owner's old requests; False if there were none."""
        owner = self._owners.get(key)  # meanwhile it may have ended, or been made anew
        expired = [] if owner is None else owner.ledger.expire(before, EXPIRY_SLICE)
        if owner is None or not expired:
            return False
        self.expired += len(expired)
        for request_id in expired:
            self._observe(owner, request_id, Step.FREE, now, None)
            self._forget(request_id)
        ease(owner.ledger)
        return True

    def drop_ranks(
        self, owner: Owner, worker_id: int, dp_ranks: Sequence[int], block_size: int
    ) -> Iterator[None]:
        """Takes ranks of a worker, ascending, out of the ledger, and ends their requests.

        Rests at every yield; until the end the ranks stay in the ledger with the requests that are
        left, and nothing may be booked on them any more. `block_size` is that of the worker, since
        the owner may have changed its own. The caller eases the ledger.
        """
        while self._drop_some(owner, worker_id, dp_ranks, block_size) == REMOVAL_SLICE:
            yield

    def _drop_some(
        self, owner: Owner, worker_id: int, dp_ranks: Sequence[int], block_size: int
    ) -> int:
        removed = owner.ledger.remove_ranks(worker_id, dp_ranks, REMOVAL_SLICE)
        self.removed += len(removed)
        has_listeners = bool(self.steps.subscribers or self.moments.subscribers)
        for request_id, dp_rank in removed:
            if has_listeners:
                rank = worker_id, dp_rank
                self._publish(owner.key, block_size, request_id, rank, Step.FREE)
                self._observe(owner, request_id, Step.FREE, None, None)
            self._forget(request_id)
        return len(removed)

    # ---- bookings of other processes

    def owners(self) -> Iterable[Owner]:
        """Returns all owners of requests."""
        return self._owners.values()

    def owner(self, key: PartitionKey) -> Owner | None:
        """Returns the owner of the requests of a model and tenant."""
        return self._owners.get(key)

    def ledger_of(self, key: PartitionKey) -> Ledger:
        """Returns the ledger of a model and tenant; raises KeyError without one."""
        return self._owners[key].ledger

    def rebook(self, event: Lifecycle, at: float, retry_key: str | None = None) -> Outcome:
        """Books a request that was booked at an earlier time; nobody is notified.

        The requests of an owner must come in order of age, the oldest first. Changes nothing unless
        the outcome is APPLIED.
        """
        found = self._find_rank(event)
        return found if isinstance(found, Outcome) else self._admit(*found, event, at, retry_key)

    def _find_rank(self, event: Lifecycle) -> tuple[Owner, int] | Outcome:
        """Returns the owner and the ledger's rank that an event is about, or why there is none."""
        owner = self._owners.get(event.partition)
        if owner is None or not owner.workers:
            return Outcome.UNKNOWN_MODEL
        if owner.ledger_block_size != event.block_size:
            return Outcome.BLOCK_SIZE
        if event.worker_id not in owner.workers:
            return Outcome.UNKNOWN_WORKER
        rank = owner.ledger.rank_of(event.worker_id, event.dp_rank)
        if rank is None or not owner.has_rank(event.worker_id, event.dp_rank):
            return Outcome.UNKNOWN_RANK
        return owner, rank

    def _admit(
        self, owner: Owner, rank: int, event: Lifecycle, at: float, retry_key: str | None = None
    ) -> Outcome:
        if self._is_elsewhere(owner, event.request_id):
            return Outcome.DUPLICATE
        outcome = owner.ledger.add(
            event.request_id,
            rank,
            event.hashes,
            event.prefill_tokens,
            at,
            retry_key,
            event.expected_output_tokens,
        )
        if outcome != ledger.ADDED:
            return Outcome.DUPLICATE if outcome == ledger.EXISTS else Outcome.FULL
        self._enter(owner, event.request_id)
        return Outcome.APPLIED

    # ---- steps of replicas

    def apply(self, event: Lifecycle, now: float, *, eases: bool = True) -> Outcome:
        """Applies a step that a replica has sent; changes nothing unless the outcome is APPLIED.

        Unless it `eases`, the caller does so afterwards.
        """
        found = self._find_rank(event)
        if isinstance(found, Outcome):
            return found
        if event.step is Step.ADD:
            return self._begin_mirrored(*found, event, now)
        outcome = self._move_mirrored(found[0], event, now)
        if eases and outcome is Outcome.APPLIED:
            ease(found[0].ledger)
        return outcome

    def _begin_mirrored(self, owner: Owner, rank: int, event: Lifecycle, now: float) -> Outcome:
        """Books a replica's request, unless its end has arrived before."""
        if self._is_elsewhere(owner, event.request_id):
            return Outcome.DUPLICATE
        before = self.early.meet(event, now)
        if before is Step.FREE:
            return Outcome.ENDED
        if before is not None:  # its prefill has ended
            event = replace(event, prefill_tokens=0)
        outcome = self._admit(owner, rank, event, now)
        if outcome is Outcome.APPLIED:
            self.observe_begin(owner, event.request_id, mirrored=True)
        return outcome

    def _move_mirrored(self, owner: Owner, event: Lifecycle, now: float) -> Outcome:
        """Completes or ends a request that a replica has completed or ended."""
        live = owner.ledger.request(event.request_id)
        if live is None:
            self.early.note(event, now)
            return Outcome.UNKNOWN_REQUEST
        if (live.worker_id, live.dp_rank) != (event.worker_id, event.dp_rank):
            return Outcome.OTHER_WORKER
        self.mirror_step(owner.key, event.request_id, event.step, now)
        return Outcome.APPLIED

    def mirror_step(self, key: PartitionKey, request_id: str, step: Step, now: float) -> bool:
        """Completes or ends a request as another process has done; False if it is not here.

        The caller eases afterwards: the selections woken then book for this process, and their
        bookings must not count as the other's.
        """
        owner = self._owners.get(key)
        live = None if owner is None else owner.ledger.request(request_id)
        if owner is None or live is None:
            return False
        if step is Step.FREE:
            owner.ledger.free(request_id)
        else:
            owner.ledger.prefill_complete(request_id)
        self._observe(owner, request_id, step, now, live)
        if step is Step.FREE:
            self._forget(request_id)
        return True

    def ease(self, key: PartitionKey) -> None:
        """Wakes selections that wait for ranks of a model and tenant to have less load."""
        owner = self._owners.get(key)
        if owner is not None:
            ease(owner.ledger)


def ease(of: Ledger) -> None:
    """Wakes the selections that wait for less load on the ranks of a ledger."""
    if of.loads.eased is not None:
        of.loads.eased()
