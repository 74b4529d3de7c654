from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, type_check_only

from kvd.http.fast_path import Answerer
from kvd_core.base.draws import Draws
from kvd_core.json.scan import BodyScanner

@type_check_only
class Selections(Protocol):
    options: Any
    reservations: Any
    scheduler: Any
    affinity: Any
    clock: Callable[[], float]
    @property
    def draws(self) -> Draws: ...
    @property
    def fleets(self) -> Mapping[Any, Any]: ...

class PlainPrompt(Answerer):
    FIELDS: ClassVar[tuple[str, ...]]
    def __init__(
        self, scanner: BodyScanner, selections: Selections, model: str, tenant: str
    ) -> None: ...

class PlainSelect(PlainPrompt):
    def __init__(
        self, scanner: BodyScanner, selections: Selections, model: str, tenant: str, books: bool
    ) -> None: ...

class PlainLoads(PlainPrompt): ...

class PlainStep(Answerer):
    def __init__(self, selections: Selections) -> None: ...

class PlainPrefillComplete(PlainStep): ...
class PlainFree(PlainStep): ...
class PlainAllLoads(PlainStep): ...
