from typing import Any, ClassVar, Literal, Protocol, type_check_only

from kvd.http.hot import HotHandler
from kvd.index.registry import Registry

FIELDS: tuple[str, ...]

@type_check_only
class State(Protocol):
    @property
    def partitions(self) -> dict[Any, Any]: ...
    def partition(self, model_name: str, tenant_id: str) -> Any: ...

class QueryHandler(HotHandler):
    ARRAY: ClassVar[dict[str, Literal["u32", "hash64"]]]
    FIELDS: ClassVar[tuple[str, ...]]
    def __init__(self, state: State, registry: Registry) -> None: ...

class HashQueryHandler(QueryHandler): ...
class TieredQueryHandler(QueryHandler): ...
