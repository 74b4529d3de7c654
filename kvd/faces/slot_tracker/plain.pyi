from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, type_check_only

from kvd.http.fast_path import Answerer
from kvd_core.json.scan import BodyScanner

@type_check_only
class Slots(Protocol):
    @property
    def trackers(self) -> Mapping[Any, Any]: ...

class PlainSlots(Answerer):
    FIELDS: ClassVar[tuple[str, ...]]
    def __init__(self, scanner: BodyScanner, slots: Slots, tenant: str) -> None: ...

class PlainAdd(PlainSlots):
    def __init__(
        self, scanner: BodyScanner, slots: Slots, tenant: str, clock: Callable[[], float]
    ) -> None: ...

class PlainPrefillComplete(PlainSlots): ...
class PlainFree(PlainSlots): ...
class PlainProjection(PlainSlots): ...
class PlainLoads(PlainSlots): ...
