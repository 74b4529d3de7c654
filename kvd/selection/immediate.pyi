from typing import NamedTuple

from kvd.selection.candidates import Fleet
from kvd.selection.service import Selections

class Booked(NamedTuple):
    worker_id: int
    dp_rank: int
    prefill_tokens: int

class ImmediateSelection:
    booked_at: float
    def __init__(self, selections: Selections) -> None: ...
    def suits(
        self, fleet: Fleet | None, reservation_id: str | None, session_id: str | None
    ) -> bool: ...
    def select(
        self, fleet: Fleet, reservation_id: str, expected: int | None = None
    ) -> Booked | None: ...

class ImmediateSteps:
    def __init__(self, selections: Selections) -> None: ...
    def prefill_complete(self, reservation_id: str) -> int: ...
    def free(self, reservation_id: str) -> int: ...
