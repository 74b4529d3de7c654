"""Logs when the index becomes full, and when it is no longer full."""

from __future__ import annotations

from kvd.telemetry.logs import get_logger
from kvd_core.index.prefix_index import Budget

# Time without a refused block after which the log reports room again. At the limit, evictions make
# room for the next stores, and a line for each change would be one a second.
QUIET_S = 60.0

WAITING = "hashes of one model without tokens or a parent"

log = get_logger(__name__)


class IndexFullLog:
    """Watches a budget, and logs when it begins and ceases to refuse blocks."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._refused = self._crowded = 0  # counts at the last check
        self._refused_before = 0  # refused blocks before the index became full this time
        self._last: float | None = None  # when a check last found refusals; None: there is room

    def check(self, now: float) -> None:
        """Logs a line if the index has become full, or has room; `now` is in monotonic seconds."""
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
