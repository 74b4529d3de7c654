"""The outcome of every selection, its wait and its choice, counted for /metrics.

A selection that could be read has one outcome in the end. Hot handlers count what they serve into
the same `ChoiceStats` (kvd/faces/selection/handlers.pyx).
"""

from __future__ import annotations

from enum import IntEnum

from kvd.errors import Conflict, KvdError, Unavailable
from kvd.selection.phases import Phase
from kvd.selection.requests import Choice, SelectRequest
from kvd.telemetry.metrics import BUCKETS, Histogram
from kvd_core.selector.choice_stats import ChoiceStats
from kvd_core.selector.selector import Pool


class SelectionOutcome(IntEnum):
    """The outcome of a selection."""

    SERVED = 0  # as the core has it
    REPEATED = 1  # answered once more, under its Idempotency-Key
    NO_WORKERS = 2
    NOT_ELIGIBLE = 3
    OVERLOADED = 4
    QUEUE_FULL = 5
    TIMED_OUT = 6
    STOPPING = 7
    LEFT = 8  # its client, while it waited
    CONFLICT = 9
    NO_ROOM = 10
    INVALID = 11


# Positions of phases: those of requests, of which choices have all but the last.
PHASES = (None, Phase.PREFILL, Phase.DECODE, Phase.BOTH)
POSITIONS = {phase: position for position, phase in enumerate(PHASES)}


class Unserved(Unavailable):
    """A refused selection; the reason is counted."""

    def __init__(
        self, outcome: SelectionOutcome, text: str, retry_after_s: int | None = None
    ) -> None:
        super().__init__(text, retry_after_s)
        self.outcome = outcome


# Outcomes of limits of the time to the first token, by whether the limit was kept.
SLO_OUTCOMES = {True: "met", False: "missed", None: "unknown"}


class SelectionStats:
    """Counts the selections of a service."""

    def __init__(self) -> None:
        self.choice_stats = ChoiceStats()
        self.waits = Histogram(BUCKETS)  # seconds
        self.slo = dict.fromkeys(SLO_OUTCOMES.values(), 0)  # of choices with such a limit
        self.fallbacks = 0  # requests for both phases that one worker serves
        self.rehashed = 0  # prompts that waited until the block size was another one

    def served(self, ask: SelectRequest, pool: Pool, *choices: Choice) -> None:
        """Counts one as served by these choices, with the prompt that the pool has matched."""
        self.choice_stats.serve(ask.settings, POSITIONS[ask.phase], pool)
        for each in choices:
            phase = POSITIONS[each.phase]
            self.choice_stats.choose(pool, each.settings, each.at, each.best, phase)

    def held(self, ask: SelectRequest) -> None:
        self.choice_stats.hold(ask.settings, POSITIONS[ask.phase])

    def ended(self, ask: SelectRequest, outcome: SelectionOutcome) -> None:
        self.choice_stats.end(ask.settings, POSITIONS[ask.phase], outcome)

    def failed(self, ask: SelectRequest, error: KvdError) -> None:
        self.ended(ask, _outcome_of(error))


def _outcome_of(error: KvdError) -> SelectionOutcome:
    if isinstance(error, Unserved):
        return error.outcome
    if isinstance(error, Conflict):
        return SelectionOutcome.CONFLICT
    if isinstance(error, Unavailable):  # only the ledger says so
        return SelectionOutcome.NO_ROOM
    return SelectionOutcome.INVALID
