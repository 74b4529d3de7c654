from collections.abc import Mapping
from typing import Any, Final

from kvd_core.lane import Answerer
from kvd_core.scan import BodyScanner

FIELDS: Final[tuple[str, ...]]

class PlainQuery(Answerer):
    def __init__(
        self, scanner: BodyScanner, partitions: Mapping[Any, Any], tenant: str
    ) -> None: ...
