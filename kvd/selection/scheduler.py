"""Chooses the rank that serves a prompt, at once or when a rank becomes free.

No code awaits between choosing a rank and booking it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import trio

from kvd.errors import BadRequest, KvdError
from kvd.index.registry import Registry
from kvd.model import PartitionKey, RankKey
from kvd.selection.affinity import Affinity
from kvd.selection.candidates import Candidates, members_json, schedulable
from kvd.selection.options import RouterOptions
from kvd.selection.phases import PREFILL_SUFFIX, Phase, in_phase
from kvd.selection.policies import Policy
from kvd.selection.queue import ANYONE, Urgency
from kvd.selection.requests import (
    Choice,
    Constraints,
    PromptLookup,
    QueuedRequest,
    Ranks,
    SelectReply,
    SelectRequest,
)
from kvd.selection.reservations import Reservations
from kvd.selection.serving import opening
from kvd.selection.speeds import Speeds
from kvd.selection.stats import SLO_OUTCOMES, SelectionOutcome, SelectionStats, Unserved
from kvd.selection.weighing import (
    Basis,
    ChoiceAttempt,
    Weighed,
    WeighedRank,
    basis_of,
    cost_of,
    terms,
)
from kvd.telemetry.stretches import SELECTIONS
from kvd.wire.event_stream import StreamHealth
from kvd_core.base.draws import Draws
from kvd_core.selector import selector
from kvd_core.selector.selector import Explained, Pool
from kvd_core.selector.settings import DIRECT, KV, Settings

# Reasons why no rank was chosen, by phase.
_NO_RANK: dict[Phase | None, str] = {
    None: "no endpoints available to route work",
    Phase.PREFILL: "no prefill worker is available",
    Phase.DECODE: "no decode worker is available",
}
_GONE: dict[Phase | None, str] = {
    None: "all eligible workers have lost their event connections",
    Phase.PREFILL: "all eligible prefill workers have lost their event connections",
    Phase.DECODE: "all eligible decode workers have lost their event connections",
}
_OVERLOADED: dict[Phase | None, str] = {
    None: "all workers are overloaded",
    Phase.PREFILL: "all prefill workers are overloaded",
    Phase.DECODE: "all decode workers are overloaded",
}

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
        draws: Draws,
        clock: Callable[[], float],
        stats: SelectionStats,
        max_waiting: int,
        registry: Registry,
        speeds: Speeds,
        affinity: Affinity | None = None,
    ) -> None:
        """At most `max_waiting` selections wait: the process has descriptors for their clients."""
        self.held = 0
        self._max_waiting = max_waiting
        self._registry = registry
        self._speeds = speeds
        self._stats = stats
        self._candidates = candidates
        self._options = options
        self._reservations = reservations
        self._draws = draws
        self._clock = clock
        self._affinity = affinity
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
        _check_constraints(request)
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
        chosen = self._choose(candidates, request, phase, request.constraints)
        if chosen is None:
            return None
        receipt = None
        if request.reservation_id is not None:
            receipt = self._reservations.reserve(
                candidates, request, request.reservation_id, chosen
            )
        self._stats.served(request, chosen.ranks.pool, chosen)
        more += self._timed(candidates, request, chosen)
        return SelectReply(
            self._answer(candidates, request, chosen, request.reservation_id, more), receipt
        )

    def _serve_both(self, candidates: Candidates, request: SelectRequest) -> SelectReply | None:
        """Serves both phases; the decode worker's answer contains that of the prefill worker.

        Without a prefill worker the decode worker serves the whole request; the answer says why.
        """
        try:
            prefill_by = request.constraints_in(Phase.PREFILL)
            prefill = self._choose(candidates, request, Phase.PREFILL, prefill_by)
        except Unserved as error:
            fallback = {"prefill": None, "fallback": f"decode only: {error}"}
            answered = self._serve_phase(candidates, request, None, members_json(fallback))
            self._stats.fallbacks += answered is not None
            return answered
        if prefill is None:
            return None
        decode = self._choose(candidates, request, Phase.DECODE, request.constraints)
        if decode is None:
            return None
        prefill_id = receipt = None
        if request.reservation_id is not None:
            prefill_id = request.reservation_id + PREFILL_SUFFIX
            receipt = self._reservations.reserve_both(
                candidates, request, request.reservation_id, decode, prefill
            )
        self._stats.served(request, decode.ranks.pool, prefill, decode)
        timed = self._timed(candidates, request, prefill)
        inner = b'"prefill":%b,' % self._answer(candidates, request, prefill, prefill_id, timed)
        return SelectReply(
            self._answer(candidates, request, decode, request.reservation_id, inner + timed),
            receipt,
        )

    def _choose(
        self,
        candidates: Candidates,
        request: SelectRequest,
        phase: Phase | None,
        constraints: Constraints | None,
    ) -> Choice | None:
        """Chooses a rank for the prompt that the pool has matched; None if all are busy."""
        settings = in_phase(request.settings, phase)
        for ranks, each in self._attempts(candidates, request, phase, constraints, settings):
            pool, eligible, _ = ranks
            chosen = pool.choose(each.settings, each.eligible, self._draws.next(), each.factors)
            if chosen >= 0:
                break
        if chosen == selector.BUSY:
            return None
        if chosen == selector.NONE:
            if candidates.lacks(eligible):
                raise Unserved(SelectionOutcome.NOT_ELIGIBLE, _GONE[phase], retry_after_s=1)
            raise Unserved(SelectionOutcome.NOT_ELIGIBLE, _NO_RANK[phase])
        if chosen == selector.OVERLOADED:
            raise Unserved(SelectionOutcome.OVERLOADED, _OVERLOADED[phase], retry_after_s=1)
        return Choice(chosen, ranks, settings, phase, pool.best(settings, eligible))

    def _attempts(
        self,
        candidates: Candidates,
        request: SelectRequest,
        phase: Phase | None,
        constraints: Constraints | None,
        settings: Settings,
    ) -> Iterator[tuple[Ranks, ChoiceAttempt]]:
        """Yields attempts to choose, with the ranks that each is made among.

        These are the ranks expected to keep the request's limit, then all that may serve it. In
        mode `kv` the former may be busy, as any rank may unless all are.
        """
        ranks = candidates.ranks(constraints, phase, request.preferred)
        if request.slo_ttft_s is not None and phase is not Phase.DECODE:
            within = self._within_slo(candidates, request.slo_ttft_s, settings, ranks)
            if within is not None and not ranks.pool.refusal(settings, ranks.eligible):
                kv = settings.members["mode"] == KV
                eased = settings.replace(queue_threshold=None) if kv else settings
                for attempt in self._attempts_among(candidates, request, phase, eased, within):
                    yield within, attempt
        for attempt in self._attempts_among(candidates, request, phase, settings, ranks):
            yield ranks, attempt

    def _attempts_among(
        self,
        candidates: Candidates,
        request: SelectRequest,
        phase: Phase | None,
        settings: Settings,
        ranks: Ranks,
    ) -> Iterator[ChoiceAttempt]:
        """Yields attempts: the session's rank, the affinity target, then all of these ranks."""
        _, eligible, factors = ranks
        if phase is not Phase.PREFILL:  # a session is bound to the rank where its requests decode
            bound = self._bound(candidates, request, settings, ranks)
            if bound is not None:
                yield ChoiceAttempt(
                    Basis.SESSION, settings.replace(queue_threshold=None), bound, None
                )
        affinity = (
            None if phase is Phase.PREFILL and request.phase is Phase.BOTH else request.affinity
        )
        if affinity is not None and (wanted := candidates.targets(affinity, eligible)):
            yield ChoiceAttempt(Basis.AFFINITY, settings, wanted, None)
        yield ChoiceAttempt(basis_of(settings), settings, eligible, factors)

    def weigh(self, request: SelectRequest, lookup: PromptLookup) -> list[Weighed]:
        """Weighs the candidates for each phase of a request as of now, and chooses none.

        Raises as `select` does, except if no rank can be chosen: the result says why.
        """
        candidates = schedulable(self._candidates, request.key)
        _check_constraints(request)
        lookup(candidates.pool)
        phases = (Phase.PREFILL, Phase.DECODE) if request.phase is Phase.BOTH else (request.phase,)
        return [self._weigh(candidates, request, phase) for phase in phases]

    def _weigh(
        self, candidates: Candidates, request: SelectRequest, phase: Phase | None
    ) -> Weighed:
        settings = in_phase(request.settings, phase)
        constraints = request.constraints_in(phase)
        for ranks, attempt in self._attempts(candidates, request, phase, constraints, settings):
            pool, eligible, factors = ranks
            chances = pool.chances(attempt.settings, attempt.eligible, attempt.factors)
            if not isinstance(chances, int):
                break
        rows = [
            WeighedRank(
                row,
                cost_of(row, settings),
                terms(row, settings),
                pool.exceeded(at, settings),
                self._stream(candidates, row),
                self._expected_ttft_s(candidates, row, phase),
            )
            for at, row in enumerate(pool.explain(settings, eligible, factors))
        ]
        policy = Policy.of(request.settings)
        return Weighed(phase, attempt.basis, policy, settings, chances, rows)

    def _within_slo(
        self, candidates: Candidates, limit_s: float, settings: Settings, ranks: Ranks
    ) -> Ranks | None:
        """Narrows ranks to those expected to keep the limit; None if there are none."""
        mask = bytearray(len(ranks.pool))
        for at, row in enumerate(ranks.pool.explain(settings, ranks.eligible)):
            expected_s = self._expected_ttft_s(candidates, row, None)
            mask[at] = row.eligible and expected_s is not None and expected_s <= limit_s
        return ranks._replace(eligible=bytes(mask)) if any(mask) else None

    def _expected_ttft_s(
        self, candidates: Candidates, row: Explained, phase: Phase | None
    ) -> float | None:
        """Returns the expected seconds to the first token.

        None if the rank's speed is unknown, and for a decode: another rank computes its prompt.
        """
        if phase is Phase.DECODE:
            return None
        queued = row.active_prefill_tokens + row.effective_prefill_tokens
        return self._speeds.ttft_s((candidates.key, row.worker_id, row.dp_rank), queued)

    def _bound(
        self, candidates: Candidates, request: SelectRequest, settings: Settings, ranks: Ranks
    ) -> bytes | None:
        """Returns the mask of the session's ranks, None if the session does not decide.

        Unless all ranks are busy the session's rank is taken even if it is busy, as in Dynamo, but
        not if it has more live requests than the policy's `session_bound` allows.
        """
        bound = None if self._affinity is None else self._affinity.target(request)
        wanted = None if bound is None else candidates.targets(bound, ranks.eligible)
        return None if wanted is None else ranks.pool.stay(settings, ranks.eligible, wanted)

    def _check_new(self, request: SelectRequest) -> None:
        if request.reservation_id is not None:
            self._reservations.check_new(request.reservation_id)
            if request.phase is Phase.BOTH:
                self._reservations.check_new(request.reservation_id + PREFILL_SUFFIX)

    def _answer(
        self,
        candidates: Candidates,
        request: SelectRequest,
        chosen: Choice,
        reservation_id: str | None,
        more: bytes = b"",
    ) -> bytes:
        pool, eligible, factors = chosen.ranks
        members = (candidates.pieces[chosen.position] or candidates.piece(chosen.position)) + more
        if request.explain:
            rows = pool.explain(chosen.settings, eligible, factors)
            explained = [self._explained(candidates, request, chosen, row) for row in rows]
            policy = str(Policy.of(request.settings))
            members += members_json({"router_policy": policy, "candidates": explained})
        if request.advisory:
            load = _load(candidates, chosen, self._options.prefill_busy)
            members += members_json({"worker_load": load})
        phase = None if chosen.phase is None else chosen.phase.value
        begin = opening(request.selection_id, reservation_id, phase)
        return pool.render_answer(begin, members, chosen.position, chosen.settings)

    def _timed(self, candidates: Candidates, request: SelectRequest, chosen: Choice) -> bytes:
        """Returns the members about the time to the first token, if the request asks for them.

        `chosen` is the rank that computes the prompt.
        """
        if not request.expected_ttft and request.slo_ttft_s is None:
            return b""
        row = chosen.ranks.pool.explained(chosen.position, chosen.settings)
        expected_s = self._expected_ttft_s(candidates, row, chosen.phase)
        members: dict[str, Any] = {"expected_ttft_s": expected_s}
        if request.slo_ttft_s is not None:
            is_met = None if expected_s is None else expected_s <= request.slo_ttft_s
            self._stats.slo[SLO_OUTCOMES[is_met]] += 1
            members["slo_met"] = is_met
        return members_json(members)

    def _explained(
        self, candidates: Candidates, request: SelectRequest, chosen: Choice, row: Explained
    ) -> dict[str, Any]:
        """Returns a rank's cost and its terms, whether it has the session, its stream's health."""
        bound = None if self._affinity is None else self._affinity.target(request)
        has = bound is not None and row.worker_id == bound[0] and bound[1] in (None, row.dp_rank)
        expected_s = self._expected_ttft_s(candidates, row, chosen.phase)
        return row._asdict() | {
            "has_session": has,
            "expected_ttft_s": expected_s,
            "stream": self._stream(candidates, row),
        }

    def _stream(self, candidates: Candidates, row: Explained) -> StreamHealth | None:
        """Returns the health of a rank's stream, None without one."""
        listener = self._registry.find_listener(RankKey(candidates.key, row.worker_id, row.dp_rank))
        return None if listener is None else listener.health(self._clock())

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
                if self._all_busy(candidates, request):
                    return _awaited(candidates, request)
                self._match_again(candidates, held)
                answered = self._serve_one(candidates, request)
        except KvdError as error:
            self._stats.failed(request, error)
            held.resolve(error)
            return 0
        if answered is None:
            return _awaited(candidates, request)
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

    def _all_busy(self, candidates: Candidates, request: SelectRequest) -> bool:
        """Returns whether all ranks are busy; this needs no match of the prompt."""
        phase = Phase.PREFILL if request.phase is Phase.BOTH else request.phase
        eligible = candidates.eligible(request.constraints_in(phase), phase)
        return candidates.pool.refusal(in_phase(request.settings, phase), eligible) == selector.BUSY


