from collections.abc import Callable
from typing import ClassVar, Literal

from kvd.http.hot import HotHandler
from kvd.slots.trackers import SlotTrackers

PARTITION_MEMBERS: tuple[str, ...]
STEP: tuple[str, ...]

class SlotHandler(HotHandler):
    ARRAYS: ClassVar[dict[str, Literal["i64", "hash64"]]]
    FIELDS: ClassVar[tuple[str, ...]]
    def __init__(self, slots: SlotTrackers) -> None: ...

class AddHandler(SlotHandler):
    def __init__(self, slots: SlotTrackers, clock: Callable[[], float]) -> None: ...

class StepHandler(SlotHandler): ...
class PrefillCompleteHandler(StepHandler): ...
class FreeHandler(StepHandler): ...
class PotentialLoadsHandler(SlotHandler): ...

class LoadsHandler(HotHandler):
    def __init__(self, slots: SlotTrackers) -> None: ...
