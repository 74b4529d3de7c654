from typing import NamedTuple

from kvd.selection.candidates import Candidates
from kvd.selection.service import Selections

class Booked(NamedTuple):
    worker_id: int
    dp_rank: int
    prefill_tokens: int

class ImmediateSelection:
    booked_at: float
    def __init__(self, selections: Selections) -> None: ...
    def suits(
        self, candidates: Candidates | None, reservation_id: str | None, session_id: str | None
    ) -> bool: ...
    def select(
        self, candidates: Candidates, reservation_id: str, expected: int | None = None
    ) -> Booked | None: ...

class ImmediateSteps:
    def __init__(self, selections: Selections) -> None: ...
    def prefill_complete(self, reservation_id: str) -> int: ...
    def free(self, reservation_id: str) -> int: ...
