"""Counts the outcomes, waits and choices of all selections for /metrics.

Every selection whose request could be read gets one outcome. Hot handlers count the selections that
they serve in the same `ChoiceStats` (kvd/faces/selection/handlers.pyx).
"""

from __future__ import annotations

from enum import IntEnum

from kvd.errors import Conflict, KvdError, Unavailable
from kvd.selection.phases import Phase
from kvd.selection.requests import Choice, SelectRequest
from kvd.telemetry.counts import Histogram
from kvd.telemetry.metrics import BUCKETS
from kvd_core.selector.choice_stats import ChoiceStats
from kvd_core.selector.selector import Pool


class SelectionOutcome(IntEnum):
    """The outcome of a selection."""

    SERVED = 0  # the core counts these under the same number
    REPEATED = 1  # a retry that got its first answer again
    NO_WORKERS = 2
    NOT_ELIGIBLE = 3
    OVERLOADED = 4
    QUEUE_FULL = 5
    TIMED_OUT = 6
    STOPPING = 7
    LEFT = 8  # its client went away while it waited
    CONFLICT = 9
    NO_ROOM = 10
    INVALID = 11


# Phases in the order in which the core counts them. Choices have all but the last.
PHASES = (None, Phase.PREFILL, Phase.DECODE, Phase.BOTH)
POSITIONS = {phase: position for position, phase in enumerate(PHASES)}
# Positions of the phases for which ranks are chosen by what they cache.
CACHING = (POSITIONS[None], POSITIONS[Phase.PREFILL])


class Unserved(Unavailable):
    """A refused selection; the reason is counted."""

    def __init__(
        self, outcome: SelectionOutcome, text: str, retry_after_s: int | None = None
    ) -> None:
        super().__init__(text, retry_after_s)
        self.outcome = outcome


# Outcomes of choices with a limit for the time to first token, by whether they are expected to keep
# it.
SLO_OUTCOMES = {True: "met", False: "missed", None: "unknown"}


class SelectionStats:
    """Counts the selections of a service."""

    def __init__(self) -> None:
        self.choice_stats = ChoiceStats()
        self.waits = Histogram(BUCKETS)  # seconds
        self.slo = dict.fromkeys(SLO_OUTCOMES.values(), 0)  # choices with such a limit
        self.fallbacks = 0  # requests for both phases that one worker serves alone
        self.rehashed = 0  # prompts hashed again because the block size changed while they waited

    def served(self, request: SelectRequest, pool: Pool, *choices: Choice) -> None:
        """Counts a selection as served by these choices for the pool's matched prompt."""
        self.choice_stats.serve(request.settings, POSITIONS[request.phase], pool)
        for each in choices:
            phase = POSITIONS[each.phase]
            self.choice_stats.choose(pool, each.settings, each.position, each.best, phase)

    def held(self, request: SelectRequest) -> None:
        self.choice_stats.hold(request.settings, POSITIONS[request.phase])

    def ended(self, request: SelectRequest, outcome: SelectionOutcome) -> None:
        self.choice_stats.end(request.settings, POSITIONS[request.phase], outcome)

    def failed(self, request: SelectRequest, error: KvdError) -> None:
        self.ended(request, _outcome_of(error))


def _outcome_of(error: KvdError) -> SelectionOutcome:
    if isinstance(error, Unserved):
        return error.outcome
    if isinstance(error, Conflict):
        return SelectionOutcome.CONFLICT
    if isinstance(error, Unavailable):  # only a full ledger raises it
        return SelectionOutcome.NO_ROOM
    return SelectionOutcome.INVALID
