from collections.abc import Mapping

from kvd.http.fast_path import Answerer
from kvd_core.json.scan import BodyScanner

FIELDS: tuple[str, ...]

class PlainHoldings(Answerer):
    def __init__(
        self,
        scanner: BodyScanner,
        partitions: Mapping[tuple[str, str, int], object],
        tenant: str,
    ) -> None: ...
