"""Serves selections: a rank is chosen and booked at once, or when one becomes free.

No code awaits between choosing a rank and booking it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial

import trio

from kvd.errors import KvdError
from kvd.model import PartitionKey
from kvd.selection.candidates import Candidates, members_json, schedulable
from kvd.selection.chooser import RankChooser, awaited, check_constraints
from kvd.selection.options import RouterOptions
from kvd.selection.phases import PREFILL_SUFFIX, Phase
from kvd.selection.queue import ANYONE, Urgency
from kvd.selection.replies import Replies
from kvd.selection.requests import (
    PromptLookup,
    QueuedRequest,
    SelectReply,
    SelectRequest,
)
from kvd.selection.reservations import Reservations
from kvd.selection.stats import SelectionOutcome, SelectionStats, Unserved
from kvd.telemetry.stretches import SELECTIONS
from kvd_core.selector.selector import Pool
from kvd_core.selector.settings import DIRECT

# Waiting selections served in one pass of the loop: 1.5 ms with the answers to their clients, 5 ms
# on a busy machine. Later passes serve the rest.
SERVED_AT_ONCE = 16

_OTHER_SIZE = "the block size of the workers changed while the request waited"
_STOPPING = "the service is stopping"


class Scheduler:
    """The selections of all models and tenants."""

    def __init__(
        self,
        candidates: Mapping[PartitionKey, Candidates],
        options: RouterOptions,
        reservations: Reservations,
        chooser: RankChooser,
        replies: Replies,
        clock: Callable[[], float],
        stats: SelectionStats,
        max_waiting: int,
    ) -> None:
        """At most `max_waiting` selections wait: the process has descriptors for their clients."""
        self.held = 0
        self._max_waiting = max_waiting
        self._stats = stats
        self._candidates = candidates
        self._options = options
        self._reservations = reservations
        self._chooser = chooser
        self._replies = replies
        self._clock = clock
        self._stopping = False

    def select(self, request: SelectRequest, lookup: PromptLookup) -> SelectReply | QueuedRequest:
        """Selects a rank, and books it if asked to; returns the answer, or the held selection.

        Raises Unserved if no rank is eligible or all are overloaded, BadRequest for constraints
        that contradict each other or lack what the mode needs, Conflict on the id of a live
        reservation.
        """
        try:
            return self._select(request, lookup)
        except KvdError as error:
            self._stats.failed(request, error)
            raise

    def _select(self, request: SelectRequest, lookup: PromptLookup) -> SelectReply | QueuedRequest:
        if request.retry is not None:
            if (rest := self._reservations.retries.rest(request.retry)) is not None:
                self._reservations.free(rest)  # only its prefill is booked still: book both anew
            if (again := self._again(request)) is not None:
                return again
        candidates = schedulable(self._candidates, request.key)
        pool = candidates.pool
        check_constraints(request)
        self._check_new(request)  # now, so that no request waits only to meet a conflict
        lookup(pool)
        # A request that names its worker, or only asks for advice, need not queue behind others.
        direct = request.settings.members["mode"] == DIRECT
        if direct or request.advisory or not candidates.queue.waits(_queue_key(request)):
            answered = self._serve_one(candidates, request)
            if answered is not None:
                return answered
        return self._hold(candidates, pool, request)

    async def wait(self, held: QueuedRequest) -> bytes:
        """Waits for the answer of a held selection; raises as `select` does.

        Whatever ends the wait, the selection is in no queue afterwards. If no client will receive
        the answer, its booking is freed.
        """
        since = self._clock()
        try:
            with trio.move_on_after(self._options.max_wait_s):
                await held.done.wait()
        except trio.Cancelled:
            if held.answer is None:
                self._stats.ended(held.request, SelectionOutcome.LEFT)
            self.take_back(held)  # the selection may have been served meanwhile
            raise
        finally:
            self._stats.waits.observe(self._clock() - since)
            assert held.waiting is not None
            candidates = self._candidates.get(held.request.key)
            self.held -= 1
            if candidates is not None:  # else its workers have left, and it is in no queue
                candidates.queue.remove(held.waiting)
                if not len(candidates.queue):
                    candidates.ledger.loads.on_eased(None)
                if held.drains_queue:
                    self.drain_queue(candidates)
        if held.answer is None:
            self._stats.ended(held.request, SelectionOutcome.TIMED_OUT)
            raise Unserved(SelectionOutcome.TIMED_OUT, "all workers are busy", retry_after_s=1)
        if isinstance(held.answer, KvdError):
            raise held.answer
        return held.answer

    def take_back(self, held: QueuedRequest) -> None:
        """Ends the booking of an answer that cannot reach its client."""
        if held.receipt is not None:
            self._reservations.take_back(held.receipt)

    def _hold(self, candidates: Candidates, pool: Pool, request: SelectRequest) -> QueuedRequest:
        if self._stopping:
            raise Unserved(SelectionOutcome.STOPPING, _STOPPING)
        limit = min(self._options.max_held, self._max_waiting)
        if self.held >= limit:
            text = f"the limit of {limit} waiting selections is reached"
            raise Unserved(SelectionOutcome.QUEUE_FULL, text, retry_after_s=1)
        held = QueuedRequest(request, pool.hold(), pool.block_size)
        least = pool.least_prefill_tokens(request.settings, None)
        urgency = Urgency(request.strict_priority, request.priority_jump, least)
        held.waiting = candidates.queue.push(_queue_key(request), held, urgency, self._clock())
        # Requests that end on other faces make room, too.
        candidates.ledger.loads.on_eased(partial(self.drain_queue, candidates))
        self.held += 1
        self._stats.held(request)
        return held

    def _again(self, request: SelectRequest) -> SelectReply | None:
        again = self._reservations.retries.find(request.retry)
        if again is not None:
            self._stats.ended(request, SelectionOutcome.REPEATED)
        return again

    def _serve_one(self, candidates: Candidates, request: SelectRequest) -> SelectReply | None:
        """Chooses and books a rank for the pool's matched prompt; None if all ranks are busy."""
        if request.phase is Phase.BOTH:
            answered = self._serve_both(candidates, request)
        else:
            answered = self._serve_phase(candidates, request, request.phase)
        if answered is None:
            return None
        if answered.receipt is not None and request.retry is not None:
            self._reservations.retries.note(request.retry, answered)
        return answered

    def _serve_phase(
        self, candidates: Candidates, request: SelectRequest, phase: Phase | None, more: bytes = b""
    ) -> SelectReply | None:
        chosen = self._chooser.choose(candidates, request, phase, request.constraints)
        if chosen is None:
            return None
        receipt = None
        if request.reservation_id is not None:
            receipt = self._reservations.reserve(
                candidates, request, request.reservation_id, chosen
            )
        self._stats.served(request, chosen.ranks.pool, chosen)
        more += self._replies.timed(candidates, request, chosen)
        return SelectReply(
            self._replies.answer(candidates, request, chosen, request.reservation_id, more), receipt
        )

    def _serve_both(self, candidates: Candidates, request: SelectRequest) -> SelectReply | None:
        """Serves both phases; the decode worker's answer contains that of the prefill worker.

        Without a prefill worker the decode worker serves the whole request; the answer says why.
        """
        try:
            prefill_by = request.constraints_in(Phase.PREFILL)
            prefill = self._chooser.choose(candidates, request, Phase.PREFILL, prefill_by)
        except Unserved as error:
            fallback = {"prefill": None, "fallback": f"decode only: {error}"}
            answered = self._serve_phase(candidates, request, None, members_json(fallback))
            self._stats.fallbacks += answered is not None
            return answered
        if prefill is None:
            return None
        decode = self._chooser.choose(candidates, request, Phase.DECODE, request.constraints)
        if decode is None:
            return None
        prefill_id = receipt = None
        if request.reservation_id is not None:
            prefill_id = request.reservation_id + PREFILL_SUFFIX
            receipt = self._reservations.reserve_both(
                candidates, request, request.reservation_id, decode, prefill
            )
        self._stats.served(request, decode.ranks.pool, prefill, decode)
        timed = self._replies.timed(candidates, request, prefill)
        inner = self._replies.answer(candidates, request, prefill, prefill_id, timed)
        more = b'"prefill":%b,' % inner + timed
        answer = self._replies.answer(candidates, request, decode, request.reservation_id, more)
        return SelectReply(answer, receipt)

    def _check_new(self, request: SelectRequest) -> None:
        if request.reservation_id is not None:
            self._reservations.check_new(request.reservation_id)
            if request.phase is Phase.BOTH:
                self._reservations.check_new(request.reservation_id + PREFILL_SUFFIX)

    def stop(self) -> None:
        """Refuses all selections that wait, and from now on every selection that would have to."""
        self._stopping = True
        self.retry_all()

    # ---- serving the selections that wait

    def retry_all(self) -> None:
        """Tries all waiting selections again, whatever may have changed."""
        for candidates in self._candidates.values():
            candidates.queue.wake()
        self.drain_queues()

    def drain_queues(self) -> None:
        """Serves all selections whose awaited ranks have changed, if it can."""
        if self.held:
            for candidates in self._candidates.values():
                self.drain_queue(candidates)

    def drain_queue(self, candidates: Candidates) -> None:
        """Serves the selections among these candidates whose awaited ranks have changed, in order.

        It stops after SERVED_AT_ONCE; the task of the last served selection goes on when it runs.
        """
        if not len(candidates.queue):
            return
        changed = candidates.pool.changed()
        if changed is None:  # the pool is new
            self._end_hashed(candidates)
        candidates.queue.wake(ANYONE if changed is None else int.from_bytes(changed, "little"))
        with SELECTIONS:
            for number, held in enumerate(
                candidates.queue.release(partial(self._serve, candidates)), 1
            ):
                if number == SERVED_AT_ONCE:
                    held.drains_queue = True
                    break
        candidates.pool.remember()

    def _end_hashed(self, candidates: Candidates) -> None:
        """Refuses selections that came hashed by a block size that the workers no longer have."""
        if not candidates.workers:
            return
        for held in list(candidates.queue):
            if held.again is None and held.block_size != candidates.pool.block_size:
                assert held.waiting is not None
                candidates.queue.remove(held.waiting)
                error = Unserved(SelectionOutcome.NOT_ELIGIBLE, _OTHER_SIZE, retry_after_s=1)
                self._stats.failed(held.request, error)
                held.resolve(error)

    def _serve(self, candidates: Candidates, held: QueuedRequest) -> int:
        """Answers a selection and returns 0, or returns the bits of the ranks it must wait for."""
        request = held.request
        try:
            if self._stopping:
                raise Unserved(SelectionOutcome.STOPPING, _STOPPING)
            if not candidates.workers:
                raise Unserved(SelectionOutcome.NO_WORKERS, "no schedulable workers are available")
            if (answered := self._again(request)) is None:  # else a retry was served before it
                self._check_new(request)
                if self._chooser.are_all_busy(candidates, request):
                    return awaited(candidates, request)
                self._match_again(candidates, held)
                answered = self._serve_one(candidates, request)
        except KvdError as error:
            self._stats.failed(request, error)
            held.resolve(error)
            return 0
        if answered is None:
            return awaited(candidates, request)
        held.resolve(answered)
        return 0

    def _match_again(self, candidates: Candidates, held: QueuedRequest) -> None:
        if held.block_size == candidates.pool.block_size:
            candidates.pool.match_again(held.prompt)
            return
        assert held.again is not None  # or `_end_hashed` has refused it
        held.again(candidates.pool)
        held.prompt, held.block_size = candidates.pool.hold(), candidates.pool.block_size
        self._stats.rehashed += 1


def _queue_key(request: SelectRequest) -> Hashable:
    """Returns the key of a selection's queue, which names the ranks that may serve it."""
    return request.constraints if request.phase is None else (request.constraints, request.phase)
