from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Literal

from kvd.faces.common.reader import BodyReader
from kvd.http.hot import HotHandler
from kvd.http.messages import Request, Response
from kvd.index.served_models import ServedModels
from kvd_core.conductor.conductor import Conductor

FIELDS: tuple[str, ...]

class QuestionReader(BodyReader): ...

class QueryHandler(HotHandler):
    ARRAYS: ClassVar[Mapping[str, Literal["u32?", "hash64?"]]]
    def __init__(
        self,
        partitions: Mapping[Any, Any],
        packed: Callable[[Request], Any],
        served: ServedModels,
    ) -> None: ...

class HashQueryHandler(QueryHandler):
    def __init__(
        self,
        partitions: Mapping[Any, Any],
        packed: Callable[[Request], Any],
        served: ServedModels,
        sequence: Callable[[Conductor], Awaitable[None]],
    ) -> None: ...
    async def sequenced(self, request: Request, conductor: Conductor) -> Response: ...
