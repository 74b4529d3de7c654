from collections.abc import Iterator
from typing import Final, TypedDict, type_check_only

from kvd_core.selector.selector import Pool
from kvd_core.selector.settings import Settings

MODES: Final[int]
PHASES: Final[int]
CHOICE_PHASES: Final[int]
OUTCOMES: Final[int]

REGRET_BOUNDS: Final[tuple[int, ...]]
LENGTH_BOUNDS: Final[tuple[int, ...]]
RATE_BOUNDS: Final[tuple[float, ...]]

@type_check_only
class ChoiceSums(TypedDict):
    choices: int
    prompt_tokens: int
    cached_tokens: int
    effective_tokens: int
    chosen_blocks: int
    best_blocks: int
    chosen_tokens: int
    best_tokens: int
    regret: list[int]
    rates: list[int]
    rates_sum: float

class ChoiceStats:
    def __init__(self) -> None: ...
    def serve(self, settings: Settings, phase: int, pool: Pool) -> None: ...
    def end(self, settings: Settings, phase: int, outcome: int) -> None: ...
    def hold(self, settings: Settings, phase: int) -> None: ...
    def choose(
        self, pool: Pool, settings: Settings, candidate: int, best: int, phase: int
    ) -> None: ...
    def outcomes(self) -> Iterator[tuple[int, int, int, int]]: ...
    def held(self) -> Iterator[tuple[int, int, int]]: ...
    def lengths(self) -> tuple[list[int], int]: ...
    def choices(self, phase: int) -> ChoiceSums: ...