def _load(candidates: Candidates, chosen: Choice, busy: float | None) -> dict[str, int | None]:
    """Returns the load of a chosen rank and the capacity of its worker; None is unknown.

    With `busy`, a number of batches, it also says whether the rank prefills more than that.
    """
    row = chosen.ranks.pool.explained(chosen.position, chosen.settings)
    record = candidates.workers[row.worker_id]
    tokens, capacity = row.active_prefill_tokens, record.max_num_batched_tokens
    load = {
        "active_prefill_tokens": tokens,
        "prefill_token_capacity": capacity,
        "total_kv_blocks": record.total_kv_blocks,
    }
    if busy is not None:
        load["prefill_busy"] = bool(capacity) and tokens > busy * (capacity or 0)
    return load


def _awaited(candidates: Candidates, request: SelectRequest) -> int:
    """Returns the bits of the ranks whose loads decide whether a selection can be served."""
    awaited = 0
    for phase in (Phase.PREFILL, Phase.DECODE) if request.phase is Phase.BOTH else (request.phase,):
        eligible = candidates.eligible(request.constraints_in(phase), phase)
        if eligible is None:
            return ANYONE
        awaited |= int.from_bytes(eligible, "little")
    return awaited


def _queue_key(request: SelectRequest) -> Hashable:
    """Returns the key of a selection's queue, which names the ranks that may serve it."""
    return request.constraints if request.phase is None else (request.constraints, request.phase)


def _check_constraints(request: SelectRequest) -> None:
    constraints = request.constraints
    pinned = None if constraints is None else constraints.pinned
    if request.settings.members["mode"] == DIRECT and (
        pinned is None or request.phase is Phase.BOTH
    ):
        raise BadRequest(
            "the router mode is direct: pinned_worker must name the worker of one phase"
        )
    allowed = None if constraints is None else constraints.allowed
    if pinned is not None and allowed is not None and pinned[0] not in allowed:
        raise BadRequest(f"pinned worker {pinned[0]} is not in allowed worker set")
