"""Steps that came before the booking of their request, and wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.shared_state.entries import Dot, Name
from kvd.shared_state.requests import ForeignStep

# Steps that wait for their booking, and how long: with replica sync on, too, a step may overtake
# its booking. Beyond the bound the oldest are dropped.
MAX_EARLY = 65_536
EARLY_S = 60.0


@dataclass(slots=True)
class _Waiting:
    """The steps of one request."""

    since: float
    steps: list[ForeignStep] = field(default_factory=list)


class HeldSteps:
    """Steps by the dot of their booking, or by the name of their request where that is all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.dropped = 0  # requests whose steps were dropped because too many waited
        self._clock = clock
        self._waiting: dict[Dot | Name, _Waiting] = {}
        self._steps = 0

    def __len__(self) -> int:
        return self._steps

    def hold(self, of: Dot | Name, step: ForeignStep) -> None:
        waiting = self._waiting.get(of)
        if waiting is None:
            waiting = self._waiting[of] = _Waiting(self._clock())
        waiting.steps.append(step)
        self._steps += 1
        while self._steps > MAX_EARLY:
            self.take(next(iter(self._waiting)))
            self.dropped += 1

    def take(self, of: Dot | Name) -> list[ForeignStep]:
        """Returns the steps that wait for a booking, in their order; they wait no more."""
        waiting = self._waiting.pop(of, None)
        if waiting is None:
            return []
        self._steps -= len(waiting.steps)
        return waiting.steps

    def drop_old(self) -> None:
        """Drops the steps that have waited for EARLY_S."""
        before = self._clock() - EARLY_S
        for of in [of for of, waiting in self._waiting.items() if waiting.since < before]:
            self.take(of)
