"""Chooses a rank for a prompt that the pool of candidates has matched; weighs all of them.

the session's rank ── the affinity target ── all ranks that may serve the phase
     └───────────────────────┴──────────────── each first among the ranks that should keep
                                               the request's limit on the first token
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvd.errors import BadRequest
from kvd.index.registry import Registry
from kvd.model import InstanceId, PartitionKey, RankKey
from kvd.selection.affinity import Affinity
from kvd.selection.candidates import Candidates, schedulable
from kvd.selection.phases import Phase, in_phase
from kvd.selection.policies import Policy
from kvd.selection.queue import ANYONE
from kvd.selection.requests import Choice, Constraints, PromptLookup, Ranks, SelectRequest
from kvd.selection.speeds import Speeds
from kvd.selection.stats import SelectionOutcome, Unserved
from kvd.selection.weighing import (
    Basis,
    ChoiceAttempt,
    Weighed,
    WeighedRank,
    basis_of,
    cost_of,
    terms,
)
from kvd.wire.event_stream import StreamHealth
from kvd_core.base.draws import Draws
from kvd_core.selector import selector
from kvd_core.selector.selector import Explained
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


class RankChooser:
    """Chooses among the candidates of all models and tenants, and books nothing."""

    def __init__(
        self,
        candidates: Mapping[PartitionKey, Candidates],
        draws: Draws,
        clock: Callable[[], float],
        registry: Registry,
        speeds: Speeds,
        affinity: Affinity | None = None,
    ) -> None:
        self._candidates = candidates
        self._draws = draws
        self._clock = clock
        self._registry = registry
        self._speeds = speeds
        self._affinity = affinity

    def choose(
        self,
        candidates: Candidates,
        request: SelectRequest,
        phase: Phase | None,
        constraints: Constraints | None,
    ) -> Choice | None:
        """Chooses a rank for the prompt that the pool has matched; None if all are busy.

        Raises Unserved if no rank is eligible or all are overloaded.
        """
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

    def _within_slo(
        self, candidates: Candidates, limit_s: float, settings: Settings, ranks: Ranks
    ) -> Ranks | None:
        """Narrows ranks to those expected to keep the limit; None if there are none."""
        mask = bytearray(len(ranks.pool))
        for at, row in enumerate(ranks.pool.explain(settings, ranks.eligible)):
            expected_s = self.expected_ttft_s(candidates, row, None)
            mask[at] = row.eligible and expected_s is not None and expected_s <= limit_s
        return ranks._replace(eligible=bytes(mask)) if any(mask) else None

    def expected_ttft_s(
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
        bound = self.session_target(request)
        wanted = None if bound is None else candidates.targets(bound, ranks.eligible)
        return None if wanted is None else ranks.pool.stay(settings, ranks.eligible, wanted)

    def session_target(self, request: SelectRequest) -> tuple[int, int | None] | None:
        """Returns the worker and dp rank of the request's session, None if it is not bound."""
        return None if self._affinity is None else self._affinity.target(request)

    def are_all_busy(self, candidates: Candidates, request: SelectRequest) -> bool:
        """Returns whether all ranks are busy; this needs no match of the prompt."""
        phase = Phase.PREFILL if request.phase is Phase.BOTH else request.phase
        eligible = candidates.eligible(request.constraints_in(phase), phase)
        return candidates.pool.refusal(in_phase(request.settings, phase), eligible) == selector.BUSY

    def weigh(self, request: SelectRequest, lookup: PromptLookup) -> list[Weighed]:
        """Weighs the candidates for each phase of a request as of now, and chooses none.

        Raises as `Scheduler.select` does, except if no rank can be chosen: the result says why.
        """
        candidates = schedulable(self._candidates, request.key)
        check_constraints(request)
        lookup(candidates.pool)
        return [self._weigh(candidates, request, phase) for phase in request.phases]

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
                self.stream(candidates.key, row.worker_id, row.dp_rank),
                self.expected_ttft_s(candidates, row, phase),
            )
            for at, row in enumerate(pool.explain(settings, eligible, factors))
        ]
        policy = Policy.of(request.settings)
        return Weighed(phase, attempt.basis, policy, settings, chances, rows)

    def stream(self, key: PartitionKey, worker_id: InstanceId, dp_rank: int) -> StreamHealth | None:
        """Returns the health of a rank's stream, None without one."""
        listener = self._registry.find_listener(RankKey(key, worker_id, dp_rank))
        return None if listener is None else listener.health(self._clock())


def awaited(candidates: Candidates, request: SelectRequest) -> int:
    """Returns the bits of the ranks whose loads decide whether a selection can be served."""
    ranks = 0
    for phase in request.phases:
        eligible = candidates.eligible(request.constraints_in(phase), phase)
        if eligible is None:
            return ANYONE
        ranks |= int.from_bytes(eligible, "little")
    return ranks


def check_constraints(request: SelectRequest) -> None:
    """Raises BadRequest for constraints that contradict each other, or lack what the mode needs."""
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
