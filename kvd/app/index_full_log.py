"""Logs when the index becomes full, and when it is no longer full."""

from __future__ import annotations

from kvd.telemetry.logs import get_logger
from kvd_core.index.prefix_index import Budget

# Time without a refused block after which the log reports room again: at the limit, what engines
# evict makes room for what they store next, and a line for each would be one a second.
QUIET_S = 60.0

WAITING = "hashes of one model without tokens or a parent"

log = get_logger(__name__)


class IndexFullLog:
    """Follows what a budget refuses, and logs when that begins and ends."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._refused = self._crowded = 0  # at the last check
        self._refused_before = 0  # this time began
        self._last: float | None = None  # when some had been refused; None: there is room

    def check(self, now: float) -> None:
        """Has a line written if that has changed; `now` is in monotonic seconds."""
        budget, refused = self._budget, self._budget.refused
        if refused != self._refused:
            if self._last is None:
                self._refused_before = self._refused
                crowded = budget.crowded - self._crowded == refused - self._refused
                bound = {"bound": WAITING} if crowded else {"max_blocks": budget.max_blocks}
                held = {"blocks": budget.blocks, "pairs": budget.pairs}
                log.warning("index_full", **bound, **held)
            self._refused, self._crowded, self._last = refused, budget.crowded, now
        elif self._last is not None and now - self._last >= QUIET_S:
            self._last = None
            log.info("index_has_room", refused_blocks=refused - self._refused_before)
