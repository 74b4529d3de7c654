from collections.abc import Mapping
from typing import Any, Final

from kvd.http.fast_path import Answerer
from kvd_core.json.scan import BodyScanner

FIELDS: Final[tuple[str, ...]]

class PlainQuery(Answerer):
    def __init__(
        self, scanner: BodyScanner, partitions: Mapping[Any, Any], tenant: str
    ) -> None: ...
